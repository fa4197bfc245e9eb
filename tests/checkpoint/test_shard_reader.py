import os
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.chunk_ring import ChunkRing
from everstep.checkpoint.collect import remove_checkpoint
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES, Manifest
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_check import CHUNK_SIZE_BYTES
from everstep.checkpoint.shard_reader import FileRange, ShardChunk, ShardReader, Target
from everstep.checkpoint.storage_ops import ArenaRange
from everstep.checkpoint.testing import FaultyStorage, each_engine, make_state, memory_arena, opened, save
from everstep.core.errors import CorruptDataError, IncompleteError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
ONE = CheckpointId(1, 1)
LEAF = whole_leaf("w", "int8", (2 * (3 * CHUNK_SIZE_BYTES + BLOCK_SIZE_BYTES + 777),))


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(RealStorage())


@pytest.fixture
def run(tmp_path: Path, faulty: FaultyStorage) -> Generator[RunStore]:
    directories = [tmp_path / name for name in "ab"]
    for path in directories:
        path.mkdir()
    with opened(directories, ops=faulty.as_ops()) as (store, _):
        made = store.run(UID, "demo", create=True)
        made.begin_attempt(1, fresh=False)
        save(made, make_state(store, leaves=(LEAF,)), ONE)
        yield made


@pytest.fixture
def manifest(run: RunStore) -> Manifest:
    return run.manifest(ONE, 0)


@dataclass
class Taker:
    """Takes chunks out of a ring and gives the slots back at once."""

    arena: ArenaRange
    ring: ChunkRing
    content: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])
    fails_at: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def deliver(self, found: ShardChunk) -> None:
        with self._lock:
            if found.chunk.file_offset_bytes == self.fails_at:
                raise RuntimeError("taken no more")
            chunks = self.content.setdefault(found.segment.record.segment, {})
            assert found.chunk.file_offset_bytes not in chunks
            chunks[found.chunk.file_offset_bytes] = bytes(
                self.arena.view(found.chunk.slot_offset_bytes, found.chunk.size_bytes)
            )
        self.ring.give(self.ring.deliver(found.chunk.slot_offset_bytes))

    def target(self) -> Target:
        return Target(
            arena=self.arena, place=lambda _: self.ring.take(), deliver=self.deliver, stop=self.ring.close
        )

    def files(self) -> dict[int, bytes]:
        return {
            segment: b"".join(chunks[at] for at in sorted(chunks)) for segment, chunks in self.content.items()
        }


@pytest.fixture
def taker() -> Generator[Taker]:
    """Through a ring of three slots, far fewer than there are chunks."""
    with memory_arena(3 * CHUNK_SIZE_BYTES) as arena:
        yield Taker(arena, ChunkRing(3, CHUNK_SIZE_BYTES))


@pytest.mark.parametrize("engine", [PlainEngine, AioEngine])
def test_every_byte_comes_once_through_a_small_ring(
    run: RunStore, manifest: Manifest, taker: Taker, engine: type[PlainEngine | AioEngine]
) -> None:
    with ShardReader(run, manifest) as reader, each_engine(run.store, engine) as engines:
        assert reader.read(reader.chunks(), taker.target(), engines) == 0
        assert reader.device_count == 2
        assert len(reader.chunks()) > 3
        headers = {segment.record.segment: segment.header for segment in reader.segments}
    files = {record.segment: run.segment_path(record).read_bytes() for record in manifest.segments}
    assert taker.files() == files
    assert all(files[number].startswith(header) for number, header in headers.items())


def test_single_blocks_are_read_with_their_header(run: RunStore, manifest: Manifest, taker: Taker) -> None:
    begin = 2 * BLOCK_SIZE_BYTES - 1
    with ShardReader(run, manifest) as reader, each_engine(run.store) as engines:
        blocks = reader.blocks_of([FileRange(segment=1, begin=begin, end=begin + 2)])
        assert reader.blocks_of([]) == []
        reader.read(blocks, taker.target(), engines)
    assert set(taker.content) == {1}
    assert sorted(taker.content[1]) == [0, BLOCK_SIZE_BYTES, 2 * BLOCK_SIZE_BYTES]


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (-(2**62), 2**62, None),
        (2**61, 2**62, [0]),
        (-5, 0, [0]),
        (BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES, [0]),
        (BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES + 1, [0, 1]),
    ],
)
def test_ranges_that_no_file_has_ask_for_no_more_than_it_has(
    run: RunStore, manifest: Manifest, begin: int, end: int, expected: list[int] | None
) -> None:
    with ShardReader(run, manifest) as reader:
        found = reader.blocks_of([FileRange(segment=1, begin=begin, end=end)])
        record = next(each.record for each in reader.segments if each.record.segment == 1)
        assert reader.blocks_of([FileRange(segment=99, begin=0, end=1)]) == []
    every = list(range(-(-record.file_size_bytes // BLOCK_SIZE_BYTES)))
    assert [each.chunk.file_offset_bytes // BLOCK_SIZE_BYTES for each in found] == (expected or every)


def test_a_block_that_changed_ends_the_reading_and_the_checkpoint_is_offered_no_more(
    run: RunStore, manifest: Manifest, taker: Taker
) -> None:
    path = run.segment_path(manifest.segments[0])
    with path.open("r+b") as file:
        file.seek(5 * BLOCK_SIZE_BYTES + 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with (
        ShardReader(run, manifest) as reader,
        each_engine(run.store) as engines,
        pytest.raises(CorruptDataError, match=f"{path}: block 5 "),
    ):
        reader.read(reader.chunks(), taker.target(), engines)
    assert run.offered() == []
    assert CHUNK_SIZE_BYTES not in taker.content.get(manifest.segments[0].segment, {})


def test_a_header_that_changed_after_it_was_believed_is_found(
    run: RunStore, manifest: Manifest, taker: Taker
) -> None:
    """Another name in it: well-formed, and mended before the data are read."""
    path = run.segment_path(manifest.segments[0])
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"w@', b'"x@', 1))
    with ShardReader(run, manifest) as reader, each_engine(run.store) as engines:
        path.write_bytes(whole)
        with pytest.raises(CorruptDataError, match=f"{path}: the header is not"):
            reader.read(reader.chunks(), taker.target(), engines)


@pytest.mark.parametrize("segment", [0, 1])
def test_a_file_that_is_gone_or_cut_is_found_before_any_data(
    run: RunStore, manifest: Manifest, segment: int
) -> None:
    path = run.segment_path(manifest.segments[segment])
    path.rename(path.with_suffix(".away"))
    with pytest.raises(IncompleteError, match=f"{path} is gone"):
        ShardReader(run, manifest)
    path.write_bytes(path.with_suffix(".away").read_bytes()[:-1])
    with pytest.raises(CorruptDataError, match=str(path)):
        ShardReader(run, manifest)
    assert run.pinned() == set()


def test_a_checkpoint_that_was_removed_after_its_manifest_was_read_is_no_fault_of_a_drive(
    run: RunStore, manifest: Manifest
) -> None:
    remove_checkpoint(run, ONE)
    with pytest.raises(IncompleteError, match=r"checkpoint 1\.1 was removed while it was asked for"):
        ShardReader(run, manifest)
    assert run.store.may_delete, "no device is suspect"
    assert run.pinned() == set()


def test_a_read_error_is_no_damage_and_ends_all_readers(
    run: RunStore, manifest: Manifest, taker: Taker, faulty: FaultyStorage
) -> None:
    with ShardReader(run, manifest) as reader, each_engine(run.store) as engines:
        faulty.arm(2, only=lambda call: call.name == "read_segment")
        with pytest.raises(StorageError, match="EIO"):
            reader.read(reader.chunks(), taker.target(), engines)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("everstep-read")]
    faulty.arm(0)
    assert run.offered() == [ONE]


def test_what_the_taker_raises_ends_the_reading(run: RunStore, manifest: Manifest, taker: Taker) -> None:
    taker.fails_at = CHUNK_SIZE_BYTES
    with (
        ShardReader(run, manifest) as reader,
        each_engine(run.store) as engines,
        pytest.raises(RuntimeError, match="taken no more"),
    ):
        reader.read(reader.chunks(), taker.target(), engines)
    assert run.offered() == [ONE]


def test_the_checkpoint_is_kept_while_it_is_read(run: RunStore, manifest: Manifest) -> None:
    with ShardReader(run, manifest):
        assert run.pinned() == {ONE}
    assert run.pinned() == set()
