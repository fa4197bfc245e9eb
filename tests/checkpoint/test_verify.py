import os
import random
from collections.abc import Generator
from pathlib import Path

import pytest

from everstep.checkpoint import verify
from everstep.checkpoint.catalogue import BOUNDARY_NOTE, CheckpointState
from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.engine import Engine
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_check import Chunk, read_chunk
from everstep.checkpoint.storage_ops import ArenaRange, SegmentHandle, StorageOps
from everstep.checkpoint.testing import begun, each_engine, make_state, opened, save, save_again
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import NotFoundError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
ONE = CheckpointId(1, 1)


@pytest.fixture
def dirs(dirs: list[Path]) -> list[Path]:
    with opened(dirs) as (store, _):
        run = begun(store)
        for rank in range(2):
            save(run, make_state(store, rank), ONE, rank=rank, world_size=2)
    return dirs


@pytest.fixture
def run(dirs: list[Path]) -> Generator[RunStore]:
    with opened(dirs, read_only=True) as (store, _):
        yield store.run(UID, "demo")


def test_an_intact_checkpoint_is_read_whole_beside_a_daemon(dirs: list[Path], run: RunStore) -> None:
    with opened(dirs):
        verdict = verify_checkpoint(run, ONE)
    assert verdict.is_intact
    assert [(each.rank, each.segment) for each in verdict.segments] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(each.size_bytes for each in verdict.segments) == run.info(ONE).size_bytes
    with each_engine(run.store) as engines:
        assert verify_checkpoint(run, ONE, engines=engines) == verdict


def test_each_broken_bit_is_found(run: RunStore) -> None:
    path = run.segment_path(run.shard(ONE, 1).segments[1])
    whole = path.read_bytes()
    for bit in random.Random(3).sample(range(8 * len(whole)), 40):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        verdict = verify_checkpoint(run, ONE)
        assert [bool(each.problem) for each in verdict.segments] == [False, False, False, True]
        assert str(path) in verdict.segments[3].problem
    assert run.offered() == []


def test_segments_that_are_gone_and_manifests_that_are_broken_are_told(
    run: RunStore, dirs: list[Path]
) -> None:
    run.segment_path(run.shard(ONE, 0).segments[0]).unlink()
    for path in dirs:
        next(path.glob("runs/*/*/commits/1.1.1.mf")).write_bytes(b"x")
    verdict = verify_checkpoint(run, ONE)
    assert not verdict.is_intact
    assert ["is gone" in each.problem for each in verdict.segments] == [True, False]
    assert "rank 1" in verdict.problems[0]
    with pytest.raises(NotFoundError):
        verify_checkpoint(run, CheckpointId(1, 2))


def test_shards_of_different_boundaries_are_no_checkpoint_though_each_is_whole(dirs: list[Path]) -> None:
    apart = CheckpointId(1, 2)
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo")
        for rank in range(2):
            notes = {BOUNDARY_NOTE: str(1 + rank)}
            save(run, make_state(store, rank), apart, rank=rank, world_size=2, notes=notes)
        verdict = verify_checkpoint(run, apart)
        assert not any(each.problem for each in verdict.segments)
        assert verdict.problems == run.info(apart).problems
        assert verdict.problems == ("its shards were taken after different boundaries: 1, 2",)
        assert not verdict.is_intact


def test_a_device_that_is_away_is_no_damage_and_nothing_is_left_of_it_when_it_is_back(
    dirs: list[Path], tmp_path: Path
) -> None:
    """Reading says that the device is away, not that files are gone, and takes it back once all can be read."""
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo")
        dirs[1].rename(tmp_path / "away")
        problems = [each.problem for each in verify_checkpoint(run, ONE).segments if each.problem]
        assert problems
        assert all(f"{dirs[1]} is not the directory that was opened" in each for each in problems)
        assert run.info(ONE).state is CheckpointState.DAMAGED
        (tmp_path / "away").rename(dirs[1])
        assert verify_checkpoint(run, ONE).is_intact
        assert run.info(ONE).state is CheckpointState.COMPLETE


def test_what_a_drive_did_not_give_for_a_moment_is_not_let_go(
    dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is offered no more until it was read; as damaged it went with the next collection, the tape of a week."""
    keep = Keep(last=3)
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo")
        for step in range(2, 6):
            for rank in range(2):
                save(run, make_state(store, rank), CheckpointId(1, step), rank=rank, world_size=2)
        run.set_complete_floor(CheckpointId(1, 5))

        def failing(*_: object) -> None:
            raise StorageError("the controller resets")

        with monkeypatch.context() as patched:
            patched.setattr(verify, "read_chunk", failing)
            for step in (1, 3, 4):
                assert not verify_checkpoint(run, CheckpointId(1, step)).is_intact
        assert [each.step for each in run.offered()] == [5, 2]
        removed = collect_garbage(run, keep=keep).removed
        assert [each.step for each in removed] == [1], "which would go if it were well"
        for rank in range(2):
            save(run, make_state(store, rank), CheckpointId(1, 6), rank=rank, world_size=2)
        run.set_complete_floor(CheckpointId(1, 6))
        assert verify_checkpoint(run, CheckpointId(1, 4)).is_intact
        assert [each.step for each in collect_garbage(run, keep=keep).removed] == [2, 3]
        assert [each.step for each in run.offered()] == [6, 5, 4]


def test_a_shard_with_a_file_that_is_gone_is_not_taken_for_one_that_was_not_read(
    dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo")
        run.segment_path(run.shard(ONE, 0).segments[1]).unlink()

        def failing(*_: object) -> None:
            raise StorageError("the controller resets")

        monkeypatch.setattr(verify, "read_chunk", failing)
        assert not verify_checkpoint(run, ONE).is_intact
        assert "is gone" in run.shard(ONE, 0).problem
        assert (run.shard(ONE, 1).faults, run.shard(ONE, 1).unread) == ((), "the controller resets")
        assert run.info(ONE).unread_state is None


def test_a_file_that_cannot_be_looked_at_is_not_gone_and_nothing_is_left_of_it_when_it_can_be(
    dirs: list[Path],
) -> None:
    """Its folder is no folder for a while, so that `stat` fails with something else than that there is no file."""
    with opened(dirs) as (store, _):
        run = store.run(UID, "demo")
        folder = run.segment_path(run.shard(ONE, 0).segments[1]).parent
        aside = folder.rename(folder.with_name("aside"))
        folder.touch()
        problems = [each.problem for each in verify_checkpoint(run, ONE).segments if each.problem]
        assert problems
        assert all("Not a directory" in each for each in problems), problems
        assert (run.shard(ONE, 0).faults, run.offered()) == ((), [])
        assert "Not a directory" in run.shard(ONE, 0).unread
        folder.unlink()
        aside.rename(folder)
        assert verify_checkpoint(run, ONE).is_intact
        assert run.offered() == [ONE]


def test_what_is_broken_in_a_shard_that_was_written_again_meanwhile_spoils_nothing(
    dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device dies while a checkpoint is read: the reader hears of it after the shards are safe elsewhere."""
    with opened(dirs) as (store, _):
        run, device = store.run(UID, "demo"), store.devices[0]

        def dying(
            ops: StorageOps, handle: SegmentHandle, arena: ArenaRange, chunk: Chunk, engine: Engine
        ) -> None:
            if device.path not in handle.path.parents:
                read_chunk(ops, handle, arena, chunk, engine)
                return
            store.mark_suspect(device.device_id, StorageError("it hurts"))
            for rank in range(2):
                save_again(run, make_state(store, rank, segment_count=2), ONE, rank=rank)
            raise StorageError("it hurts")

        with monkeypatch.context() as patched:
            patched.setattr(verify, "read_chunk", dying)
            assert not verify_checkpoint(run, ONE).is_intact
        assert run.offered() == [ONE]
        assert verify_checkpoint(run, ONE).is_intact
