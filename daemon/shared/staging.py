"""The memory of shared batches: what a job stages them in, and what is kept for all. All calls block, for threads.

A staging is the daemon's memfd, fixed in size, written by one job. A kept batch is a memfd of its own that nobody can
write to any more: jobs map it while they copy it, and its memory is free when the last of them has let go.
"""

import fcntl
import mmap
import os

from ...checkpoint import linux
from ...checkpoint.checksum import block_checksum
from ...core.errors import CorruptDataError, MemoryRefusedError, UsageError

_SEALS_FOR_GOOD = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_staging(size_bytes: int) -> int:
    """Return the descriptor of a new memfd of fixed size, all of its pages there.

    Raises:
        MemoryRefusedError: the kernel has no room for it.
    """
    fd = _allocated("everstep-share-staging", size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, linux.SEALS_FIXED_SIZE)
    return fd


def copy_batch(staging: int, offset_bytes: int, size_bytes: int, xxh3: int) -> int:
    """Return the descriptor of an immutable copy of a range of a staging.

    Raises:
        UsageError: the range lies outside.
        CorruptDataError: the copy has another checksum.
        MemoryRefusedError: the kernel has no room for it.
    """
    staged_bytes = os.fstat(staging).st_size
    if offset_bytes + size_bytes > staged_bytes:
        raise UsageError(
            f"a batch at {offset_bytes} of {size_bytes} bytes is not within the staging of {staged_bytes}"
        )
    fd = _allocated("everstep-share-batch", size_bytes)
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # the kernel maps its pages many at a time
        with mmap.mmap(fd, size_bytes, flags) as target, memoryview(target) as view:
            _read_all(staging, offset_bytes, view)
            found = block_checksum(view)
        if found != xxh3:
            raise CorruptDataError(f"a staged batch has the checksum {found:016x}, not {xxh3:016x}")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS_FOR_GOOD)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _allocated(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        linux.fallocate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise MemoryRefusedError(
            f"{size_bytes} bytes could not be allocated: {error}", hint="free memory, or lower the budget"
        ) from error
    return fd


def _read_all(fd: int, offset_bytes: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            count = os.preadv(fd, [rest], offset_bytes + done)
        if count == 0:
            raise CorruptDataError(f"a staging ended {len(view) - done} bytes too early")
        done += count
