"""Tensors put together from the shards of several ranks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.checkpoint.leaf import Alias, LeafSpec, contiguous_strides, whole_leaf
from everstep.checkpoint.manifest_types import Manifest
from everstep.checkpoint.whole_plan import fill, put_together
from everstep.core.errors import IncompleteError, NotFoundError
from everstep.core.ids import CheckpointId


def manifest(rank: int, leaves: list[LeafSpec], aliases: list[Alias], *, world_size: int = 2) -> Manifest:
    return Manifest(
        run_id="0" * 32, run_name="x", owner_uid=0, checkpoint=CheckpointId(1, 1), rank=rank, world_size=world_size,
        parent=None, generation="1" * 32, created_unix_s=0.0, notes={}, segments=(), layout_digest="",
        leaves=tuple(leaves), aliases=tuple(aliases), pieces=(), values=b"{}",
    )  # fmt: skip


def box(name: str, shape: tuple[int, ...], offset: tuple[int, ...], whole: tuple[int, ...]) -> LeafSpec:
    return LeafSpec(
        name=name, dtype="float32", shape=shape, strides=contiguous_strides(shape), global_shape=whole,
        global_offset=offset,
    )  # fmt: skip


def test_replicas_are_taken_once_and_own_tensors_of_others_are_told() -> None:
    shared = whole_leaf("model.w", "float32", (4,), replicas=2)
    own = whole_leaf("rng.torch_cpu", "uint8", (9,))
    shards = {rank: manifest(rank, [shared, own], []) for rank in (0, 1)}
    for rank in (0, 1):
        found = put_together(shards, rank)
        assert [tensor.name for tensor in found.tensors] == ["model.w", "rng.torch_cpu"]
        assert {tensor.parts[0].rank for tensor in found.tensors} == {rank}
        assert found.left_out == ("rng.torch_cpu",)
    with pytest.raises(NotFoundError, match="rank 2"):
        put_together(shards, 2)


def test_what_only_another_rank_has_is_taken_from_there() -> None:
    shards = {
        0: manifest(0, [whole_leaf("model.first", "float32", (4,))], []),
        1: manifest(1, [whole_leaf("model.last", "float32", (4,))], []),
    }
    found = put_together(shards, 0)
    assert {tensor.name: tensor.parts[0].rank for tensor in found.tensors} == {
        "model.first": 0,
        "model.last": 1,
    }
    assert found.left_out == ()


def test_an_alias_is_a_part_of_its_holder() -> None:
    holder = whole_leaf("a", "float32", (4, 2))
    alias = Alias(name="b", of="a", offset_bytes=8, dtype="float32", shape=(2,), strides=(1,))
    found = {each.name: each for each in put_together({0: manifest(0, [holder], [alias])}, 0).tensors}
    assert (found["b"].alias_of, found["a"].alias_of) == ("a", "")
    assert found["b"].parts[0].offset_bytes == 8


def test_sharded_leaves_make_one_tensor_of_parts_of_all_ranks() -> None:
    shards = {
        rank: manifest(rank, [box("w", (3, 4), (3 * rank, 0), (6, 4))], [], world_size=2) for rank in (0, 1)
    }
    (tensor,) = put_together(shards, 1).tensors
    assert (tensor.shape, [part.rank for part in tensor.parts], tensor.only_part) == ((6, 4), [0, 1], None)
    del shards[1]
    with pytest.raises(IncompleteError, match="'w'"):
        put_together(shards, 0)


def test_replicas_of_a_part_count_once() -> None:
    part = replace(box("w", (3, 4), (0, 0), (6, 4)), replicas=2)
    shards = {
        0: manifest(0, [part], []),
        1: manifest(1, [part], []),
        2: manifest(2, [box("w", (3, 4), (3, 0), (6, 4))], []),
    }
    (tensor,) = put_together(shards, 0).tensors
    assert len(tensor.parts) == 2


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and boxes that fill it: every dimension cut at some places."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(itertools.pairwise(edges)) for edges in cuts]
    boxes = [
        (tuple(begin for begin, _ in each), tuple(end - begin for begin, end in each))
        for each in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(boxes))


@given(grids(), st.data())
def test_a_grid_fills_its_shape_and_no_change_of_it_does(
    grid: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]], data: st.DataObject
) -> None:
    shape, boxes = grid
    assert fill(shape, boxes)
    assert not fill(shape, boxes[1:])
    assert not fill(shape, [*boxes, boxes[0]])
    index = data.draw(st.integers(0, len(boxes) - 1))
    dim = data.draw(st.integers(0, len(shape) - 1))
    offsets, sizes = boxes[index]
    moved = (*offsets[:dim], offsets[dim] + 1, *offsets[dim + 1 :])
    assert not fill(shape, [*boxes[:index], (moved, sizes), *boxes[index + 1 :]])


def test_scalars_and_empty_shapes_are_filled() -> None:
    assert fill((), [((), ())])
    assert not fill((), [])
    assert fill((0, 3), [((0, 0), (0, 3))])
    assert fill((0, 3), [])
    assert not fill((2,), [((-1,), (2,))])
    assert not fill((2,), [((0, 0), (2, 1))])
    assert math.prod(()) == 1
