from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import Alias, LeafSpec, contiguous_strides, whole_leaf
from everstep.checkpoint.manifest_types import Draft
from everstep.checkpoint.segment_format import align_up
from everstep.checkpoint.shard_rules_plan import check_draft, is_dense
from everstep.core.errors import CorruptDataError
from everstep.core.ids import CheckpointId

LEAVES = (
    whole_leaf("big", "float32", (1024, 1024)),
    whole_leaf("small", "int8", (3,)),
    whole_leaf("half", "float16", (5,)),
)
LAYOUT = plan_layout(
    LEAVES,
    [Alias(name="tied", of="small", offset_bytes=1, dtype="int8", shape=(2,), strides=(1,))],
    segment_count=2,
)
DRAFT = Draft(
    checkpoint=CheckpointId(2, 7),
    rank=0,
    world_size=2,
    parent=CheckpointId(1, 5),
    layout_digest=LAYOUT.digest,
    leaves=LAYOUT.leaves,
    aliases=LAYOUT.aliases,
    pieces=LAYOUT.pieces,
    segments=LAYOUT.segments,
    values=b"{}",
)
SLOT_BYTES = LAYOUT.slot_size_bytes

dtypes = st.sampled_from(["float32", "bfloat16", "bool", "complex128", "float8_e8m0fnu", "int64"])
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(st.lists(st.tuples(dtypes, shapes), max_size=8), st.integers(1, 9))
def test_every_layout_passes(found: list[tuple[str, tuple[int, ...]]], segment_count: int) -> None:
    leaves = [whole_leaf(f"leaf.{place}", *each) for place, each in enumerate(found)]
    layout = plan_layout(leaves, [], segment_count=segment_count)
    draft = replace(
        DRAFT, leaves=layout.leaves, aliases=(), pieces=layout.pieces, segments=layout.segments, values=b"[]"
    )
    check_draft(draft, layout.slot_size_bytes)
    assert {piece.leaf for piece in draft.pieces} == {leaf.name for leaf in leaves}


def test_the_sample_draft_is_cut_and_passes() -> None:
    check_draft(DRAFT, SLOT_BYTES)
    assert len(DRAFT.segments) == 2
    assert any(piece.key.startswith("big@") for piece in DRAFT.pieces)


def edit(table: str, place: int, **changes: Any) -> Callable[[Draft], Draft]:
    def change(draft: Draft) -> Draft:
        rows = list(getattr(draft, table))
        rows[place] = replace(rows[place], **changes)
        return replace(draft, **{table: tuple(rows)})  # pyright: ignore[reportArgumentType]

    return change


def edit_entry(place: int, entry: int, **changes: Any) -> Callable[[Draft], Draft]:
    def change(draft: Draft) -> Draft:
        entries = list(draft.segments[place].entries)
        entries[entry] = replace(entries[entry], **changes)
        return edit("segments", place, entries=tuple(entries))(draft)

    return change


def without(table: str, place: int) -> Callable[[Draft], Draft]:
    def change(draft: Draft) -> Draft:
        rows = list(getattr(draft, table))
        del rows[place]
        return replace(draft, **{table: tuple(rows)})  # pyright: ignore[reportArgumentType]

    return change


def twice(table: str) -> Callable[[Draft], Draft]:
    return lambda draft: replace(draft, **{table: (*getattr(draft, table), getattr(draft, table)[0])})


BIG_PIECE = DRAFT.pieces[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda draft: replace(draft, rank=2), "not below its world size"),
        (lambda draft: replace(draft, parent=CheckpointId(2, 7)), "not older"),
        (edit("leaves", 1, name="big"), "two leaves are named 'big'"),
        (edit("leaves", 1, name="tied"), "two leaves are named 'tied'"),
        (edit("leaves", 1, name="__metadata__"), "cannot be named"),
        (edit("leaves", 0, strides=(1024, 2)), "not dense"),
        (edit("leaves", 1, dtype="uint8"), "written as I8, its leaf is uint8"),
        (edit("leaves", 1, shape=(4,), global_shape=(4,)), "stored under the key"),
        (without("leaves", 1), "unknown leaf"),
        (edit("aliases", 0, of="nobody"), "unknown leaf 'nobody'"),
        (edit("aliases", 0, offset_bytes=2), "reaches byte 4"),
        (edit("aliases", 0, strides=(9,)), "reaches byte"),
        (edit("aliases", 0, strides=()), "differ in length"),
        (edit("segments", 0, segment=1), "stands at place 0"),
        (edit("segments", 1, slot_offset_bytes=4096), "inside the one before"),
        (edit("segments", 1, slot_offset_bytes=DRAFT.segments[1].slot_offset_bytes + 512), "not a multiple"),
        (edit("segments", 1, slot_offset_bytes=SLOT_BYTES - 4096), "of a slot of"),
        (edit("segments", 0, slot_offset_bytes=-4096), "inside the one before"),
        (edit("segments", 0, header_size_bytes=8192), "the layout has 8192"),
        (edit("segments", 0, header_size_bytes=0), "the layout has 0"),
        (edit("segments", 1, data_size_bytes=5), "5 bytes of data"),
        (lambda draft: replace(draft, segments=draft.segments * 3000), "over the limit of 4096"),
        (edit_entry(0, 0, begin=4), "expected to begin at 0"),
        (edit_entry(0, 0, dtype="F64"), "does not fill"),
        (edit_entry(0, 0, dtype="F31"), "unknown dtype"),
        (edit_entry(0, 0, shape=(1, 1)), "does not fill"),
        (edit_entry(1, -1, key="big@0:1"), "no entry of its own"),
        (edit_entry(1, -1, key="\ud800"), "surrogates"),
        (without("pieces", 0), "belongs to no leaf"),
        (twice("pieces"), "no entry of its own"),
        (edit("pieces", 0, segment=1), "no entry of its own"),
        (edit("pieces", 0, leaf="nobody"), "unknown leaf"),
        (edit("pieces", 0, leaf="half"), "written as F32"),
        (edit("pieces", 0, size_bytes=BIG_PIECE.size_bytes + 4), "bytes, its entry"),
        (edit("leaves", 0, shape=(0, 1024), global_shape=(0, 1024)), "'big' is empty"),
        (edit("leaves", 0, shape=(4, 0), global_shape=(4, 0)), "'big' is empty"),
        (edit("pieces", 0, offset_in_leaf_bytes=4), "begins at byte 4, expected 0"),
    ],
)
def test_each_violation_is_named(change: Callable[[Draft], Draft], reason: str) -> None:
    with pytest.raises(CorruptDataError, match=reason):
        check_draft(change(DRAFT), SLOT_BYTES)


def test_entries_must_be_aligned_to_their_elements() -> None:
    layout = plan_layout([whole_leaf("a", "int8", (3,)), whole_leaf("b", "int8", (4,))], [], segment_count=1)
    plan = layout.segments[0]
    entries = (plan.entries[0], replace(plan.entries[1], dtype="F32", shape=(1,)))
    leaves = (layout.leaves[0], whole_leaf("b", "float32", (1,)))
    draft = replace(
        DRAFT, leaves=leaves, aliases=(), pieces=layout.pieces, segments=(replace(plan, entries=entries),)
    )
    with pytest.raises(CorruptDataError, match="not aligned to its element size"):
        check_draft(draft, layout.slot_size_bytes)


def test_a_strided_leaf_cannot_be_in_pieces() -> None:
    leaf = replace(LEAVES[0], strides=(1, 1024))
    draft = replace(DRAFT, leaves=(leaf, *LEAVES[1:]))
    with pytest.raises(CorruptDataError, match="not in row-major order"):
        check_draft(draft, SLOT_BYTES)


@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_any_order_of_dimensions_is_dense_and_a_gap_is_not(order: list[int], shape: list[int]) -> None:
    stored = contiguous_strides(tuple(shape[dim] for dim in order))
    strides = [0, 0, 0]
    for dim, stride in zip(order, stored, strict=True):
        strides[dim] = stride
    assert is_dense(tuple(shape), strides)
    if max(shape) > 1:
        assert not is_dense(tuple(shape), [2 * stride for stride in strides])
        assert not is_dense(tuple(shape), [0, 0, 0])


def test_leaf_spec_of_an_empty_tensor_is_dense_whatever_its_strides() -> None:
    leaf = LeafSpec(
        name="e", dtype="bool", shape=(0, 2), strides=(9, 9), global_shape=(0, 2), global_offset=(0, 0)
    )
    assert is_dense(leaf.shape, leaf.strides)


def placed(*offsets: int) -> Draft:
    """The sample draft with its two segments elsewhere in the slot."""
    plans = [
        replace(plan, slot_offset_bytes=offset) for plan, offset in zip(DRAFT.segments, offsets, strict=True)
    ]
    return replace(DRAFT, segments=tuple(plans))


def test_in_a_ring_segments_may_have_one_place_but_not_half_of_one() -> None:
    """And the second may lie before the first; all inside the slot."""
    room = max(align_up(plan.file_size_bytes) for plan in DRAFT.segments)
    for offsets in ((0, 0), (room, 0), (0, room)):
        check_draft(placed(*offsets), 2 * room, is_ring=True)
    for offsets, size in (
        ((0, 4096), 2 * room),
        ((4096, 0), 2 * room),
        ((0, 0), room - 4096),
        ((1, 1), 2 * room),
    ):
        with pytest.raises(CorruptDataError, match="segment"):
            check_draft(placed(*offsets), size, is_ring=True)
    for offsets in ((0, 0), (room, 0)):
        with pytest.raises(CorruptDataError, match="segment 1 begins"):
            check_draft(placed(*offsets), 2 * room)
