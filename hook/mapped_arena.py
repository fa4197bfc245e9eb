"""The trainer's mapping of an arena: made without keeping its descriptor, absent in forked children."""

import os
from typing import Protocol, cast

from cffi import FFI

from ..checkpoint.layout_plan import Layout
from ..core.errors import NodeError

_ffi = FFI()
_ffi.cdef("""
void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
int munmap(void *addr, size_t length);
int madvise(void *addr, size_t length, int advice);
""")
_PROT_READ_WRITE = 3
_MAP_SHARED = 1
_MAP_FAILED = 2**64 - 1
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14."""


_OCTETS, _ADDRESS = _ffi.typeof("char *"), _ffi.typeof("uintptr_t")
"""Parsed here: half a millisecond, at the first use of a text."""


class _Libc(Protocol):
    def mmap(self, addr: "FFI.CData", length: int, *rest: int) -> "FFI.CData": ...
    def munmap(self, addr: "FFI.CData", length: int, /) -> int: ...
    def madvise(self, addr: "FFI.CData", length: int, advice: int, /) -> int: ...


_libc = cast("_Libc", _ffi.dlopen(None))


class MappedArena:
    """Slots in shared memory. `take` and `give` keep the free list; the caller serialises them.

    Python's own mmap would keep a duplicate of the descriptor, which forked loader workers would inherit.
    """

    def __init__(
        self,
        number: int,
        fd: int,
        slot_size_bytes: int,
        slot_count: int,
        *,
        stands_for_bytes: int | None = None,
    ) -> None:
        """Map the arena and close `fd`. A ring stands for a slot of `stands_for_bytes`, for which there was no room."""
        self.is_ring = stands_for_bytes is not None
        self.stands_for_bytes = slot_size_bytes if stands_for_bytes is None else stands_for_bytes
        self.number = number
        self.slot_size_bytes, self.slot_count = slot_size_bytes, slot_count
        self.free: set[int] = set(range(slot_count))
        self.size_bytes = slot_size_bytes * slot_count
        try:
            pointer = _libc.mmap(_ffi.NULL, self.size_bytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
            self.address = int(_ffi.cast(_ADDRESS, pointer))
            if self.address == _MAP_FAILED:
                raise NodeError(
                    f"mapping an arena of {self.size_bytes} bytes failed: {os.strerror(_ffi.errno)}"
                )
        finally:
            os.close(fd)
        self._pointer: FFI.CData | None = pointer
        if _libc.madvise(pointer, self.size_bytes, _MADV_DONTFORK):
            raise NodeError(f"madvise(MADV_DONTFORK) failed: {os.strerror(_ffi.errno)}")

    def fits(self, layout: Layout) -> bool:
        """Tell whether snapshots of this layout go into the slots: each snapshot says itself where its segments lie.

        Through a ring all do for which it is large enough, which their places know.
        """
        return self.is_ring or self.slot_size_bytes >= layout.slot_size_bytes

    def slot_address(self, slot: int) -> int:
        """Return the address of a slot's first byte."""
        return self.address + slot * self.slot_size_bytes

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a writable view; it must not be used after `close`."""
        assert self._pointer is not None
        whole = _ffi.buffer(_ffi.cast(_OCTETS, self._pointer), self.size_bytes)
        return memoryview(whole)[offset_bytes : offset_bytes + size_bytes]

    def populate(self, offset_bytes: int, size_bytes: int) -> None:
        """Map the pages of a range, which begins at one: who comes next need not. A kernel that cannot leaves it be."""
        _libc.madvise(_ffi.cast("void *", self.address + offset_bytes), size_bytes, _MADV_POPULATE_WRITE)

    def next_free(self) -> int | None:
        """Return a free slot, which stays free, or None: who is interrupted has taken none."""
        return min(self.free, default=None)

    def take(self, slot: int) -> None:
        """The slot is used from now on."""
        self.free.discard(slot)

    def give(self, slot: int) -> None:
        """The slot may be used again."""
        self.free.add(slot)

    def close(self) -> None:
        """Unmap. Again is nothing."""
        pointer, self._pointer = self._pointer, None  # first: who is interrupted may come again
        if pointer is not None:
            _libc.munmap(pointer, self.size_bytes)
