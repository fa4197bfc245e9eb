import os
import random
from collections.abc import Generator
from pathlib import Path

import pytest

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.fetch import read_shard, shard_slot_offsets
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_format import decode_manifest
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_check import CHUNK_SIZE_BYTES
from everstep.checkpoint.testing import (
    FaultyStorage,
    State,
    begun,
    each_engine,
    load,
    make_state,
    memory_arena,
    opened,
    save,
)
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import (
    CorruptDataError,
    DataError,
    IncompleteError,
    MemoryRefusedError,
    StorageError,
)
from everstep.core.ids import CheckpointId

ONE, TWO = CheckpointId(1, 1), CheckpointId(1, 2)


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(RealStorage())


@pytest.fixture
def run(dirs: list[Path], faulty: FaultyStorage) -> Generator[RunStore]:
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        made = begun(store)
        yield made


@pytest.fixture
def state(run: RunStore) -> State:
    made = make_state(run.store)
    save(run, made, ONE)
    save(run, make_state(run.store, 9), TWO)
    return made


def segment(run: RunStore, checkpoint: CheckpointId, number: int = 0) -> Path:
    return run.segment_path(run.shard(checkpoint, 0).segments[number])


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_places_are_those_of_the_layout(run: RunStore, state: State) -> None:
    manifest = run.manifest(ONE, 0)
    offsets, size = shard_slot_offsets(manifest)
    assert offsets == tuple(plan.slot_offset_bytes for plan in state.layout.segments)
    assert size == state.layout.draft_offset_bytes
    with (
        memory_arena(size - 4096) as arena,
        each_engine(run.store) as engines,
        pytest.raises(MemoryRefusedError, match="its slot has"),
    ):
        read_shard(run, manifest, arena, engines=engines)


def test_every_bit_flip_of_the_data_is_found_by_file_and_block(run: RunStore, state: State) -> None:
    manifest = run.manifest(ONE, 0)
    for record in manifest.segments:
        path = run.segment_path(record)
        whole = path.read_bytes()
        for bit in random.Random(record.segment).sample(range(8 * len(whole)), 60):
            flip(path, bit)
            with pytest.raises(DataError, match=str(path)):
                load(run, manifest)
            path.write_bytes(whole)
    assert load(run, manifest) == state.content


def test_what_was_found_broken_is_offered_no_more(run: RunStore, state: State) -> None:
    assert run.offered() == [TWO, ONE]
    flip(segment(run, TWO), 8 * 5000)
    with pytest.raises(CorruptDataError, match=r"block 0 \(from byte 0 on\) is not what was committed"):
        load(run, run.manifest(TWO, 0))
    assert run.offered() == [ONE]
    assert "block 0" in run.info(TWO).problems[0]
    assert load(run, run.manifest(ONE, 0)) == state.content


@pytest.mark.usefixtures("state")
def test_a_segment_that_is_gone_is_incomplete(run: RunStore) -> None:
    segment(run, ONE).unlink()
    with pytest.raises(IncompleteError, match="is gone"):
        load(run, run.manifest(ONE, 0))
    assert run.offered() == [TWO]


@pytest.mark.usefixtures("state")
def test_duplicated_and_swapped_segments_are_found(run: RunStore) -> None:
    one, two = segment(run, ONE), segment(run, TWO)
    whole = one.read_bytes()
    one.write_bytes(two.read_bytes())
    with pytest.raises(CorruptDataError, match="not the file that was committed"):
        load(run, run.manifest(ONE, 0))
    other = segment(run, ONE, 1)
    one.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with pytest.raises(CorruptDataError, match="block 0"):
        load(run, run.manifest(ONE, 0))
    one.write_bytes(other.read_bytes())
    with pytest.raises(CorruptDataError):
        load(run, run.manifest(ONE, 0))


@pytest.mark.usefixtures("state")
def test_a_read_error_is_no_damage(run: RunStore, faulty: FaultyStorage) -> None:
    manifest = run.manifest(ONE, 0)
    faulty.arm(1, only=lambda call: call.name == "read_segment")
    with pytest.raises(StorageError, match="EIO"):
        load(run, manifest)
    faulty.arm(0)
    assert run.offered() == [TWO, ONE]


def test_a_shard_of_many_blocks_and_chunks(run: RunStore, dirs: list[Path]) -> None:
    """One device is enough here; the file is longer than a chunk, so chunk and block borders are crossed."""
    leaf = whole_leaf("w", "int8", (2 * CHUNK_SIZE_BYTES + 3 * BLOCK_SIZE_BYTES + 777,))
    state = make_state(run.store, leaves=(leaf,))
    with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(run.store) as engines:
        state.copy_into(arena)
        manifest = decode_manifest(persist_shard(run, state.draft(ONE), arena, engines=engines).content)
        arena.view(0, arena.slot_size_bytes)[:] = bytes(arena.slot_size_bytes)
        found = read_shard(run, manifest, arena, engines=engines)
        assert found.reread_count == 0
        for piece in found.pieces:
            begin = piece.offset_in_leaf_bytes
            assert (
                arena.view(piece.slot_offset_bytes, piece.size_bytes)
                == state.content["w"][begin:][: piece.size_bytes]
            )
    path = segment(run, ONE, 1)
    block = path.stat().st_size // BLOCK_SIZE_BYTES
    with path.open("r+b") as file:
        file.seek(block * BLOCK_SIZE_BYTES + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    verdict = verify_checkpoint(run, ONE)
    assert [each.bad_block for each in verdict.segments] == [None, block]
    assert f"block {block} " in verdict.segments[1].problem
    assert dirs[1].name in verdict.segments[1].path or dirs[0].name in verdict.segments[1].path
