"""Layouts: every byte once, without holes, aligned, balanced, a pure function of the structure."""

import itertools

import pytest
from any_leaves import leaves
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from everstep.checkpoint.dtype_format import itemsize_bytes, safetensors_dtype
from everstep.checkpoint.layout_plan import (
    CUT_MIN_BYTES,
    LONE_SEGMENT_BYTES_MIN,
    SEGMENT_BYTES_MIN,
    SEGMENTS_PER_DEVICE_MAX,
    plan_layout,
    segment_count_for,
)
from everstep.checkpoint.leaf import Alias, LeafSpec, whole_leaf
from everstep.checkpoint.manifest_types import HEADER_ALIGNMENT_BYTES
from everstep.checkpoint.segment_format import header_size_bytes, item_size_bytes
from everstep.core.errors import UsageError

counts = st.integers(1, 40)


def largest_uncuttable_bytes(specs: list[LeafSpec]) -> int:
    """By so much a boundary between two segments may lie beside the ideal place."""
    largest = 0
    for spec in specs:
        rows = spec.shape[0] if spec.shape else 1
        row_bytes = spec.size_bytes // max(rows, 1)
        may_cut = spec.is_contiguous and rows > 1
        largest = max(
            largest, min(spec.size_bytes, row_bytes + CUT_MIN_BYTES) if may_cut else spec.size_bytes
        )
    return largest


@given(leaves(), counts)
def test_every_byte_of_each_leaf_lies_in_exactly_one_piece(specs: list[LeafSpec], count: int) -> None:
    layout = plan_layout(specs, (), segment_count=count)
    for spec in specs:
        pieces = sorted(
            (piece for piece in layout.pieces if piece.leaf == spec.name),
            key=lambda piece: piece.offset_in_leaf_bytes,
        )
        assert pieces, spec
        end = 0
        for piece in pieces:
            assert piece.offset_in_leaf_bytes == end
            end += piece.size_bytes
        assert end == spec.size_bytes
        assert len(pieces) == 1 or spec.is_contiguous
        assert all(piece.size_bytes >= CUT_MIN_BYTES for piece in pieces) or len(pieces) == 1
    assert layout.state_size_bytes == sum(spec.size_bytes for spec in specs)


@given(leaves(), counts)
def test_segments_are_valid_safetensors_one_behind_the_other(specs: list[LeafSpec], count: int) -> None:
    layout = plan_layout(specs, (), segment_count=count)
    slot_end = 0
    for plan in layout.segments:
        assert plan.slot_offset_bytes == slot_end
        slot_end = -(-(slot_end + plan.file_size_bytes) // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES
        assert plan.header_size_bytes == header_size_bytes(plan.entries)
        end = 0
        for entry in plan.entries:
            assert entry.begin == end
            assert entry.begin % item_size_bytes(entry.dtype) == 0
            count = 1
            for size in entry.shape:
                count *= size
            assert count * item_size_bytes(entry.dtype) == entry.end - entry.begin
            end = entry.end
        assert end == plan.data_size_bytes
        assert len({entry.key for entry in plan.entries}) == len(plan.entries)
    assert layout.draft_offset_bytes == slot_end
    assert layout.slot_size_bytes % HEADER_ALIGNMENT_BYTES == 0


@given(leaves(), counts)
def test_elements_are_aligned_in_the_slot_also_where_they_are_stored_as_bytes(
    specs: list[LeafSpec], count: int
) -> None:
    layout = plan_layout(specs, (), segment_count=count)
    begins = {(plan.segment, entry.key): entry.begin for plan in layout.segments for entry in plan.entries}
    dtypes = {spec.name: spec.dtype for spec in specs}
    for piece in layout.pieces:
        assert begins[piece.segment, piece.key] % itemsize_bytes(dtypes[piece.leaf]) == 0


@given(leaves(), counts)
def test_segments_are_equal_within_the_largest_part_that_cannot_be_cut(
    specs: list[LeafSpec], count: int
) -> None:
    layout = plan_layout(specs, (), segment_count=count)
    total, tolerance = layout.state_size_bytes, largest_uncuttable_bytes(specs)
    assert len(layout.segments) <= count
    for plan in layout.segments:
        assert plan.entries
        assert plan.data_size_bytes <= total / count + 2 * tolerance + 1


@given(leaves(), counts)
def test_a_layout_is_a_pure_function(specs: list[LeafSpec], count: int) -> None:
    assert plan_layout(specs, (), segment_count=count) == plan_layout(list(specs), [], segment_count=count)


def test_the_digest_tells_every_change_of_structure() -> None:
    base = whole_leaf("a", "float32", (8, 4))
    tied = Alias(name="b", of="a", offset_bytes=0, dtype="float32", shape=(8, 4), strides=(4, 1))
    digests = [
        plan_layout([base], (), segment_count=1).digest,
        plan_layout([base], (), segment_count=2).digest,
        plan_layout([base], (tied,), segment_count=1).digest,
        plan_layout([base], (structs.replace(tied, offset_bytes=4),), segment_count=1).digest,
        plan_layout([whole_leaf("a", "int32", (8, 4))], (), segment_count=1).digest,
        plan_layout([whole_leaf("c", "float32", (8, 4))], (), segment_count=1).digest,
        plan_layout([whole_leaf("a", "float32", (4, 8))], (), segment_count=1).digest,
        plan_layout([structs.replace(base, strides=(1, 8))], (), segment_count=1).digest,
        plan_layout([whole_leaf("a", "float32", (8, 4), replicas=2)], (), segment_count=1).digest,
    ]
    for left, right in itertools.combinations(digests, 2):
        assert left != right


def test_a_big_tensor_is_cut_by_rows() -> None:
    spec = whole_leaf("w", "float32", (4096, 1024))
    layout = plan_layout([spec], (), segment_count=2)
    assert [(piece.key, piece.size_bytes) for piece in layout.pieces] == [
        ("w@0:2048", 2048 * 4096),
        ("w@2048:4096", 2048 * 4096),
    ]
    assert layout.segments[1].entries[0].shape == (2048, 1024)


def test_a_tensor_in_another_order_is_stored_in_its_own_order() -> None:
    spec = structs.replace(whole_leaf("w", "float32", (2, 3, 5, 7)), strides=(105, 1, 21, 3))
    (plan,) = plan_layout([spec], (), segment_count=1).segments
    assert plan.entries[0].shape == (2, 5, 7, 3)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e5m2fnuz", "float4_e2m1fn_x2"])
def test_what_safetensors_does_not_know_is_stored_as_bytes(dtype: str) -> None:
    assert safetensors_dtype(dtype) is None
    spec = whole_leaf("w", dtype, (3, 5))
    (plan,) = plan_layout([spec], (), segment_count=1).segments
    assert (plan.entries[0].dtype, plan.entries[0].shape) == ("U8", (spec.size_bytes,))


def test_an_empty_leaf_after_one_that_overfilled_its_segment() -> None:
    specs = [
        whole_leaf("a", "float32", (3,)),
        whole_leaf("b", "float32", (5, 0)),
        whole_leaf("c", "uint8", (1,)),
    ]
    layout = plan_layout(specs, (), segment_count=2)
    assert {piece.leaf for piece in layout.pieces} == {"a", "b", "c"}


def test_no_leaves_make_no_segment() -> None:
    layout = plan_layout([], (), segment_count=2)
    assert layout.segments == ()
    assert layout.draft_offset_bytes == 0
    assert layout.draft_capacity_bytes > 0


def test_room_for_the_draft_grows_with_the_values() -> None:
    small = plan_layout([], (), segment_count=1)
    large = plan_layout([], (), segment_count=1, values_size_bytes=10_000_000)
    assert large.draft_capacity_bytes >= small.draft_capacity_bytes + 10_000_000
    assert large.digest == small.digest


def test_no_segment_and_no_device_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one segment"):
        plan_layout([], (), segment_count=0)
    with pytest.raises(UsageError, match="at least one device"):
        segment_count_for([], 0)


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("state_mib", "device_count", "count"),
    [
        (0, 3, 3),
        (64, 4, 4),
        (2048, 4, 32),
        (512, 4, 8),
        (10**6, 8, 128),
        (511, 1, 1),
        (2048, 1, 8),
        (8192, 1, 16),
    ],
)
def test_a_state_is_cut_finer_while_its_segments_stay_large(
    state_mib: int, device_count: int, count: int
) -> None:
    leaf = whole_leaf("w", "uint8", (state_mib, MIB))
    assert segment_count_for([leaf], device_count) == count


@given(st.integers(0, 1 << 45), st.integers(1, 64))
def test_every_device_has_as_many_segments_and_none_is_needlessly_small(
    size_bytes: int, device_count: int
) -> None:
    count = segment_count_for([whole_leaf("w", "uint8", (size_bytes,))], device_count)
    per_device, rest = divmod(count, device_count)
    assert rest == 0
    assert 1 <= per_device <= SEGMENTS_PER_DEVICE_MAX
    least_bytes = LONE_SEGMENT_BYTES_MIN if device_count == 1 else SEGMENT_BYTES_MIN
    assert per_device == 1 or size_bytes / count >= least_bytes


def test_two_leaves_of_one_name_are_refused() -> None:
    spec = whole_leaf("a", "uint8", (1,))
    alias = Alias(name="a", of="a", offset_bytes=0, dtype="uint8", shape=(1,), strides=(1,))
    with pytest.raises(UsageError, match="two leaves are named 'a'"):
        plan_layout([spec, spec], (), segment_count=1)
    with pytest.raises(UsageError, match="two leaves are named 'a'"):
        plan_layout([spec], [alias], segment_count=1)


def test_a_name_that_looks_like_rows_of_another_leaf_is_refused() -> None:
    specs = [whole_leaf("a", "uint8", (9,)), whole_leaf("a@0:5", "uint8", (1,))]
    with pytest.raises(UsageError, match="looks like rows"):
        plan_layout(specs, (), segment_count=1)
    assert plan_layout(specs[1:], (), segment_count=1).pieces[0].key == "a@0:5"
