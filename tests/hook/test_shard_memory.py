"""A shard that lies in memory: every byte that is used was verified, and lands where it belongs."""

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES
from everstep.core.errors import CorruptDataError, IncompleteError
from everstep.hook.component import make_components
from everstep.hook.shard_memory import DamagedMemoryError, ShardMemory
from everstep.hook.state_testing import StoredFiles, bits, store_files
from everstep.hook.stored_state import StoredState

BIG = "model.big"
SMALL = "other.weight"


class Big(nn.Module):
    """One parameter of several blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.big = nn.Parameter(torch.randn(9, BLOCK_SIZE_BYTES // 8, generator=generator))


def tensors() -> tuple[Big, nn.Linear]:
    torch.manual_seed(1)
    return Big(1), nn.Linear(8, 8)


@pytest.fixture(scope="module")
def files() -> StoredFiles:
    model, other = tensors()
    return store_files(make_components({"model": model, "other": other}, world_size=1))


def memory_of(files: StoredFiles, *, ahead: bool = True, unclaimed: Sequence[str] = ()) -> ShardMemory:
    return ShardMemory(files.manifest, files.slot, files.offsets, ahead=ahead, unclaimed=unclaimed)


def damaged(files: StoredFiles, segment: int, at: int) -> StoredFiles:
    changed = bytearray(files.slot)
    changed[files.offsets[segment] + at] ^= 1
    return replace(files, slot=memoryview(changed).toreadonly())


@pytest.mark.parametrize("unclaimed", [[], ["other"], ["model", "other"]])
@pytest.mark.parametrize("ahead", [True, False])
def test_claimed_or_not_each_leaf_has_its_bytes(
    files: StoredFiles, ahead: bool, unclaimed: list[str]
) -> None:
    """Whatever was said of them before."""
    memory, (model, other) = memory_of(files, ahead=ahead, unclaimed=unclaimed), tensors()
    target = torch.zeros_like(model.big)
    memory.leaves.claim(BIG, target)
    memory.receive()
    own = memory.hand_over(SMALL)
    assert (own is not None) is ahead
    assert own is None or bits(own) == bits(other.weight)
    stored = StoredState(files.manifest, memory)
    assert bits(target) == bits(model.big)
    assert bits(stored.tensor(SMALL)) == bits(other.weight)
    assert bits(stored.tensor(BIG)) == bits(target)
    stored.close()
    with pytest.raises(CorruptDataError, match="closed"):
        stored.tensor(SMALL)


def test_every_flipped_byte_is_found_before_it_is_anywhere(files: StoredFiles) -> None:
    for record in files.manifest.segments:
        for at in (record.header_size_bytes, record.file_size_bytes // 2, record.file_size_bytes - 1):
            with pytest.raises(DamagedMemoryError, match=f"block {at // BLOCK_SIZE_BYTES} of segment"):
                memory_of(damaged(files, record.segment, at)).receive()


def test_what_was_found_damaged_goes_with_its_threads_and_waits_for_no_garbage_collection(
    files: StoredFiles,
) -> None:
    """A cycle would hold the buffer until garbage is collected, which a training loop may have turned off."""
    record, before = files.manifest.segments[0], set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        memory = memory_of(damaged(files, record.segment, record.file_size_bytes - 1))
        seen = weakref.ref(memory)
        with pytest.raises(DamagedMemoryError):
            memory.receive()
        memory.close()
        del memory
        assert seen() is None
        assert set(threading.enumerate()) <= before
    finally:
        gc.enable()


def test_a_damaged_header_is_found_at_once(files: StoredFiles) -> None:
    for record in files.manifest.segments:
        with pytest.raises(DamagedMemoryError, match="block 0"):
            memory_of(damaged(files, record.segment, 3), unclaimed=["model"])


def test_of_some_components_only_their_blocks_are_looked_at(files: StoredFiles) -> None:
    """A block in the middle of the big one is damaged: the other is read, and the whole is refused."""
    record = max(files.manifest.segments, key=lambda record: record.file_size_bytes)
    assert len(record.block_checksums) > 2
    memory = memory_of(damaged(files, record.segment, BLOCK_SIZE_BYTES + 5))
    memory.receive(["other"])
    assert bits(StoredState(files.manifest, memory).tensor(SMALL)) == bits(tensors()[1].weight)
    with pytest.raises(DamagedMemoryError):
        memory.receive(["model"])
    with pytest.raises(DamagedMemoryError):
        memory.receive()
    memory.close()


def test_the_buffer_is_let_go(files: StoredFiles) -> None:
    buffer = bytearray(files.slot)
    memory = ShardMemory(files.manifest, memoryview(buffer), files.offsets)
    memory.receive()
    with pytest.raises(BufferError):
        buffer.clear()
    memory.close()  # whoever still has it, as a traceback may, does not keep an arena mapped
    buffer.clear()


def test_segments_that_are_not_there_are_named(files: StoredFiles) -> None:
    with pytest.raises(IncompleteError, match="segment 0"):
        ShardMemory(files.manifest, files.slot, {})
    with pytest.raises(CorruptDataError, match="outside of the buffer"):
        ShardMemory(files.manifest, files.slot[:4096], files.offsets)
