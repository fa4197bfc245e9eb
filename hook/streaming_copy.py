"""Copies that leave the processor's caches to those who compute (streaming_copy.c), where a compiler was there."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from cffi import FFI

STREAMED_BYTES_MIN = 64 * 1024
"""A smaller copy may be read from the caches before it is written out of them."""

_COMPILED = Path(__file__).with_name("_streaming_copy.abi3.so")

_ffi = FFI()
_ffi.cdef("void everstep_stream(uintptr_t to, uintptr_t from, size_t size);")


class _Library(Protocol):
    def everstep_stream(self, to: int, source: int, size_bytes: int, /) -> None: ...


def streaming_copy(compiled: Path = _COMPILED) -> Callable[[int, int, int], object] | None:
    """Return what copies bytes to an address from another, without overlap and the GIL; None: it is not compiled."""
    try:
        library = cast("_Library", _ffi.dlopen(str(compiled)))
    except OSError:
        return None
    return library.everstep_stream
