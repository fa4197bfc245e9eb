"""A shard streamed from the devices by a real daemon, to trainers that take it, dawdle, leave and die."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pausing import wait_until

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.segment_check import CHUNK_SIZE_BYTES
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.devices.restore_stream import RING_CHUNKS_MIN
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

SAVED = CheckpointId(1, 7)
CHUNKS = RING_CHUNKS_MIN + 3
"""More than the ring has room for."""
LEAVES = tuple(whole_leaf(f"w.{index}", "int8", (CHUNK_SIZE_BYTES // 2,)) for index in range(2 * CHUNKS - 1))


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "d0"
    path.mkdir()
    return path


@pytest.fixture
def daemon(socket_path: Path, device: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """With one checkpoint of a run, on the device only."""
    with daemon_process(socket_path) as process:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([device])
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout(LEAVES), slot_count=1)
            arena.save(SAVED, seed=3)
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
            arena.close()
        yield process


def restarted(socket_path: Path, device: Path) -> tuple[FakeTrainer, frames.Streaming]:
    trainer = FakeTrainer(socket_path)
    trainer.open_run([device])
    trainer.begin_attempt(2)
    shard = trainer.fetch(SAVED)
    assert isinstance(shard, frames.Streaming), shard
    return trainer, shard


def arena_bytes(socket_path: Path) -> int:
    with connected(socket_path) as client:
        return client.status().daemon.arena_bytes


def segments(device: Path) -> dict[int, bytes]:
    return {int(path.stem): path.read_bytes() for path in device.glob("runs/*/*/data/*/*.safetensors")}


@pytest.mark.usefixtures("daemon")
def test_the_files_come_whole_through_a_ring_that_is_smaller(socket_path: Path, device: Path) -> None:
    trainer, shard = restarted(socket_path, device)
    assert shard.slot_count * shard.slot_size_bytes == RING_CHUNKS_MIN * CHUNK_SIZE_BYTES
    with trainer:
        chunks, end = trainer.stream(shard)
        assert not end.code
        files = {segment: b"".join(found[at] for at in sorted(found)) for segment, found in chunks.items()}
        assert files == segments(device)
        assert sum(len(found) for found in chunks.values()) > shard.slot_count
        assert all(files[number].startswith(header) for number, header in enumerate(shard.headers))


@pytest.mark.usefixtures("daemon")
def test_who_takes_nothing_gets_as_many_chunks_as_there_are_slots(socket_path: Path, device: Path) -> None:
    trainer, shard = restarted(socket_path, device)
    with trainer:
        os.close(trainer.reader.take_fd())
        trainer.send(frames.Stream(arena=shard.arena, ranges=[]))
        taken = [trainer.event(frames.Chunk) for _ in range(shard.slot_count)]
        slots = [chunk.slot for chunk in taken if isinstance(chunk, frames.Chunk)]
        assert sorted(slots) == list(range(shard.slot_count))
        trainer.ask(frames.ListOffers(request_id=trainer.number()))  # all frames before its answer are here
        assert not trainer.events
        trainer.send(frames.ChunkTaken(arena=shard.arena, slot=slots[3]))
        again = trainer.event(frames.Chunk)
        assert isinstance(again, frames.Chunk)
        assert again.slot == slots[3]


@pytest.mark.usefixtures("daemon")
def test_one_pass_after_the_other(socket_path: Path, device: Path) -> None:
    trainer, shard = restarted(socket_path, device)
    with trainer:
        os.close(trainer.reader.take_fd())
        trainer.send(frames.Stream(arena=shard.arena, ranges=[(0, 0, 1)]))
        first = trainer.event(frames.Chunk)
        assert isinstance(first, frames.Chunk)
        assert first.file_offset_bytes == 0
        trainer.send(frames.ChunkTaken(arena=shard.arena, slot=first.slot))
        assert trainer.event(frames.StreamEnd) == frames.StreamEnd(
            arena=shard.arena, code="", message="", hint=""
        )
        trainer.send(frames.Stream(arena=shard.arena, ranges=[]))
        trainer.send(frames.Stream(arena=shard.arena, ranges=[]))
        refused = trainer.event(frames.Failure)
        assert isinstance(refused, frames.Failure)
        assert "being read already" in refused.message


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    "frame",
    [
        lambda arena: frames.ChunkTaken(arena=arena, slot=0),
        lambda arena: frames.ChunkTaken(arena=arena, slot=-1),
        lambda arena: frames.ChunkTaken(arena=arena + 1, slot=0),
        lambda arena: frames.Stream(arena=arena + 1, ranges=[]),
        lambda arena: frames.Release(arena=arena + 1),
    ],
)
def test_what_does_not_fit_is_refused_and_the_shard_still_comes(
    socket_path: Path, device: Path, frame: Callable[[int], frames.Request]
) -> None:
    trainer, shard = restarted(socket_path, device)
    with trainer:
        trainer.send(frame(shard.arena))
        assert isinstance(trainer.event(frames.Failure), frames.Failure)
        chunks, end = trainer.stream(shard)
        assert not end.code
        assert sum(len(content) for found in chunks.values() for content in found.values()) == sum(
            len(content) for content in segments(device).values()
        )


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("leaves", ["release", "vanishes"])
def test_the_ring_is_given_back_when_its_taker_goes_in_the_middle(
    socket_path: Path, device: Path, leaves: str
) -> None:
    trainer, shard = restarted(socket_path, device)
    with trainer:
        os.close(trainer.reader.take_fd())
        trainer.send(frames.Stream(arena=shard.arena, ranges=[]))
        trainer.event(frames.Chunk)
        assert arena_bytes(socket_path) == shard.slot_count * shard.slot_size_bytes
        if leaves == "release":
            trainer.send(frames.Release(arena=shard.arena))
        else:
            trainer.close()
        wait_until(lambda: arena_bytes(socket_path) == 0)
    again, shard = restarted(socket_path, device)
    with again:
        assert not again.stream(shard)[1].code


@pytest.mark.usefixtures("daemon")
def test_the_checkpoint_is_kept_from_collection_until_the_stream_ends(
    socket_path: Path, device: Path
) -> None:
    """Three newer ones are complete meanwhile, of which two are kept."""
    trainer, shard = restarted(socket_path, device)
    with trainer:
        ring_fd = trainer.reader.take_fd()
        files = list(device.glob("runs/*/*/data/*/*.safetensors"))
        small = trainer.make_arena(trainer.layout(), slot_count=2)
        for step in (8, 9, 10):
            small.save(CheckpointId(2, step), seed=step, slot=step % 2)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            trainer.send(frames.SealedEverywhere(attempt=2, step=step))
        assert all(path.exists() for path in files)
        trainer.send(frames.Release(arena=shard.arena))
        os.close(ring_fd)
        small.save(CheckpointId(2, 11), seed=1, slot=1)
        wait_until(lambda: not any(path.exists() for path in files))
        small.close()


@pytest.mark.usefixtures("daemon")
def test_trainers_that_stop_in_a_restore_hold_no_threads_that_others_need(
    socket_path: Path, device: Path
) -> None:
    """As many as the event loop has threads for whatever comes; each ring is full, and nobody takes."""
    small = CheckpointId(2, 1)
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run([device])
        trainer.begin_attempt(2)
        arena = trainer.make_arena(trainer.layout(), slot_count=1)
        arena.save(small, seed=4)
        assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)
        arena.close()
    with FakeTrainer(socket_path) as stopped, FakeTrainer(socket_path) as other:
        stopped.open_run([device])
        for _ in range((os.cpu_count() or 1) + 4):  # of concurrent.futures, up to 32
            shard = stopped.fetch(small)
            assert isinstance(shard, frames.Streaming), shard
            os.close(stopped.reader.take_fd())
            stopped.send(frames.Stream(arena=shard.arena, ranges=[]))
            for _ in range(shard.slot_count):
                stopped.event(frames.Chunk)
            stopped.event(frames.StreamEnd)
            stopped.send(frames.Stream(arena=shard.arena, ranges=[]))
        other.open_run([device], name="other")
        assert isinstance(other.begin_attempt(1), frames.Done)
