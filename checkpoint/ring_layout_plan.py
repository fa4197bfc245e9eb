"""Where every byte of a state lies that is larger than its slot: segments take turns in the windows of a ring. Pure.

The trainer copies segment after segment; the window of one that is written is filled again. A window holds the whole
file of a segment, so what cannot be cut (a row of a tensor, a tensor that is not contiguous) has to fit in one.
"""

import json
from collections.abc import Sequence

from ..core.errors import MemoryRefusedError
from ..core.sizes import size_text
from .layout_plan import CUT_MIN_BYTES, Layout, Part, Windows, assemble, storage_order
from .leaf import LeafSpec
from .segment_format import align_up

WINDOWS_PER_DEVICE = 4
"""Two being written, one copied, one in between. More and smaller ones gain nothing."""

WINDOW_BYTES_MIN = 4 * 1024 * 1024
"""A file below that is more calls than bytes."""

SEGMENTS_MOST = 1000
"""Windows are made no smaller than for about so many segments: all files of a shard are open while it is written."""

HEADER_BYTES = 3 * 4096
"""At most, of a file without entries: length field, stamp, padding before and behind the data."""


def least_ring_bytes(layout: Layout, staged_bytes: int) -> int:
    """Return the size of the smallest slot that `plan_ring` takes for this state, cut or not."""
    return least_window_bytes(layout.leaves) + layout.draft_capacity_bytes + staged_bytes


def plan_ring(layout: Layout, *, slot_size_bytes: int, staged_bytes: int, device_count: int) -> Layout:
    """Return how the state of `layout` streams through a slot of `slot_size_bytes`: windows, then the draft's region.

    Behind that `staged_bytes` are left over.

    Raises:
        MemoryRefusedError: what cannot be cut does not fit in a window.
    """
    room_bytes = slot_size_bytes - layout.draft_capacity_bytes - staged_bytes
    least_bytes = least_window_bytes(layout.leaves)
    count = min(WINDOWS_PER_DEVICE * device_count, room_bytes // least_bytes)
    if count < 1:
        needed, given = least_ring_bytes(layout, staged_bytes), slot_size_bytes
        raise MemoryRefusedError(
            f"the state would need a ring of {size_text(needed)} to stream through, and has {size_text(given)}",
            hint="raise memory.arena_max_bytes or free memory",
        )
    windows = Windows(count=count, size_bytes=room_bytes // count // 4096 * 4096)
    return assemble(
        layout.leaves,
        layout.aliases,
        _fill(storage_order(layout.leaves), windows.size_bytes),
        draft_capacity_bytes=layout.draft_capacity_bytes,
        cut=f"{windows.count} windows of {windows.size_bytes}",
        windows=windows,
    )


def least_window_bytes(leaves: Sequence[LeafSpec]) -> int:
    """Return the size of the smallest window through which such a state goes."""
    uncut = max((_uncut_bytes(leaf) + _entry_bytes(leaf) for leaf in leaves), default=0)
    state = sum(leaf.size_bytes for leaf in leaves)
    return align_up(max(WINDOW_BYTES_MIN, HEADER_BYTES + uncut, state // SEGMENTS_MOST))


def _uncut_bytes(leaf: LeafSpec) -> int:
    """Return the bytes of a leaf that have to stay together."""
    return leaf.size_bytes // leaf.shape[0] if _may_cut(leaf) else leaf.size_bytes


def _may_cut(leaf: LeafSpec) -> bool:
    return leaf.is_contiguous and bool(leaf.shape) and leaf.shape[0] > 1 and leaf.size_bytes > 0


def _entry_bytes(leaf: LeafSpec) -> int:
    """Return a bound on what a part of a leaf adds to a header: every number in it has at most 20 digits."""
    key_bytes = len(json.dumps(leaf.name, ensure_ascii=False).encode())
    return key_bytes + 160 + 21 * len(leaf.shape)


def _fill(leaves: Sequence[LeafSpec], window_bytes: int) -> list[list[Part]]:
    """Return the parts of each segment: as much as goes into a window, one after the other."""
    shares: list[list[Part]] = []
    room = 0
    for leaf in leaves:
        start, is_done = 0, False
        while not is_done:
            part = _cut(leaf, start, room - _entry_bytes(leaf), is_fresh=bool(shares) and not shares[-1])
            if part is None:
                assert not shares or shares[-1], f"{leaf.name} does not fit in a window of {window_bytes}"
                shares.append([])
                room = window_bytes - HEADER_BYTES
                continue
            shares[-1].append(part)
            room -= part.size_bytes + _entry_bytes(leaf)
            start, is_done = part.stop, part.offset_bytes + part.size_bytes == leaf.size_bytes
    return shares


def _cut(leaf: LeafSpec, start: int, room: int, *, is_fresh: bool) -> Part | None:
    """Return the rows of `leaf` from `start` on that go into `room` bytes; None: nothing worth a cut does."""
    rows = leaf.shape[0] if leaf.shape else 1
    row_bytes = leaf.size_bytes // rows if rows else 0
    begin = start * row_bytes
    if leaf.size_bytes - begin <= room:
        return Part(leaf=leaf, start=start, stop=rows, offset_bytes=begin, size_bytes=leaf.size_bytes - begin)
    fitting = room // row_bytes if _may_cut(leaf) else 0
    if fitting < 1 or (fitting * row_bytes < CUT_MIN_BYTES and not is_fresh):
        return None
    return Part(
        leaf=leaf, start=start, stop=start + fitting, offset_bytes=begin, size_bytes=fitting * row_bytes
    )
