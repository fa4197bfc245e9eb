"""Reading a checkpoint: leaves over several segments, aliases, and what must be refused."""

import pytest
import torch
from msgspec import structs

from everstep.checkpoint.manifest_types import Manifest, SegmentEntry
from everstep.checkpoint.segment_format import SegmentStamp, build_header
from everstep.core.errors import CorruptDataError, IncompleteError, StateMismatchError
from everstep.hook.component import Laziness, Sink
from everstep.hook.leaf_bytes import ArenaLeaves
from everstep.hook.state_testing import bits, store
from everstep.hook.stored_state import StoredState, TensorMaker

CPU = torch.device("cpu")


class Tensors:
    name = "t"

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    checks_bytes = True

    def capture(self, sink: Sink) -> None:
        for name, tensor in self.tensors.items():
            sink.leaf(name, tensor, Laziness.EAGER)
        sink.value({"kind": "tensors"})

    def check(self, stored: StoredState) -> None:
        raise NotImplementedError

    def apply(self, stored: StoredState) -> None:
        raise NotImplementedError


def test_a_leaf_over_three_segments_and_aliases_across_its_cuts() -> None:
    big = torch.randint(0, 256, (7, 1 << 20), dtype=torch.uint8)
    across = big.flatten()[(1 << 20) - 3 : (5 << 20) + 3]
    stored = store([Tensors(big=big, across=across)], device_count=3)
    assert len([piece for piece in stored.manifest.pieces if piece.leaf == "big"]) == 3
    assert torch.equal(stored.tensor("big"), big)
    assert torch.equal(stored.tensor("across"), across)
    target = torch.zeros_like(big)
    stored.copy_to("across", target.flatten()[: len(across)])
    assert torch.equal(target.flatten()[: len(across)], across)


def test_names_specs_and_values() -> None:
    tensor = torch.zeros(2, 3)
    stored = store([Tensors(a_x=tensor, a_y=tensor[1], b=torch.zeros(1))])
    assert stored.names("a_") == ["a_x", "a_y"]
    assert "a_y" in stored
    assert "c" not in stored
    assert stored.spec("a_y").shape == (3,)
    assert stored.holder_of("a_y") == ("a_x", 12)
    assert stored.components == ("t",)
    assert stored.values("t") == {"kind": "tensors"}
    with pytest.raises(StateMismatchError, match=r"no state of 'model'.*it has t"):
        stored.values("model")
    with pytest.raises(StateMismatchError, match="no leaf 'c'"):
        stored.spec("c")


def test_writing_in_place_keeps_memory_and_moves_the_version() -> None:
    stored = store([Tensors(a=torch.arange(6.0).view(2, 3))])
    target = torch.zeros(2, 3)
    address, version = target.data_ptr(), target._version
    stored.copy_to("a", target)
    assert (target.data_ptr(), target.tolist()) == (address, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert target._version > version


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3, 2).t(),
        torch.zeros(4, 6)[::2, ::2],
        torch.zeros(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, 3)),
    ],
)
def test_writing_into_any_strides(target: torch.Tensor) -> None:
    stored = store([Tensors(a=torch.arange(6.0).view(2, 3))])
    stored.copy_to("a", target)
    assert target.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_writing_into_an_inference_tensor() -> None:
    with torch.inference_mode():
        target = torch.zeros(2)
    store([Tensors(a=torch.ones(2))]).copy_to("a", target)
    assert target.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("target", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).double()])
def test_another_shape_or_dtype_is_refused(target: torch.Tensor) -> None:
    with pytest.raises(StateMismatchError, match=r"a is float32 \[2\] in the checkpoint"):
        store([Tensors(a=torch.ones(2))]).copy_to("a", target)
    assert not target.any()


def test_a_new_tensor_has_the_stored_strides() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = store([Tensors(a=tensor)]).tensor("a")
    assert found.stride() == tensor.stride()
    assert bits(found) == bits(tensor)


def test_a_default_device_does_not_move_what_is_read() -> None:
    stored = store([Tensors(a=torch.ones(2), b=torch.ones(2))])
    with torch.device("meta"):
        assert stored.tensor("a").tolist() == [1.0, 1.0]
        assert TensorMaker(stored).make("b", CPU).tolist() == [1.0, 1.0]


def test_made_tensors_share_memory_as_the_saved_ones_did() -> None:
    flat = torch.arange(6.0)
    stored = store(
        [Tensors(flat=flat, part=flat[2:4], again=flat, raw=flat.view(torch.uint8)[8:9], own=flat + 1)]
    )
    maker = TensorMaker(stored)
    made = {name: maker.make(name, CPU) for name in ("flat", "part", "again", "raw", "own")}
    made["part"].zero_()
    assert made["flat"].tolist() == [0.0, 1.0, 0.0, 0.0, 4.0, 5.0]
    assert made["again"].tolist() == made["flat"].tolist()
    assert made["raw"].tolist() == [0]
    assert made["own"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert TensorMaker(stored).make("part", CPU).tolist() == [2.0, 3.0]


def test_after_close_no_byte_is_read() -> None:
    with store([Tensors(a=torch.ones(2))]) as stored:
        assert stored.tensor("a").tolist() == [1.0, 1.0]
    with pytest.raises(CorruptDataError, match="closed"):
        stored.tensor("a")


def rebuilt(manifest: Manifest, stored_bytes: bytearray, offset: int = 0) -> StoredState:
    offsets = {record.segment: offset for record in manifest.segments}
    return StoredState(manifest, ArenaLeaves(manifest, memoryview(stored_bytes), offsets))


@pytest.fixture
def shard() -> tuple[Manifest, bytearray]:
    """A manifest of the leaf `a` and its alias `b`, and the one segment."""
    tensor = torch.arange(4.0)
    manifest = store([Tensors(a=tensor, b=tensor[1:])], device_count=1).manifest
    stamp = SegmentStamp(
        generation=manifest.generation,
        run_id=manifest.run_id,
        checkpoint=manifest.checkpoint,
        rank=0,
        segment=0,
    )
    entry = SegmentEntry(key="a", dtype="F32", shape=(4,), begin=0, end=16)
    return manifest, bytearray(build_header([entry], stamp) + bits(tensor))


def test_a_segment_at_its_place(shard: tuple[Manifest, bytearray]) -> None:
    manifest, file = shard
    assert rebuilt(manifest, file).tensor("a").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_segment_outside_of_the_buffer_is_refused(shard: tuple[Manifest, bytearray]) -> None:
    manifest, file = shard
    with pytest.raises(CorruptDataError, match="outside of the buffer"):
        rebuilt(manifest, file, offset=4096)
    with pytest.raises(CorruptDataError, match="outside of the buffer"):
        rebuilt(manifest, file[:-1])
    with pytest.raises(IncompleteError, match="segment 0"):
        ArenaLeaves(manifest, memoryview(file), {})


def test_a_broken_header_is_refused(shard: tuple[Manifest, bytearray]) -> None:
    manifest, file = shard
    file[8] = 0
    with pytest.raises(CorruptDataError):
        rebuilt(manifest, file)


def test_manifests_that_do_not_fit_their_segments_are_refused(shard: tuple[Manifest, bytearray]) -> None:
    manifest, file = shard
    (leaf,) = manifest.leaves
    (piece,) = manifest.pieces
    (alias,) = manifest.aliases
    change = structs.replace
    wrong = [
        change(manifest, pieces=()),
        change(manifest, pieces=(piece, piece)),
        change(manifest, pieces=(change(piece, key="c"),)),
        change(manifest, pieces=(change(piece, leaf="c"),)),
        change(manifest, pieces=(change(piece, segment=1),)),
        change(manifest, pieces=(change(piece, size_bytes=8),)),
        change(manifest, pieces=(change(piece, offset_in_leaf_bytes=4),)),
        change(manifest, leaves=(change(leaf, shape=(5,), global_shape=(5,)),)),
        change(manifest, leaves=(change(leaf, strides=(2,)),)),
        change(manifest, aliases=(change(alias, of="c"),)),
        change(manifest, aliases=(change(alias, offset_bytes=8),)),
        change(manifest, aliases=(change(alias, offset_bytes=-4),)),
        change(manifest, aliases=(change(alias, strides=(0,)),)),
        change(manifest, values=b"[]"),
        change(manifest, values=b"{"),
    ]
    for broken in wrong:
        with pytest.raises(CorruptDataError):
            rebuilt(broken, file)
