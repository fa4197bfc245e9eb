"""What direct I/O demands of files: what they say themselves, else what a try shows."""

import errno
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

from .linux import DioAlignment, dio_alignment, is_in_memory

ASSUMED_ALIGNMENT = DioAlignment(memory_bytes=4096, offset_bytes=4096)
"""Enough for every known device, where a file that can do it does not say what it needs."""

_CANNOT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def alignment_in(directory: Path) -> DioAlignment | None:
    """Return what direct I/O demands of a new file in `directory`; None: it cannot do it. Leaves nothing behind.

    Where nobody says, 4 KiB are written and read.

    Raises:
        OSError: no file can be made there, or the try failed for another reason (ENOSPC, EIO).
    """
    file_fd = open_unnamed(directory)
    try:
        told = dio_alignment(file_fd)
        if told is not None:
            return told if told.is_possible else None
        return ASSUMED_ALIGNMENT if _try_to_write(file_fd) and try_to_read(file_fd) else None
    finally:
        os.close(file_fd)


def _try_to_write(file_fd: int) -> bool:
    if is_in_memory(file_fd):
        return False  # tmpfs takes O_DIRECT since Linux 6.6, and goes through its page cache
    with mmap.mmap(-1, ASSUMED_ALIGNMENT.memory_bytes) as block:
        try:
            fcntl.fcntl(file_fd, fcntl.F_SETFL, os.O_DIRECT)
            return os.pwrite(file_fd, block, 0) == len(block)
        except OSError as exc:
            if exc.errno not in _CANNOT:
                raise
            return False


def try_to_read(file_fd: int) -> bool:
    """Tell whether 4 KiB, or what there is, can be read from a file that was opened with O_DIRECT.

    Raises:
        OSError: for another reason than that it cannot do it.
    """
    if is_in_memory(file_fd):
        return False
    with mmap.mmap(-1, ASSUMED_ALIGNMENT.memory_bytes) as block:
        try:
            os.preadv(file_fd, [block], 0)
        except OSError as exc:
            if exc.errno not in _CANNOT:
                raise
            return False
    return True


def open_unnamed(probe_dir: Path) -> int:
    """Return the fd of a new file that has no name (any more): it is gone when the fd is closed, whatever closes it."""
    try:
        return os.open(probe_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT} or not probe_dir.is_dir():
            raise
    file_fd, name = tempfile.mkstemp(prefix=".probe.", dir=probe_dir)
    Path(name).unlink()
    return file_fd
