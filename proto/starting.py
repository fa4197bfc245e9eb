"""Starts a private daemon: one per user, started by one of many processes under a lock file."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from ..core.errors import DaemonUnavailableError
from ..core.paths import ensure_private_directory

START_DEADLINE_S = 30.0
_POLL_S = 0.02
_LOG_TAIL_BYTES = 2000

PRIVATE_VARIABLE = "EVERSTEP_PRIVATE_DAEMON"
"""`never`: on a node that has a daemon of its own, nobody starts a private one while that one is away for a moment."""

T = TypeVar("T")


def start_and_connect(path: Path, connect: Callable[[], T]) -> T:
    """Return what `connect` returns once a private daemon answers on `path`: started here unless one does by now.

    Raises:
        DaemonUnavailableError: it could not be started, or must not be; the message holds the end of its log.
        EverstepError: as `connect` raises it.
    """
    if os.environ.get(PRIVATE_VARIABLE) == "never":
        raise DaemonUnavailableError(
            f"no daemon answers on {path}, and ${PRIVATE_VARIABLE} is 'never'",
            hint="start the node's: everstep daemon --config FILE",
        )
    ensure_private_directory(path.parent)
    with _start_lock(path.parent):
        with contextlib.suppress(DaemonUnavailableError):  # somebody else was faster
            return connect()
        return _connect_when_ready(path, _spawn(path), connect)


@contextlib.contextmanager
def _start_lock(directory: Path) -> Generator[None]:
    fd = os.open(directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _spawn(path: Path) -> int:
    """Start the daemon by posix_spawn (no fork of a process with threads and CUDA), in a session of its own.

    It closes what it inherits beyond stdio and changes to `/` itself, before it does anything else.
    """
    log = path.with_name("daemon.log")
    arguments = [sys.executable, "-P", "-m", "everstep.daemon", "--private", "--socket", str(path)]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.posix_spawn(
        sys.executable,
        arguments,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _connect_when_ready(path: Path, pid: int, connect: Callable[[], T]) -> T:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            return connect()
        except DaemonUnavailableError as error:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                raise DaemonUnavailableError(
                    f"the private daemon ended at once; its log says:\n{_log_tail(path)}",
                    hint=f"the whole log is {path.with_name('daemon.log')}",
                ) from error
            if time.monotonic() > deadline_s:
                raise DaemonUnavailableError(
                    f"the private daemon (pid {pid}) did not answer on {path} within {START_DEADLINE_S:.0f} s",
                    hint=f"look at {path.with_name('daemon.log')}",
                ) from error
            time.sleep(_POLL_S)


def _log_tail(path: Path) -> str:
    try:
        content = path.with_name("daemon.log").read_bytes()
    except OSError as error:
        return f"(no log: {error})"
    return content[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
