"""madvise(2): what a process tells the kernel of its memory, and asks of it, by address: Python's own is mmap's."""

import os
from typing import Protocol, cast

from cffi import FFI

REMOVE = 9
DONTFORK = 10
DONTDUMP = 16
POPULATE_WRITE = 23
"""Since Linux 5.14; changes no byte."""
COLLAPSE = 25
"""Since Linux 6.1."""

_ffi = FFI()
_ffi.cdef("int madvise(uintptr_t begin, size_t size, int advice);")


class _Libc(Protocol):
    def madvise(self, begin: int, size_bytes: int, advice: int, /) -> int: ...


_libc = cast("_Libc", _ffi.dlopen(None))


def address_of(octets: memoryview) -> int:
    """Return where bytes lie, for as long as a view of them is there."""
    with _ffi.from_buffer(octets) as pin:
        return int(_ffi.cast("uintptr_t", pin))


def madvise(address: int, size_bytes: int, advice: int) -> bool:
    """Advise on the pages of a range, which begins at one; tell whether the kernel took it. Lets go of the GIL."""
    return not _libc.madvise(address, size_bytes, advice)


def require(address: int, size_bytes: int, advice: int) -> None:
    """Advise, and raise OSError where the kernel does not take it."""
    if not madvise(address, size_bytes, advice):
        raise OSError(_ffi.errno, os.strerror(_ffi.errno))
