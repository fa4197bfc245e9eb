"""Copies that leave the processor's caches to those who compute (copies.c), where a compiler was there."""

from pathlib import Path
from typing import Protocol, cast

from cffi import FFI

_FILE = Path(__file__).with_name("_copies.abi3.so")

_ffi = FFI()
_ffi.cdef("""
void everstep_copy(uintptr_t to, uintptr_t from, size_t size);
void everstep_gather(uintptr_t targets, uintptr_t sources, size_t source_count);
""")


class Copies(Protocol):
    """Called without the GIL, by address; nothing may overlap."""

    def everstep_copy(self, to: int, source: int, size_bytes: int, /) -> None:
        """Copy bytes."""
        ...

    def everstep_gather(self, targets: int, sources: int, source_count: int, /) -> None:
        """Copy from many places to few: arrays of struct iovec, of equal total length."""
        ...


def load_copies(file: Path = _FILE) -> Copies | None:
    """Return them; None: they were not compiled, or from another version's source."""
    try:
        library = cast("Copies", _ffi.dlopen(str(file)))
        _ = library.everstep_copy, library.everstep_gather
    except (OSError, AttributeError):
        return None
    return library


COPIES = load_copies()
