"""Starts node daemons that may be killed while they recover: each line on stdin is a configuration file and a number.

A daemon is a process of its own, forked from this one, which has imported everything. It ends by SIGKILL, its own, at
that call on a device; 0: it is spared. Lines on stdout: `pid N`, `ready N` (calls until then), `ended STATUS`.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from everstep.checkpoint.real_storage import RealStorage
from everstep.daemon.devices import stores
from everstep.daemon.main import run_daemon


def say(*words: object) -> None:
    """Write one line at once."""
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


class MortalStorage:
    """The real calls on devices, counted; the process does not survive the one that it is told."""

    def __init__(self, fatal_call: int) -> None:
        self._real = RealStorage()
        self._fatal_call = fatal_call
        self._lock = threading.Lock()
        self.call_count = 0

    def __getattr__(self, name: str) -> object:
        real = getattr(self._real, name)
        return self._counted(real) if callable(real) else real

    def _counted(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with self._lock:
                self.call_count += 1
                if self.call_count == self._fatal_call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call


class Readiness(logging.Handler):
    """Says when the daemon is ready."""

    def __init__(self, storage: MortalStorage) -> None:
        super().__init__()
        self._storage = storage

    def emit(self, record: logging.LogRecord) -> None:
        """Look for the one message."""
        if record.getMessage().startswith("daemon_ready"):
            say("ready", self._storage.call_count)


def live(config: Path, fatal_call: int) -> NoReturn:
    """Be a daemon."""
    storage = MortalStorage(fatal_call)
    stores.RealStorage = lambda: storage
    logging.getLogger("everstep.daemon.main").addHandler(Readiness(storage))
    log = os.open(config.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    run_daemon(config_path=config, socket_path=None, private=False)
    logging.shutdown()
    os._exit(0)


def main() -> None:
    """Let one daemon after the other live."""
    for line in sys.stdin:
        config, fatal_call = json.loads(line)
        pid = os.fork()
        if not pid:
            say("pid", os.getpid())  # before it can be ready, however late its parent goes on
            try:
                live(Path(config), fatal_call)
            finally:
                os._exit(1)  # its end is its parent's to tell
        _, status = os.waitpid(pid, 0)
        say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
