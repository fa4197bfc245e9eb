"""What reading has shown to be damaged: known after a restart, until another reading disproves it."""

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from everstep.checkpoint import verify
from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.engine import Engine
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import DAMAGED_NAME, RunStore
from everstep.checkpoint.segment_check import Chunk, read_chunk
from everstep.checkpoint.storage_ops import ArenaRange, SegmentHandle, StorageOps
from everstep.checkpoint.testing import (
    CrashedError,
    FaultyStorage,
    Mode,
    load,
    make_state,
    opened,
    save,
    save_again,
    save_steps,
)
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import CorruptDataError
from everstep.core.ids import CheckpointId

UID = os.geteuid()


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@pytest.fixture
def dirs(dirs: list[Path]) -> list[Path]:
    """Devices of a store with three complete checkpoints, of which the last is known complete."""
    with opened(dirs) as (store, _):
        save_steps(store, (1, 2, 3))
    return dirs


@pytest.fixture
def run(dirs: list[Path]) -> Generator[RunStore]:
    with opened(dirs) as (store, _):
        yield store.run(UID, "demo")


def flip(run: RunStore, step: int) -> None:
    """Turn the last bit of a segment's file; once more makes it right again."""
    path = run.segment_path(run.shard(at(step), 0).segments[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def states(dirs: list[Path]) -> list[CheckpointState]:
    """Return what the next process says of the checkpoints, the oldest first."""
    with opened(dirs) as (store, _):
        return [info.state for info in reversed(store.run(UID, "demo").checkpoints())]


def copies(dirs: list[Path]) -> list[Path]:
    return [path for folder in dirs for path in folder.glob(f"runs/*/*/{DAMAGED_NAME}")]


C, D = CheckpointState.COMPLETE, CheckpointState.DAMAGED


def by_verifying(run: RunStore) -> None:
    assert not verify_checkpoint(run, at(2)).is_intact


def by_restoring(run: RunStore) -> None:
    with pytest.raises(CorruptDataError, match="is not what was committed"):
        load(run, run.manifest(at(2), 0))


@pytest.mark.parametrize("find", [by_verifying, by_restoring])
def test_a_restart_knows_it_and_collection_leaves_another_one_in_its_place(
    dirs: list[Path], run: RunStore, find: Callable[[RunStore], None]
) -> None:
    flip(run, 2)
    find(run)
    assert len(copies(dirs)) == len(dirs)
    run.store.close()
    with opened(dirs) as (store, report):
        found = store.run(UID, "demo")
        assert found.offered() == [at(3), at(1)]
        assert report.damaged_count == 1
        assert "rank 0 of 1.2 is not offered, as reading it has shown before" in report.problems[0]
        assert collect_garbage(found, keep=Keep(last=1)).removed == (at(2),)
        save(found, make_state(store, 4), at(4))
        found.set_complete_floor(at(4))
        assert collect_garbage(found, keep=Keep(last=1)).removed == (at(1),)
    assert states(dirs) == [C, C]


def test_a_whole_reading_that_finds_it_right_takes_it_back(dirs: list[Path], run: RunStore) -> None:
    flip(run, 2)
    by_verifying(run)
    run.store.close()
    with opened(dirs) as (store, _):
        found = store.run(UID, "demo")
        assert not verify_checkpoint(found, at(2)).is_intact  # again is nothing
        flip(found, 2)
        assert verify_checkpoint(found, at(2)).is_intact
        assert found.offered() == [at(3), at(2), at(1)]
    assert states(dirs) == [C, C, C]


def test_a_shard_that_was_written_again_is_not_meant(dirs: list[Path], run: RunStore) -> None:
    flip(run, 2)
    by_verifying(run)
    save_again(run, make_state(run.store, 2), at(2))
    run.store.close()
    assert states(dirs) == [C, C, C]


def test_a_file_that_is_away_is_not_remembered(dirs: list[Path], run: RunStore) -> None:
    path = run.segment_path(run.shard(at(2), 0).segments[0])
    path.rename(path.with_name("away"))
    by_verifying(run)
    assert run.offered() == [at(3), at(1)]
    path.with_name("away").rename(path)
    run.store.close()
    assert copies(dirs) == []
    assert states(dirs) == [C, C, C]


def test_a_bad_transfer_is_no_damage(
    dirs: list[Path], run: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[Path]()

    def bad_at_first(
        ops: StorageOps, handle: SegmentHandle, arena: ArenaRange, chunk: Chunk, engine: Engine
    ) -> None:
        read_chunk(ops, handle, arena, chunk, engine)
        if chunk.path not in seen:
            seen.add(chunk.path)
            with arena.view(0, 1) as first:
                first[0] ^= 1

    monkeypatch.setattr(verify, "read_chunk", bad_at_first)
    assert verify_checkpoint(run, at(2)).is_intact
    assert len(seen) == len(run.shard(at(2), 0).segments)
    assert copies(dirs) == []


def test_who_only_reads_writes_nothing(dirs: list[Path], run: RunStore) -> None:
    flip(run, 2)
    run.store.close()
    with opened(dirs, read_only=True) as (store, _):
        by_verifying(store.run(UID, "demo"))
    assert copies(dirs) == []


def test_the_copy_with_the_most_changes_counts_and_a_broken_one_is_put_aside(
    dirs: list[Path], run: RunStore
) -> None:
    flip(run, 2)
    by_verifying(run)
    older = copies(dirs)[0].read_bytes()
    flip(run, 1)
    assert not verify_checkpoint(run, at(1)).is_intact
    run.store.close()
    copies(dirs)[0].write_bytes(older)
    assert states(dirs) == [D, D, C]
    copies(dirs)[0].write_bytes(b'{"format":1}')
    assert states(dirs) == [D, D, C]
    assert len(copies(dirs)) == 1
    copies(dirs)[0].write_bytes(b'{"format":2}')
    with opened(dirs) as (store, report):
        assert "what was found damaged is unknown" in report.problems[0]
        assert store.is_whole
        assert not verify_checkpoint(store.run(UID, "demo"), at(2)).is_intact


def test_a_crash_at_any_call_leaves_what_was_known_before_or_this(dirs: list[Path]) -> None:
    ops = FaultyStorage(RealStorage())
    with opened(dirs) as (store, _):
        flip(store.run(UID, "demo"), 2)
    fail_at = 0
    while True:
        fail_at += 1
        with opened(dirs, ops=ops.as_ops()) as (store, _):
            run = store.run(UID, "demo")
            ops.arm(fail_at, Mode.CRASH)
            try:
                run.mark_intact(at(2), 0, generation=run.shard(at(2), 0).generation)
                by_verifying(run)
                break
            except CrashedError:
                ops.arm(0)
        assert states(dirs) in ([C, C, C], [C, D, C])
    assert fail_at > 6
    assert states(dirs) == [C, D, C]
