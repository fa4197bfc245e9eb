"""A service manager for tests: the notify socket, the FD store, socket activation; no systemd is needed.

It speaks the protocols of sd_notify(3) and sd_listen_fds(3), and keeps descriptors as systemd does: by name, over the
death of the process that stored them.
"""

import fcntl
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pausing import SCRIPTS, wait_until

DEADLINE_S = 30.0
_FDS_MAX = 16
_START = """
fd=3
for from in $GIVEN; do eval "exec $fd<&$from $from<&-"; fd=$((fd + 1)); done
unset GIVEN
LISTEN_PID=$$ exec "$@"
"""
"""A shell takes the descriptors to 3 and on, and becomes the daemon, whose pid it knows."""


class ServiceManager:
    """Starts one service at a time. Messages are kept in order; descriptors until they are removed."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.config, self._log = config, folder / "service.log"
        self.messages: list[str] = []
        self.stored: list[tuple[str, int]] = []
        """Name and descriptor, in the order in which they came."""
        self.sockets: list[tuple[str, int]] = []
        """Listening sockets to be handed over, by name."""
        self.process: subprocess.Popen[bytes] | None = None
        self._address = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._address))
        self._taking = threading.Lock()
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def close(self) -> None:
        """End the service and let go of everything."""
        if self.process is not None:
            self.stop()
        os.close(self._stop)
        self._thread.join()
        os.close(self._wake)
        self._socket.close()
        for _, fd in self.stored:
            os.close(fd)

    def names(self) -> list[str]:
        """Return what is stored, everything taken in that was sent until now."""
        while True:
            with self._taking:
                if not select.select([self._socket], [], [], 0)[0]:
                    return [name for name, _ in self.stored]
            time.sleep(0.001)

    def start(self, environment: Mapping[str, str] | None = None, *, ready: bool = True) -> None:
        """Start the service with what is stored; with `ready` return when it says so."""
        given = [*self.sockets, *self.stored]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for _, fd in given]
        already = self.messages.count("READY=1")
        variables = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._address),
            "GIVEN": " ".join(map(str, high)),
            "LISTEN_FDS": str(len(given)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in given),
            **(environment or {}),
        }
        program = [sys.executable, "-P", str(SCRIPTS / "pausing_daemon.py")]
        command = [*program, "daemon", "--config", str(self.config)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", _START, "start", *command],
                env=variables,
                pass_fds=high,
                stdout=log,
                stderr=log,
            )
        for fd in high:
            os.close(fd)
        if ready:
            wait_until(lambda: self.messages.count("READY=1") > already or self._process.poll() is not None)
            assert self._process.poll() is None, self.log()

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer does."""
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self.process = None

    def stop(self) -> int:
        """SIGTERM; return the exit status."""
        self._process.terminate()
        status = self._process.wait(DEADLINE_S)
        self.process = None
        return status

    def log(self) -> str:
        """Return all that the service has ever logged."""
        return self._log.read_text()

    def beats(self) -> int:
        """Return how many heartbeats have come."""
        return self.messages.count("WATCHDOG=1")

    def beats_for(self, seconds: float) -> int:
        """Return how many come within so many seconds from now."""
        before = self.beats()
        time.sleep(seconds)
        return self.beats() - before

    @property
    def _process(self) -> "subprocess.Popen[bytes]":
        assert self.process is not None
        return self.process

    def _receive(self) -> None:
        while True:
            readable, _, _ = select.select([self._socket, self._wake], [], [])
            if self._wake in readable:
                return
            with self._taking:
                content, fds, _, _ = socket.recv_fds(self._socket, 65536, _FDS_MAX)
                self._take(content.decode(), fds)

    def _take(self, message: str, fds: Sequence[int]) -> None:
        fields = dict(line.split("=", 1) for line in message.splitlines())
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            self.stored += [(name, fd) for fd in fds]
        else:
            for fd in fds:
                os.close(fd)
        if fields.get("FDSTOREREMOVE") == "1":
            gone = [each for each in self.stored if each[0] == name]
            self.stored = [each for each in self.stored if each[0] != name]
            for _, fd in gone:
                os.close(fd)
        self.messages.append(message)
