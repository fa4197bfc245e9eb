"""Layouts: every byte once, without holes, aligned, balanced, a pure function of the structure."""

import dataclasses
import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.dtype_format import itemsize_bytes, safetensors_dtype
from everstep.checkpoint.layout_plan import CUT_MIN_BYTES, DeviceWeight, Layout, plan_layout
from everstep.checkpoint.leaf import Alias, LeafSpec, whole_leaf
from everstep.checkpoint.manifest_types import HEADER_ALIGNMENT_BYTES
from everstep.checkpoint.segment_format import header_size_bytes, item_size_bytes
from everstep.core.errors import UsageError

DTYPES = ("float32", "bfloat16", "uint8", "complex128", "complex64", "float64", "bool", "float8_e4m3fnuz")


@st.composite
def leaves(draw: st.DrawFn) -> list[LeafSpec]:
    """Leaves from empty to some megabytes, a few of them stored in another order of dimensions."""
    count = draw(st.integers(0, 12))
    return [draw(leaf(f"model.{number}")) for number in range(count)]


@st.composite
def leaf(draw: st.DrawFn, name: str) -> LeafSpec:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, 5)),
            st.tuples(st.integers(1, 3_000_000)),
            st.tuples(st.integers(0, 3000), st.integers(0, 900)),
        )
    )
    spec = whole_leaf(name, dtype, shape, replicas=draw(st.integers(1, 3)))
    if len(shape) == 2 and all(shape) and draw(st.booleans()):
        return dataclasses.replace(spec, strides=(1, shape[0]))
    return spec


weights = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5)


def devices_of(weights: list[float]) -> list[DeviceWeight]:
    return [DeviceWeight(device_id=f"{number:032x}", weight=weight) for number, weight in enumerate(weights)]


def bytes_by_device(layout: Layout) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for piece in layout.pieces:
        found[piece.device_id] += piece.size_bytes
    return found


def largest_uncuttable_bytes(specs: list[LeafSpec]) -> int:
    """By so much a boundary between two devices may lie beside the ideal place."""
    largest = 0
    for spec in specs:
        rows = spec.shape[0] if spec.shape else 1
        row_bytes = spec.size_bytes // max(rows, 1)
        may_cut = spec.is_contiguous and rows > 1
        largest = max(
            largest, min(spec.size_bytes, row_bytes + CUT_MIN_BYTES) if may_cut else spec.size_bytes
        )
    return largest


@given(leaves(), weights)
def test_every_byte_of_each_leaf_lies_in_exactly_one_piece(
    specs: list[LeafSpec], weights: list[float]
) -> None:
    layout = plan_layout(specs, (), devices_of(weights))
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


@given(leaves(), weights)
def test_segments_are_valid_safetensors_one_behind_the_other(
    specs: list[LeafSpec], weights: list[float]
) -> None:
    layout = plan_layout(specs, (), devices_of(weights))
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


@given(leaves(), weights)
def test_elements_are_aligned_in_the_slot_also_where_they_are_stored_as_bytes(
    specs: list[LeafSpec], weights: list[float]
) -> None:
    layout = plan_layout(specs, (), devices_of(weights))
    begins = {(plan.segment, entry.key): entry.begin for plan in layout.segments for entry in plan.entries}
    dtypes = {spec.name: spec.dtype for spec in specs}
    for piece in layout.pieces:
        assert begins[piece.segment, piece.key] % itemsize_bytes(dtypes[piece.leaf]) == 0


@given(leaves(), weights)
def test_devices_get_their_share_within_the_largest_part_that_cannot_be_cut(
    specs: list[LeafSpec], weights: list[float]
) -> None:
    devices = devices_of(weights)
    layout = plan_layout(specs, (), devices)
    found = bytes_by_device(layout)
    total, tolerance = layout.state_size_bytes, largest_uncuttable_bytes(specs)
    given_bytes, ideal = 0, 0.0
    for device in devices:
        given_bytes += found.get(device.device_id, 0)
        ideal += total * device.weight / sum(weights)
        assert abs(given_bytes - ideal) <= tolerance + 1


@given(leaves(), weights)
def test_a_layout_is_a_pure_function(specs: list[LeafSpec], weights: list[float]) -> None:
    assert plan_layout(specs, (), devices_of(weights)) == plan_layout(list(specs), [], devices_of(weights))


def test_the_digest_tells_every_change_of_structure() -> None:
    base = whole_leaf("a", "float32", (8, 4))
    tied = Alias(name="b", of="a", offset_bytes=0, dtype="float32", shape=(8, 4), strides=(4, 1))
    one, two = devices_of([1.0]), devices_of([1.0, 1.0])
    digests = [
        plan_layout([base], (), one).digest,
        plan_layout([base], (), two).digest,
        plan_layout([base], (), devices_of([2.0, 1.0])).digest,
        plan_layout([base], (tied,), one).digest,
        plan_layout([base], (dataclasses.replace(tied, offset_bytes=4),), one).digest,
        plan_layout([whole_leaf("a", "int32", (8, 4))], (), one).digest,
        plan_layout([whole_leaf("c", "float32", (8, 4))], (), one).digest,
        plan_layout([whole_leaf("a", "float32", (4, 8))], (), one).digest,
        plan_layout([dataclasses.replace(base, strides=(1, 8))], (), one).digest,
        plan_layout([whole_leaf("a", "float32", (8, 4), replicas=2)], (), one).digest,
    ]
    for left, right in itertools.combinations(digests, 2):
        assert left != right


def test_a_big_tensor_is_cut_by_rows_over_the_devices() -> None:
    spec = whole_leaf("w", "float32", (4096, 1024))
    layout = plan_layout([spec], (), devices_of([3.0, 1.0]))
    assert [(piece.key, piece.size_bytes) for piece in layout.pieces] == [
        ("w@0:3072", 3072 * 4096),
        ("w@3072:4096", 1024 * 4096),
    ]
    assert layout.segments[1].entries[0].shape == (1024, 1024)


def test_a_tensor_in_another_order_is_stored_in_its_own_order() -> None:
    spec = dataclasses.replace(whole_leaf("w", "float32", (2, 3, 5, 7)), strides=(105, 1, 21, 3))
    (plan,) = plan_layout([spec], (), devices_of([1.0])).segments
    assert plan.entries[0].shape == (2, 5, 7, 3)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e5m2fnuz", "float4_e2m1fn_x2"])
def test_what_safetensors_does_not_know_is_stored_as_bytes(dtype: str) -> None:
    assert safetensors_dtype(dtype) is None
    spec = whole_leaf("w", dtype, (3, 5))
    (plan,) = plan_layout([spec], (), devices_of([1.0])).segments
    assert (plan.entries[0].dtype, plan.entries[0].shape) == ("U8", (spec.size_bytes,))


def test_an_empty_leaf_after_one_that_overfilled_its_device() -> None:
    specs = [
        whole_leaf("a", "float32", (3,)),
        whole_leaf("b", "float32", (5, 0)),
        whole_leaf("c", "uint8", (1,)),
    ]
    layout = plan_layout(specs, (), devices_of([1.0, 1.0]))
    assert {piece.leaf for piece in layout.pieces} == {"a", "b", "c"}


def test_no_leaves_make_no_segment() -> None:
    layout = plan_layout([], (), devices_of([1.0, 1.0]))
    assert layout.segments == ()
    assert layout.draft_offset_bytes == 0
    assert layout.draft_capacity_bytes > 0


def test_room_for_the_draft_grows_with_the_values() -> None:
    small = plan_layout([], (), devices_of([1.0]))
    large = plan_layout([], (), devices_of([1.0]), values_size_bytes=10_000_000)
    assert large.draft_capacity_bytes >= small.draft_capacity_bytes + 10_000_000
    assert large.digest == small.digest


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="weight"):
        plan_layout([], (), devices_of([1.0, weight]))


def test_no_device_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one device"):
        plan_layout([], (), [])


def test_two_leaves_of_one_name_are_refused() -> None:
    spec = whole_leaf("a", "uint8", (1,))
    alias = Alias(name="a", of="a", offset_bytes=0, dtype="uint8", shape=(1,), strides=(1,))
    with pytest.raises(UsageError, match="two leaves are named 'a'"):
        plan_layout([spec, spec], (), devices_of([1.0]))
    with pytest.raises(UsageError, match="two leaves are named 'a'"):
        plan_layout([spec], [alias], devices_of([1.0]))


def test_a_name_that_looks_like_rows_of_another_leaf_is_refused() -> None:
    specs = [whole_leaf("a", "uint8", (9,)), whole_leaf("a@0:5", "uint8", (1,))]
    with pytest.raises(UsageError, match="looks like rows"):
        plan_layout(specs, (), devices_of([1.0]))
    assert plan_layout(specs[1:], (), devices_of([1.0])).pieces[0].key == "a@0:5"
