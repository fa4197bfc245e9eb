"""Files out of memory, without root: what posix_fadvise does, and whether it did."""

import errno
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cffi

LOOKS = 256
"""At so many files at most it is seen whether their pages are gone."""
_PAGE = mmap.PAGESIZE
_CAP_FOWNER = 1 << 3
_ALL_USERS = str(2**32 - 1)
"""Of a uid_map's line that maps every user, as that of the first namespace does."""
_LOW_BIT = bytes(value & 1 for value in range(256))

_ffi = cffi.FFI()
_ffi.cdef("int mincore(void *address, size_t length, unsigned char *resident);")
_libc: Any = _ffi.dlopen(None)


@dataclass(slots=True)
class Dropped:
    """What became of files that were to leave memory."""

    files: int = 0
    size_bytes: int = 0
    kept: list[str] = field(default_factory=list[str])
    """Still in memory: on tmpfs, or mapped by another process."""
    refused: list[str] = field(default_factory=list[str])
    """Could not be opened."""


def drop(paths: Iterable[str]) -> Dropped:
    """Let the kernel forget the pages of these files, and say which stay in memory all the same."""
    dropped = Dropped()
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            dropped.refused.append(path)
            continue
        try:
            drop_open(fd)
            dropped.files += 1
            dropped.size_bytes += os.fstat(fd).st_size
            if dropped.files <= LOOKS and resident_share(fd) > 0.5:
                dropped.kept.append(path)
        finally:
            os.close(fd)
    return dropped


def drop_open(fd: int) -> None:
    """Let the kernel forget an open file's pages; those not written yet are written first, or they would stay.

    A file that was at rest is not synced: that flushes the drive's cache, for each of a hundred thousand files.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_share(fd) == 0.0:
        return
    try:
        os.fdatasync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EROFS}:
            raise
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(fd: int) -> float:
    """Return how much of an open file is in memory, 0 to 1; 0 where the kernel does not tell this user.

    By mincore, which reads nothing: a preadv with RWF_NOWAIT would start read-ahead of what it looks at.
    """
    status = os.fstat(fd)
    if not status.st_size or not _is_told(fd, status.st_uid):
        return 0.0
    pages = -(-status.st_size // _PAGE)
    with mmap.mmap(fd, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        resident = _ffi.new("unsigned char[]", pages)
        view = _ffi.from_buffer(mapped)
        try:
            if _libc.mincore(view, status.st_size, resident):
                return 0.0
        finally:
            _ffi.release(view)
        found = bytes(_ffi.buffer(resident))
    return found.translate(_LOW_BIT).count(1) / pages


def _is_told(fd: int, owner: int) -> bool:
    """Whether mincore tells us about a file: of all others it calls every page resident.

    The kernel's rule (mm/mincore.c, can_do_mincore): who owns the inode, or might write the file. Root of a user
    namespace, as in a rootless container, is root for the users of that namespace only.
    """
    return (
        owner == os.geteuid()
        or os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)
        or (os.geteuid() == 0 and _owns_all_files())
    )


def _owns_all_files() -> bool:
    """Whether this process has CAP_FOWNER over all users: so it owns what it cannot write, on a read-only mount."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
    users = Path("/proc/self/uid_map").read_text().split()
    return bool(capabilities & _CAP_FOWNER) and users == ["0", "0", _ALL_USERS]
