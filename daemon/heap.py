"""How much freed memory the C library keeps: a daemon lives for months beside training that needs the memory."""

import contextlib
from typing import Protocol, cast

from cffi import FFI

MIB = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
_ARENAS = 2

_ffi = FFI()
_ffi.cdef("int mallopt(int param, int value);")


class _Libc(Protocol):
    def mallopt(self, param: int, value: int) -> int: ...


def give_freed_memory_back() -> None:
    """Let freed memory go to the system, also that of threads; nothing where the C library is another than glibc.

    By default each thread may get a heap of its own, and what a manifest of 5 MB leaves in one is never seen again:
    beside clients that ask for one without end, a daemon took 130 MiB by default and 69 MiB with these limits (256 MiB
    persisted again and again beside `bench/flood.py`; 2 cores, 2026-11-22).
    """
    libc = cast("_Libc", _ffi.dlopen(None))
    with contextlib.suppress(AttributeError):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
        libc.mallopt(_M_MMAP_THRESHOLD, MIB)
        libc.mallopt(_M_TRIM_THRESHOLD, MIB)
