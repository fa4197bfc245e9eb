"""A memfd's bytes, mapped as far as it may ever grow and without keeping a descriptor.

Python's own mmap refuses to map beyond the end of a file, and keeps a duplicate of its descriptor: a process with a
thousand datasets would have none left, and each arena would cost one for every engine that moves its bytes. Touching
what lies beyond the end is SIGBUS: only what the file has is read.
"""

import os
from typing import Protocol, cast

from cffi import FFI

_ffi = FFI()
_ffi.cdef("""
void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
int munmap(void *addr, size_t length);
int madvise(void *addr, size_t length, int advice);
""")
_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED = 1
_MADV_REMOVE, _MADV_DONTFORK, _MADV_DONTDUMP = 9, 10, 16


class _Libc(Protocol):
    def mmap(self, addr: "FFI.CData", length: int, *rest: int) -> "FFI.CData": ...
    def munmap(self, addr: "FFI.CData", length: int, /) -> int: ...
    def madvise(self, addr: "FFI.CData", length: int, advice: int, /) -> int: ...


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
    pointer = _libc.mmap(_ffi.NULL, size_bytes, protection, _MAP_SHARED, fd, 0)
    if int(_ffi.cast("intptr_t", pointer)) == -1:
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))
    _libc.madvise(pointer, size_bytes, _MADV_DONTDUMP)  # where the kernel cannot, a dump is larger
    if not is_inherited:
        _libc.madvise(pointer, size_bytes, _MADV_DONTFORK)
    mapped = _ffi.gc(_ffi.cast("char *", pointer), lambda address: _libc.munmap(address, size_bytes))
    octets = memoryview(_ffi.buffer(mapped, size_bytes))
    return octets if is_writable else octets.toreadonly()


def give_pages_back(octets: memoryview, begin_bytes: int) -> None:
    """Free the pages of a writable mapping from there, which is at the begin of one; they read as zeros then."""
    part = _ffi.from_buffer(octets[begin_bytes:])
    if _libc.madvise(_ffi.cast("void *", part), octets.nbytes - begin_bytes, _MADV_REMOVE):
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))
