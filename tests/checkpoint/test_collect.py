import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import (
    Call,
    CrashedError,
    FaultyStorage,
    Mode,
    begun,
    load,
    make_state,
    opened,
    save,
)
from everstep.core.errors import NotFoundError, RunBusyError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@pytest.fixture
def run(dirs: list[Path]) -> Generator[RunStore]:
    with opened(dirs) as (store, _):
        made = begun(store)
        for step in range(1, 6):
            save(made, make_state(store, step), at(step))
        yield made


def files(dirs: list[Path]) -> tuple[int, int, int]:
    """Return how many manifests, segments and generation directories there are."""
    patterns = ("commits/*.mf", "data/*/*.safetensors", "data/*")
    counts = [sum(len(list(path.glob(f"runs/*/*/{pattern}"))) for path in dirs) for pattern in patterns]
    return counts[0], counts[1], counts[2]


def test_old_checkpoints_go_with_all_their_files(run: RunStore, dirs: list[Path]) -> None:
    run.set_complete_floor(at(5))
    size = run.info(at(1)).size_bytes
    collected = collect_garbage(run, keep=Keep(last=2))
    assert collected.removed == (at(1), at(2), at(3))
    assert collected.freed_bytes == 3 * size
    assert files(dirs) == (4, 4, 4)
    assert run.offered() == [at(5), at(4)]
    assert collect_garbage(run, keep=Keep(last=2)).removed == ()
    run.store.close()
    with opened(dirs) as (store, report):
        assert store.run(UID, "demo").offered() == [at(5), at(4)]
        assert report.problems == []


def test_what_is_being_read_or_written_stays(run: RunStore, dirs: list[Path]) -> None:
    run.set_complete_floor(at(5))
    with run.reading(at(2)):
        assert collect_garbage(run, keep=Keep(last=1)).removed == (at(1), at(3))
        with pytest.raises(RunBusyError, match="in use"):
            remove_checkpoint(run, at(2))
        assert load(run, run.manifest(at(2), 0))
    assert collect_garbage(run, keep=Keep(last=1)).removed == (at(2),)
    assert files(dirs) == (4, 4, 4)


def test_what_a_reader_takes_up_during_a_collection_stays(run: RunStore, dirs: list[Path]) -> None:
    """It was free when the collection was planned: asked again when its turn comes."""
    run.set_complete_floor(at(5))
    run.store.close()
    ops = FaultyStorage(RealStorage())
    with opened(dirs, ops=ops.as_ops()) as (store, _), ExitStack() as readers:
        found = store.run(UID, "demo")

        def take_up(call: Call) -> bool:
            if call.name == "unlink" and at(2) not in found.pinned():
                readers.enter_context(found.reading(at(2)))
            return False

        ops.arm(1, only=take_up)
        assert collect_garbage(found, keep=Keep(last=1)).removed == (at(1), at(3))
        assert load(found, found.manifest(at(2), 0))


def test_one_checkpoint_is_removed_on_request(run: RunStore, dirs: list[Path]) -> None:
    assert remove_checkpoint(run, at(5)).removed == (at(5),)
    assert run.offered() == [at(4), at(3), at(2), at(1)]
    assert files(dirs) == (8, 8, 8)
    with pytest.raises(NotFoundError, match=r"1\.5"):
        remove_checkpoint(run, at(5))


def test_nothing_is_removed_while_a_device_is_missing_or_suspect(run: RunStore, dirs: list[Path]) -> None:
    run.set_complete_floor(at(5))
    run.store.close()
    shutil.move(dirs[1], dirs[1].with_name("away"))
    with opened(dirs[:1]) as (store, _):
        found = store.run(UID, "demo")
        collected = collect_garbage(found, keep=Keep(last=1))
        assert (collected.removed, collected.reason) == ((), f"missing devices: {dirs[1]}")
        with pytest.raises(StorageError, match="cannot be removed: missing devices"):
            remove_checkpoint(found, at(1))
    shutil.move(dirs[1].with_name("away"), dirs[1])
    with opened(dirs) as (store, _):
        found = store.run(UID, "demo")
        store.mark_suspect(store.devices[0].device_id, StorageError("it hurts"))
        assert "suspect" in collect_garbage(found, keep=Keep(last=1)).reason
    with opened(dirs, read_only=True) as (store, _):
        assert "reading only" in collect_garbage(store.run(UID, "demo"), keep=Keep(last=1)).reason
    assert files(dirs) == (10, 10, 10)


def test_manifests_go_first_and_durably(run: RunStore, dirs: list[Path]) -> None:
    run.store.close()
    ops = FaultyStorage(RealStorage())
    with opened(dirs, ops=ops.as_ops()) as (store, _):
        found = store.run(UID, "demo")
        ops.arm(0)
        remove_checkpoint(found, at(1))
        steps = [(call.name, call.path.suffix or call.path.name[:7]) for call in ops.calls]
        assert steps[:4] == [("unlink", ".mf")] * 2 + [("sync_directory", "commits")] * 2
        assert steps[4:6] == [("unlink", ".safetensors")] * 2
        assert [name for name, _ in steps[6:]] == ["remove_directory", "sync_directory"] * 2


@pytest.mark.parametrize("mode", list(Mode))
def test_removing_may_fail_or_crash_at_every_call(run: RunStore, dirs: list[Path], mode: Mode) -> None:
    """Half a checkpoint never comes back, and the others stay; after recovery no file is left over."""
    run.set_complete_floor(at(5))
    run.store.close()
    template = dirs[0].with_name("template")
    for place, path in enumerate(dirs):
        shutil.copytree(path, template / str(place))
    for count in range(1, 60):
        for place, path in enumerate(dirs):
            shutil.rmtree(path)
            shutil.copytree(template / str(place), path)
        ops = FaultyStorage(RealStorage())
        with opened(dirs, ops=ops.as_ops()) as (store, _):
            ops.arm(count, mode)
            try:
                removed = collect_garbage(store.run(UID, "demo"), keep=Keep(last=3)).removed
            except (StorageError, CrashedError):
                removed = ()
            reached = len(ops.calls) >= count
        with opened(dirs) as (store, report):
            found = store.run(UID, "demo")
            assert set(removed).isdisjoint(found.offered())
            assert {at(3), at(4), at(5)} <= set(found.offered())
            assert report.damaged_count == 0
            for checkpoint in found.offered():
                assert (
                    load(found, found.manifest(checkpoint, 0)) == make_state(store, checkpoint.step).content
                )
            kept = 2 * len(found.offered())
            assert files(dirs) == (kept, kept, kept)
        if not reached:
            assert count > 18
            return
    pytest.fail("the call count was never reached")
