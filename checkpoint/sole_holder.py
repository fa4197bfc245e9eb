"""Moving a file that nobody else has: not open, not mapped, under no second name."""

import fcntl
import os
import signal
import stat
from pathlib import Path

from . import linux

_AT_FDCWD = -100


def move_alone(fd: int, source: Path, target: Path) -> int | None:
    """Rename `source`, which `fd` is open on for writing, and return its size; None: it is not ours alone.

    A write lease is held meanwhile: the kernel grants it only while no other file description of this inode is open
    or mapped, in any process, and lets whoever opens it wait until the lease is released. Nothing has changed where
    None is returned, except when the file got a second name at the last moment: then it is under neither name.

    Raises:
        OSError: a call failed; the file system may have no leases or no rename that keeps what stands at `target`.
    """
    found = os.fstat(fd)
    if not _is_sole(found) or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return None
    # Whoever opens the file meanwhile makes the kernel send this signal. SIGIO, which it sends else, ends a process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return None
    try:
        linux.rename_noreplace(_AT_FDCWD, str(source), _AT_FDCWD, str(target))
        # A link that was being made while the lease was taken would keep the old content's name.
        if not _is_sole(os.fstat(fd)):
            target.unlink()
            return None
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return found.st_size


def _is_sole(found: os.stat_result) -> bool:
    return found.st_nlink == 1
