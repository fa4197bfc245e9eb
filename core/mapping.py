"""A memfd's bytes, mapped as far as it may ever grow and without keeping a descriptor.

Python's own mmap refuses to map beyond the end of a file, and keeps a duplicate of its descriptor: a process with a
thousand datasets would have none left, and each arena would cost one for every engine that moves its bytes. Touching
what lies beyond the end is SIGBUS: only what the file has is read.
"""

import os
from functools import partial
from mmap import PAGESIZE
from typing import Protocol, cast
from weakref import ref

from cffi import FFI

from . import advice
from .huge_pages import huge_page_bytes

_ffi = FFI()
_ffi.cdef("""
intptr_t mmap(uintptr_t begin, size_t size, int protection, int flags, int fd, long offset);
int munmap(uintptr_t begin, size_t size, void *unused);
""")
_NULL = _ffi.NULL
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = -1


class _Libc(Protocol):
    def mmap(self, begin: int, size_bytes: int, *rest: int) -> int: ...
    def munmap(self, begin: int, size_bytes: int, unused: object, /) -> int: ...


_libc = cast("_Libc", _ffi.dlopen(None))


def map_shared(
    fd: int, size_bytes: int, *, is_writable: bool = False, is_inherited: bool = True
) -> memoryview:
    """Return `size_bytes` bytes of a memfd, unmapped when no view of them is left; they stay out of core dumps.

    `is_inherited`: a forked child has them, too. Else it neither copies their page tables nor holds their memory.

    Raises:
        OSError: they cannot be mapped.
    """
    protection = _PROT_READ | _PROT_WRITE if is_writable else _PROT_READ
    begin = _mapped(fd, size_bytes, protection)
    advice.madvise(begin, size_bytes, advice.DONTDUMP)  # where the kernel cannot, a dump is larger
    # No Python runs as it goes: an interrupt there would be printed, and lost.
    mapped = _ffi.gc(_ffi.cast("char *", begin), partial(_libc.munmap, begin, size_bytes))
    if not is_inherited:
        _remember(mapped)
        advice.madvise(begin, size_bytes, advice.DONTFORK)
    octets = memoryview(_ffi.buffer(mapped, size_bytes))
    return octets if is_writable else octets.toreadonly()


_not_inherited = set["ref[FFI.CData]"]()
"""Not a WeakSet, whose callback would be Python that runs as a mapping goes."""


def _remember(mapped: "FFI.CData") -> None:
    for each in list(_not_inherited):
        if each() is None:
            _not_inherited.discard(each)
    _not_inherited.add(ref(mapped))


def _let_stand_in_child() -> None:
    """What a forked child has where these mappings were is another thing."""
    for each in _not_inherited:
        if (mapped := each()) is not None:
            _ffi.gc(mapped, None)
    _not_inherited.clear()


os.register_at_fork(after_in_child=_let_stand_in_child)


def _mapped(fd: int, size_bytes: int, protection: int) -> int:
    """Map the bytes: where huge pages may be among them, at an address where these are mapped as such."""
    huge = huge_page_bytes()
    if not 0 < huge <= size_bytes:
        return _mmap(0, size_bytes, protection, _MAP_SHARED, fd)
    # Tried before addresses are taken, which cannot be given back where the second try fails.
    _libc.munmap(_mmap(0, PAGESIZE, protection, _MAP_SHARED, fd), PAGESIZE, _NULL)
    room = size_bytes + huge
    reserved = _mmap(0, room, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    begin = -(-reserved // huge) * huge
    end = -(-(begin + size_bytes) // PAGESIZE) * PAGESIZE
    try:
        return _mmap(begin, size_bytes, protection, _MAP_SHARED | _MAP_FIXED, fd)
    finally:  # where it failed an old kernel has left a hole between these, which another thread may have filled
        for left_over, its_end in ((reserved, begin), (end, reserved + room)):
            if left_over < its_end:
                _libc.munmap(left_over, its_end - left_over, _NULL)


def _mmap(begin: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    begin = _libc.mmap(begin, size_bytes, protection, flags, fd, 0)
    if begin == _FAILED:
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))
    return begin


def give_pages_back(octets: memoryview, begin_bytes: int) -> None:
    """Free the pages of a writable mapping from there, which is at the begin of one; they read as zeros then."""
    advice.require(advice.address_of(octets) + begin_bytes, octets.nbytes - begin_bytes, advice.REMOVE)
