"""The trainer's mapping of an arena: made without keeping its descriptor, absent in forked children."""

import os

from ..checkpoint.layout_plan import Layout
from ..core import advice
from ..core.errors import NodeError
from ..core.mapping import map_shared


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
            self._octets = map_shared(fd, self.size_bytes, is_writable=True, is_inherited=False)
        except OSError as error:
            raise NodeError(
                f"mapping an arena of {self.size_bytes} bytes failed: {error.strerror}"
            ) from error
        finally:
            os.close(fd)
        self.address = advice.address_of(self._octets)

    def fits(self, layout: Layout) -> bool:
        """Tell whether snapshots of this layout go into the slots: each snapshot says itself where its segments lie.

        Through a ring all do for which it is large enough, which their places know.
        """
        return self.is_ring or self.slot_size_bytes >= layout.slot_size_bytes

    def slot_address(self, slot: int) -> int:
        """Return the address of a slot's first byte."""
        return self.address + slot * self.slot_size_bytes

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a writable view, which keeps the whole arena mapped."""
        return self._octets[offset_bytes : offset_bytes + size_bytes]

    def populate(self, offset_bytes: int, size_bytes: int) -> None:
        """Map the pages of a range, which begins at one: who comes next need not. A kernel that cannot leaves it be."""
        advice.madvise(self.address + offset_bytes, size_bytes, advice.POPULATE_WRITE)

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
        """Unmap, once no view is left. Again is nothing."""
        self._octets.release()
