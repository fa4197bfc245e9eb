"""Many small copies in few calls without the GIL: compiled ones, or process_vm_readv of this process itself."""

import errno
import logging
import os
from array import array
from typing import Protocol, cast

import cffi

from ..core.errors import NodeError
from . import copies
from .copy_plan import Gather, Moves
from .tensor_bytes import copy_bytes

logger = logging.getLogger(__name__)

_ffi = cffi.FFI()
_ffi.cdef("""
ssize_t process_vm_readv(int pid, void *local, unsigned long local_count,
                         void *remote, unsigned long remote_count, unsigned long flags);
ssize_t pwritev(int fd, void *sources, int count, long offset);
ssize_t preadv(int fd, void *targets, int count, long offset);
""")

_REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES)
"""What a container's filter of system calls answers."""


SCRATCH_MEAN_BYTES_MAX = 1024
"""Where nothing was compiled, pieces that are no larger on average go through a scratch file: copied twice, but no page
is looked up and pinned for each. 251 of 4 or 1,024 bytes out of cold caches take 0.19 instead of 0.3 ms (2 cores of an
AMD EPYC, bench/results/2026-11-26-profile-stall.txt)."""


class _Libc(Protocol):
    def process_vm_readv(self, pid: int, *rest: object) -> int: ...
    def pwritev(self, fd: int, *rest: object) -> int: ...
    def preadv(self, fd: int, *rest: object) -> int: ...


_libc = cast("_Libc", _ffi.dlopen(None))


class Scratch:
    """A file in memory that tiny pieces go through. Not for several threads at once."""

    def __init__(self) -> None:
        """Make it; it grows to what has gone through it at once, IOVECS_MAX * SCRATCH_MEAN_BYTES_MAX at most."""
        self._fd = os.memfd_create("everstep-scratch", os.MFD_CLOEXEC)

    def gather(self, wanted: Gather) -> bool:
        """Copy where the pieces are tiny and the kernel lets us; tell whether all of it has been copied."""
        if wanted.size_bytes > SCRATCH_MEAN_BYTES_MAX * (len(wanted.sources) // 2):
            return False
        passes = (_libc.pwritev, wanted.sources), (_libc.preadv, wanted.targets)
        return all(
            move(self._fd, _ffi.from_buffer(iovecs), len(iovecs) // 2, 0) == wanted.size_bytes
            for move, iovecs in passes
        )

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


class Gatherer:
    """Makes gathers; where the kernel refuses the call, one copy at a time, and says so once."""

    def __init__(self) -> None:
        """Believe in the kernel until it refuses."""
        self._refused = False

    def gather(self, wanted: Gather) -> None:
        """Copy. Raises NodeError where a source cannot be read or a target not written."""
        targets, sources, left_bytes = wanted.targets, wanted.sources, wanted.size_bytes
        while left_bytes and not self._refused:
            copied = self._call(targets, sources)
            left_bytes -= copied
            if left_bytes and copied:  # the kernel may stop early, between two pages
                targets, sources = _after(targets, copied), _after(sources, copied)
        if left_bytes:
            _one_by_one(targets, sources)

    def _call(self, targets: "array[int]", sources: "array[int]") -> int:
        """Return how many bytes were copied; 0 when the call is refused."""
        local, remote = _ffi.from_buffer(targets), _ffi.from_buffer(sources)
        copied = _libc.process_vm_readv(os.getpid(), local, len(targets) // 2, remote, len(sources) // 2, 0)
        if copied > 0:
            return copied
        number = _ffi.errno
        if copied < 0 and number in _REFUSALS:
            self._refused = True
            logger.warning(
                "gather_refused errno=%s: small tensors are copied one at a time, which takes CPU from training; "
                "allow process_vm_readv in the container's seccomp profile",
                errno.errorcode[number],
            )
            return 0
        raise NodeError(f"process_vm_readv failed: {os.strerror(number) if copied < 0 else 'nothing copied'}")


_gatherer = Gatherer()


def copy(moves: Moves, scratch: Scratch | None = None) -> None:
    """Make all moves into one segment; the GIL is free meanwhile."""
    for gather in moves.gathers:
        if copies.COPIES is not None:
            targets, sources = (iovecs.buffer_info()[0] for iovecs in (gather.targets, gather.sources))
            copies.COPIES.everstep_gather(targets, sources, len(gather.sources) // 2)
        elif scratch is None or not scratch.gather(gather):
            _gatherer.gather(gather)
    for move in moves.large:
        copy_bytes(move.target, move.source, move.size_bytes)


def _after(iovecs: "array[int]", skipped_bytes: int) -> "array[int]":
    """Return what is left of iovecs after so many bytes."""
    index = 0
    while skipped_bytes >= iovecs[index + 1]:
        skipped_bytes -= iovecs[index + 1]
        index += 2
    left = iovecs[index:]
    left[0] += skipped_bytes
    left[1] -= skipped_bytes
    return left


def _one_by_one(targets: "array[int]", sources: "array[int]") -> None:
    """Copy the parts in which neither a source nor a target ends."""
    target, source = 0, 0
    targets, sources = targets[:], sources[:]
    while target < len(targets):
        size = min(targets[target + 1], sources[source + 1])
        copy_bytes(targets[target], sources[source], size)
        for iovecs, index in ((targets, target), (sources, source)):
            iovecs[index] += size
            iovecs[index + 1] -= size
        target += 2 * (targets[target + 1] == 0)
        source += 2 * (sources[source + 1] == 0)
