"""Layouts of a ring: every byte once, no file larger than its window, whatever the leaves are."""

import pytest
from any_leaves import leaves
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from everstep.checkpoint.layout_plan import CUT_MIN_BYTES, plan_layout
from everstep.checkpoint.leaf import LeafSpec, whole_leaf
from everstep.checkpoint.ring_layout_plan import (
    SEGMENTS_MOST,
    WINDOW_BYTES_MIN,
    WINDOWS_PER_DEVICE,
    least_ring_bytes,
    least_window_bytes,
    plan_ring,
)
from everstep.checkpoint.segment_format import align_up
from everstep.checkpoint.shard_rules_plan import SEGMENT_COUNT_MAX, check_segment_plans
from everstep.core.errors import MemoryRefusedError

MIB = 1024**2
UGLY = [
    whole_leaf("\x00\U0001f600" * 200, "float32", (3,)),
    *(whole_leaf(f"tiny.{number}", "bool", (1,) * 20) for number in range(400)),
]
"""Names and shapes of which a header has much to say."""


@given(leaves(), st.booleans(), st.integers(0, 40 * MIB), st.integers(0, MIB), st.integers(1, 9))
def test_any_state_streams_through_the_least_ring_and_any_larger_one(
    specs: list[LeafSpec], is_ugly: bool, more: int, staged: int, devices: int
) -> None:
    specs = [*specs, *(UGLY if is_ugly else [])]
    full = plan_layout(specs, [], segment_count=devices)
    slot = least_ring_bytes(full, staged) + more
    ring = plan_ring(full, slot_size_bytes=slot, staged_bytes=staged, device_count=devices)
    windows = ring.windows
    assert windows is not None
    assert 1 <= windows.count <= WINDOWS_PER_DEVICE * devices
    assert windows.size_bytes >= least_window_bytes(specs)
    assert ring.draft_offset_bytes == windows.count * windows.size_bytes
    assert ring.slot_size_bytes + staged <= slot
    assert ring.draft_capacity_bytes == full.draft_capacity_bytes
    for number, plan in enumerate(ring.segments):
        assert plan.slot_offset_bytes == number % windows.count * windows.size_bytes
        assert align_up(plan.file_size_bytes) <= windows.size_bytes
        assert plan.entries
    check_segment_plans(ring.segments, ring.draft_offset_bytes, is_ring=True)


@given(leaves(), st.integers(0, 9 * MIB))
def test_every_byte_of_each_leaf_lies_in_exactly_one_piece(specs: list[LeafSpec], more: int) -> None:
    full = plan_layout(specs, [], segment_count=1)
    ring = plan_ring(full, slot_size_bytes=least_ring_bytes(full, 0) + more, staged_bytes=0, device_count=1)
    for spec in specs:
        pieces = sorted(
            (piece for piece in ring.pieces if piece.leaf == spec.name),
            key=lambda piece: piece.offset_in_leaf_bytes,
        )
        end = 0
        for piece in pieces:
            assert piece.offset_in_leaf_bytes == end
            end += piece.size_bytes
        assert pieces
        assert end == spec.size_bytes
        assert len(pieces) == 1 or spec.is_contiguous
    assert ring.state_size_bytes == full.state_size_bytes


def test_a_large_tensor_fills_its_windows() -> None:
    full = plan_layout([whole_leaf("w", "float32", (50 * MIB,))], [], segment_count=2)
    slot = 56 * MIB + full.draft_capacity_bytes
    ring = plan_ring(full, slot_size_bytes=slot, staged_bytes=0, device_count=2)
    assert ring.windows is not None
    assert (ring.windows.count, ring.windows.size_bytes) == (8, 7 * MIB)
    assert len(ring.segments) == 29
    assert all(plan.data_size_bytes > 7 * MIB - 64 * 1024 for plan in ring.segments[:-1])


def test_what_cannot_be_cut_makes_windows_larger_and_fewer() -> None:
    row = whole_leaf("row", "int8", (1, 20 * MIB))
    turned = structs.replace(whole_leaf("turned", "int8", (1024, 20 * 1024)), strides=(1, 1024))
    for leaf in (row, turned):
        full = plan_layout([leaf, whole_leaf("rest", "int8", (90 * MIB,))], [], segment_count=4)
        slot = full.draft_capacity_bytes + 50 * MIB
        ring = plan_ring(full, slot_size_bytes=slot, staged_bytes=0, device_count=4)
        assert ring.windows is not None
        assert ring.windows.count == 2
        with pytest.raises(MemoryRefusedError, match=r"ring of 2\d\.\d MiB .* has 2\d\.\d MiB"):
            plan_ring(full, slot_size_bytes=least_ring_bytes(full, 0) - 1, staged_bytes=0, device_count=4)


def test_what_is_copied_at_the_boundary_takes_room_from_the_windows() -> None:
    full = plan_layout([whole_leaf("w", "int8", (90 * MIB,))], [], segment_count=1)
    slot = full.draft_capacity_bytes + 40 * MIB
    sizes = [
        plan_ring(full, slot_size_bytes=slot, staged_bytes=staged, device_count=1).windows
        for staged in (0, 8 * MIB)
    ]
    assert [each and each.size_bytes for each in sizes] == [10 * MIB, 8 * MIB]
    assert least_ring_bytes(full, MIB) == least_ring_bytes(full, 0) + MIB


def test_a_huge_state_gets_no_more_files_than_a_shard_may_have() -> None:
    full = plan_layout(
        [whole_leaf(f"w{number}", "int8", (600, 100 * MIB)) for number in range(12)], [], segment_count=64
    )
    slot = least_ring_bytes(full, 0)
    ring = plan_ring(full, slot_size_bytes=slot, staged_bytes=0, device_count=64)
    assert SEGMENTS_MOST <= len(ring.segments) < SEGMENT_COUNT_MAX


def test_small_leaves_are_not_cut_to_fill_a_window() -> None:
    specs = [whole_leaf(f"w{number}", "int8", (CUT_MIN_BYTES - 1,)) for number in range(20)]
    full = plan_layout(specs, [], segment_count=1)
    ring = plan_ring(full, slot_size_bytes=least_ring_bytes(full, 0), staged_bytes=0, device_count=1)
    assert ring.windows is not None
    assert ring.windows.size_bytes == WINDOW_BYTES_MIN
    assert all(piece.key == piece.leaf for piece in ring.pieces)


def test_other_windows_are_another_placement() -> None:
    full = plan_layout([whole_leaf("w", "int8", (90 * MIB,))], [], segment_count=1)
    digests = {
        plan_ring(full, slot_size_bytes=slot, staged_bytes=0, device_count=1).digest
        for slot in (30 * MIB, 40 * MIB)
    }
    assert len(digests | {full.digest}) == 3
