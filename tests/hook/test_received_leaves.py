import random
from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.leaf_runs_plan import leaf_runs
from everstep.checkpoint.manifest_types import Manifest
from everstep.core.errors import CorruptDataError, IncompleteError
from everstep.hook.component import Laziness, Sink
from everstep.hook.received_leaves import ReceivedLeaves
from everstep.hook.state_testing import StoredFiles, bits, store_files
from everstep.hook.stored_state import StoredState
from everstep.hook.tensor_bytes import BufferPin

TENSORS = {
    "m.big": torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000),
    "m.half": torch.arange(7, dtype=torch.float16),
    "r.state": torch.arange(5056, dtype=torch.int64).to(torch.uint8),
    "r.empty": torch.empty(0, 3),
    "rr.other": torch.ones(3),
}


class Tensors:
    """A component of eager tensors."""

    name = "t"
    checks_bytes = True

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def capture(self, sink: Sink) -> None:
        for name, tensor in self.tensors.items():
            sink.leaf(name, tensor, Laziness.EAGER)
        sink.value({"kind": "tensors"})

    def check(self, stored: StoredState) -> None:
        raise NotImplementedError

    def apply(self, stored: StoredState) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def files() -> StoredFiles:
    """The state in two segment files."""
    return store_files([Tensors(TENSORS)], device_count=2)


def leaves_of(files: StoredFiles) -> ReceivedLeaves:
    return ReceivedLeaves(files.manifest, leaf_runs(files.manifest, files.headers))


def chunks(files: StoredFiles, size_bytes: int, seed: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield (segment, offset, content) of every chunk, in a random order."""
    found = [
        (segment, offset, content[offset : offset + size_bytes])
        for segment, content in files.content.items()
        for offset in range(0, len(content), size_bytes)
    ]
    random.Random(seed).shuffle(found)
    yield from found


def receive(leaves: ReceivedLeaves, files: StoredFiles, size_bytes: int = 65536, seed: int = 0) -> None:
    for segment, offset, content in chunks(files, size_bytes, seed):
        pin = BufferPin(memoryview(content))
        leaves.receive(segment, offset, pin.address, len(content))
        pin.release()


@settings(deadline=None, max_examples=30)
@given(size_bytes=st.integers(5000, 5_000_000), seed=st.integers(0, 1000))
def test_chunks_of_any_size_in_any_order_make_every_leaf(
    files: StoredFiles, size_bytes: int, seed: int
) -> None:
    leaves = leaves_of(files)
    leaves.expect()
    receive(leaves, files, size_bytes, seed)
    leaves.check_received()
    stored = StoredState(files.manifest, leaves)
    for name, tensor in TENSORS.items():
        found = stored.tensor(name)
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_a_claimed_leaf_arrives_in_its_tensor_and_nothing_is_copied_again(files: StoredFiles) -> None:
    leaves, target = leaves_of(files), torch.zeros(1000, 1000)
    leaves.claim("m.big", target)
    leaves.expect()
    receive(leaves, files)
    leaves.check_received()
    assert torch.equal(target, TENSORS["m.big"])
    stored = StoredState(files.manifest, leaves)
    target[0, 0] = 5.0
    before = target._version
    stored.copy_to("m.big", target)
    assert target[0, 0] == 5.0, "it was read a second time"
    assert target._version == before + 1, "autograd would not notice the change"
    assert stored.tensor("m.big").data_ptr() != target.data_ptr()


def test_of_two_tensors_in_one_storage_the_second_is_left_to_its_owner(files: StoredFiles) -> None:
    leaves, flat = leaves_of(files), torch.zeros(1_000_000)
    leaves.claim("m.big", flat.view(1000, 1000))
    leaves.claim("m.half", flat.view(torch.float16)[:7])
    leaves.expect()
    receive(leaves, files)
    leaves.check_received()
    assert torch.equal(flat.view(1000, 1000), TENSORS["m.big"])
    assert torch.equal(StoredState(files.manifest, leaves).tensor("m.half"), TENSORS["m.half"])


def test_some_leaves_first_then_the_others(files: StoredFiles) -> None:
    leaves = leaves_of(files)
    ranges = leaves.expect(["r"])
    assert len(ranges) == 1
    receive(leaves, files)
    leaves.check_received()
    stored = StoredState(files.manifest, leaves)
    assert torch.equal(stored.tensor("r.state"), TENSORS["r.state"])
    assert stored.tensor("r.empty").shape == (0, 3)
    with pytest.raises(IncompleteError, match=r"'rr\.other' has not been received"):
        stored.tensor("rr.other")
    with pytest.raises(IncompleteError, match=r"'m\.big' has not been received"):
        stored.tensor("m.big")
    target = torch.zeros(1000, 1000)
    leaves.claim("m.big", target)
    leaves.expect()
    receive(leaves, files)
    leaves.check_received()
    assert torch.equal(target, TENSORS["m.big"])


def test_memory_of_its_own_is_handed_over_once(files: StoredFiles) -> None:
    leaves = leaves_of(files)
    leaves.expect()
    receive(leaves, files)
    leaves.check_received()
    stored = StoredState(files.manifest, leaves)
    first, second = stored.tensor("m.half"), stored.tensor("m.half")
    first.zero_()
    assert torch.equal(second, TENSORS["m.half"])
    stored.close()
    assert torch.equal(second, TENSORS["m.half"]), "closing took the memory away"
    with pytest.raises(CorruptDataError, match="closed"):
        stored.tensor("m.half")


def test_a_chunk_that_did_not_come_is_missed(files: StoredFiles) -> None:
    leaves = leaves_of(files)
    leaves.expect()
    for segment, offset, content in list(chunks(files, 65536))[1:]:
        pin = BufferPin(memoryview(content))
        leaves.receive(segment, offset, pin.address, len(content))
        pin.release()
    with pytest.raises(IncompleteError, match="bytes of the checkpoint were not received"):
        leaves.check_received()


def test_an_alias_is_received_with_the_leaf_that_holds_its_bytes() -> None:
    flat = torch.arange(1000.0)
    files = store_files([Tensors({"m.flat": flat, "o.part": flat[10:20]})])
    leaves = leaves_of(files)
    assert leaves.expect(["o"]), "nothing would be read"
    receive(leaves, files)
    leaves.check_received()
    stored = StoredState(files.manifest, leaves)
    assert torch.equal(stored.tensor("o.part"), flat[10:20])
    assert stored.tensor("m.flat").data_ptr() != stored.tensor("m.flat").data_ptr()


def test_runs_cover_each_leaf_exactly(files: StoredFiles) -> None:
    manifest: Manifest = files.manifest
    runs = leaf_runs(manifest, files.headers)
    assert {name: sum(run.end - run.begin for run in found) for name, found in runs.items()} == {
        leaf.name: leaf.size_bytes for leaf in manifest.leaves
    }
    assert len(runs["m.big"]) == 2, "it should lie in both segments"
    with pytest.raises(IncompleteError, match="segment 1"):
        leaf_runs(manifest, {0: files.headers[0]})


def test_a_leaf_may_be_a_whole_component() -> None:
    files = store_files([Tensors({"generator": torch.arange(8), "generators.0": torch.ones(8)})])
    leaves = leaves_of(files)
    leaves.expect(["generator"])
    receive(leaves, files)
    leaves.check_received()
    assert torch.equal(StoredState(files.manifest, leaves).tensor("generator"), torch.arange(8))
    with pytest.raises(IncompleteError, match=r"generators\.0"):
        StoredState(files.manifest, leaves).tensor("generators.0")
