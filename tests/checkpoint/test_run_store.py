import os
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.collect import collect_garbage, remove_checkpoint
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import Call, CrashedError, FaultyStorage, Mode, make_state, opened, save
from everstep.core.errors import CorruptDataError, FencedError, NotFoundError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()


@pytest.fixture
def store(dirs: list[Path]) -> Generator[Store]:
    with opened(dirs) as (made, _):
        yield made


@pytest.fixture
def run(store: Store) -> RunStore:
    return store.run(UID, "demo", create=True)


def test_attempts_only_grow_and_are_on_every_device(run: RunStore, dirs: list[Path]) -> None:
    assert run.highest_attempt() == 0
    run.begin_attempt(2, fresh=False)
    for attempt in (1, 2):
        with pytest.raises(FencedError, match="attempt 2 has begun"):
            run.begin_attempt(attempt, fresh=False)
    run.begin_attempt(7, fresh=True)
    assert (run.highest_attempt(), run.fresh_floor()) == (7, 7)
    run.check_admission(7)
    for attempt in (2, 8):
        with pytest.raises(FencedError):
            run.check_admission(attempt)
    for path in dirs:
        assert {found.name for found in path.glob("runs/*/*/attempts/*")} == {"2", "7"}
    run.store.close()
    with opened(dirs) as (store, _):
        again = store.run(UID, "demo")
        assert (again.highest_attempt(), again.fresh_floor()) == (7, 7)


def test_two_threads_cannot_begin_the_same_attempt(run: RunStore) -> None:
    begun: list[int] = []
    barrier = threading.Barrier(4)

    def begin() -> None:
        barrier.wait()
        try:
            run.begin_attempt(1, fresh=False)
            begun.append(1)
        except FencedError:
            begun.append(0)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [0, 0, 0, 1]


def _suspects(store: Store) -> list[str]:
    keys = [device.device_id for device in store.devices]
    return [key for key in keys if store.device_state(key)[0] is DeviceState.SUSPECT]


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("mode", list(Mode))
def test_an_attempt_that_may_have_begun_is_never_begun_again(
    dirs: list[Path], mode: Mode, times: int
) -> None:
    """Whatever calls fail: either the attempt is begun on all devices that are left, or its number is used up."""
    ops = FaultyStorage(RealStorage())
    with opened(dirs) as (store, _):
        store.run(UID, "demo", create=True)
    for count in range(1, 30):
        with opened(dirs, ops=ops.as_ops()) as (store, _):
            run = store.run(UID, "demo")
            attempt = run.highest_attempt() + 1
            ops.arm(count, mode, times=times)
            begun = attempt
            try:
                run.begin_attempt(attempt, fresh=False)
            except (StorageError, CrashedError):
                ops.arm(0)
                with pytest.raises(FencedError):
                    run.begin_attempt(attempt, fresh=False)
                begun = attempt + 1
                run.begin_attempt(begun, fresh=True)
            else:
                ops.arm(0)
                if not _suspects(store):
                    assert count == 13
                    return
        with opened(dirs) as (store, _):
            assert store.run(UID, "demo").highest_attempt() == begun
        for path in dirs:
            assert (next(path.glob("runs/*/*")) / "attempts" / str(begun)).exists()
    pytest.fail("the call count was never reached")


def test_the_floor_only_rises_and_remembers_the_one_before(run: RunStore, dirs: list[Path]) -> None:
    assert run.complete_floor() is None
    run.begin_attempt(1, fresh=False)
    state = make_state(run.store)
    for step in (1, 2, 3, 4):
        save(run, state, CheckpointId(1, step), rank=0, world_size=2)
    run.set_complete_floor(CheckpointId(1, 2))
    run.set_complete_floor(CheckpointId(1, 3))
    run.set_complete_floor(CheckpointId(1, 1))
    assert run.complete_floor() == CheckpointId(1, 3)
    states = {info.checkpoint.step: info.state for info in run.checkpoints()}
    assert states == {
        1: CheckpointState.COMPLETE,
        2: CheckpointState.COMPLETE,
        3: CheckpointState.COMPLETE,
        4: CheckpointState.LOCAL,
    }
    run.store.close()
    with opened(dirs) as (store, _):
        again = store.run(UID, "demo")
        assert again.complete_floor() == CheckpointId(1, 3)
        assert [info.state.value for info in again.checkpoints()] == [
            "local",
            "complete",
            "complete",
            "local",
        ]


@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("mode", [Mode.NOT_DONE, Mode.DONE])
def test_a_floor_is_never_half_written(dirs: list[Path], mode: Mode, times: int) -> None:
    ops = FaultyStorage(RealStorage())
    with opened(dirs) as (store, _):
        store.run(UID, "demo", create=True).set_complete_floor(CheckpointId(1, 1))
    for count in range(1, 30):
        ops.arm(0)
        with opened(dirs, ops=ops.as_ops()) as (store, _):  # a device that failed is left out until then
            run = store.run(UID, "demo")
            ops.arm(count, mode, times=times)
            floor, before = CheckpointId(1, count + 1), run.complete_floor()
            may_be: set[CheckpointId | None] = {floor}
            try:
                run.set_complete_floor(floor)
            except StorageError:
                may_be.add(before)
            if not _suspects(store):
                break
            ops.arm(0)
            with opened(dirs, read_only=True) as (reader, report):
                assert report.problems == []
                assert reader.run(UID, "demo").complete_floor() in may_be
    assert count == 9  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_device_that_failed_is_left_out_of_attempts_and_floors_and_catches_up_at_the_next_opening(
    dirs: list[Path],
) -> None:
    ops = FaultyStorage(RealStorage())
    with opened(dirs, ops=ops.as_ops()) as (store, _):
        run = store.run(UID, "demo", create=True)
        bad = store.devices[0]
        ops.arm(1, only=lambda call: call.name == "replace" and bad.path in call.path.parents)
        run.set_complete_floor(CheckpointId(1, 1))
        assert store.device_state(bad.device_id)[0] is DeviceState.SUSPECT
        ops.arm(0)
        run.set_complete_floor(CheckpointId(1, 2))
        run.begin_attempt(2, fresh=False)
        store.run(UID, "another", create=True)
        assert not [call for call in ops.calls if bad.path in call.path.parents]
    with opened(dirs) as (store, report):
        run = store.run(UID, "demo")
        assert (run.highest_attempt(), run.complete_floor()) == (2, CheckpointId(1, 2))
        assert report.problems == []
        for path in dirs:
            assert len(list(path.glob("runs/*/*/attempts/2"))) == 1
            assert len(list(path.glob("runs/*/*/run.json"))) == 2


def test_the_newest_checkpoint_comes_first_and_older_ones_than_a_fresh_attempt_are_not_offered(
    run: RunStore,
) -> None:
    state = make_state(run.store)
    run.begin_attempt(1, fresh=False)
    save(run, state, CheckpointId(1, 900))
    run.begin_attempt(2, fresh=False)
    save(run, state, CheckpointId(2, 5), notes={"finished": "true", "epoch": "9"})
    infos = run.checkpoints()
    assert [str(info.checkpoint) for info in infos] == ["2.5", "1.900"]
    assert [info.is_finished for info in infos] == [True, False]
    assert infos[0].notes == {"finished": "true", "epoch": "9"}
    assert infos[0].size_bytes == sum(plan.file_size_bytes for plan in state.layout.segments)
    assert run.offered() == run.offered(rank=0) == [CheckpointId(2, 5), CheckpointId(1, 900)]
    assert run.offered(rank=1) == []
    run.begin_attempt(3, fresh=True)
    assert run.offered() == []
    save(run, state, CheckpointId(3, 1))
    assert run.offered() == [CheckpointId(3, 1)]


def test_what_the_newest_complete_checkpoint_has_gone_back_behind_is_not_offered(run: RunStore) -> None:
    state = make_state(run.store)
    run.begin_attempt(1, fresh=False)
    for step in (1, 2, 3):
        save(run, state, CheckpointId(1, step))
    run.set_complete_floor(CheckpointId(1, 3))
    run.begin_attempt(2, fresh=False)
    save(run, state, CheckpointId(2, 2), notes={"went_back": "2:1.1"})
    assert [str(each) for each in run.offered()] == ["2.2", "1.3", "1.2", "1.1"], (
        "of other ranks it may be lost"
    )
    run.set_complete_floor(CheckpointId(2, 2))
    assert [str(each) for each in run.offered()] == ["2.2", "1.1"]
    run.mark_damaged(
        CheckpointId(2, 2), 0, "a block is bad", generation=run.shard(CheckpointId(2, 2), 0).generation
    )
    assert [str(each) for each in run.offered()] == ["1.1"]


def test_what_an_attempt_goes_on_from_stays_until_a_checkpoint_of_it_is_complete(run: RunStore) -> None:
    state = make_state(run.store)
    run.begin_attempt(1, fresh=False)
    for step in (1, 2, 3, 4):
        save(run, state, CheckpointId(1, step))
    run.set_complete_floor(CheckpointId(1, 4))
    run.begin_attempt(2, fresh=False)
    run.goes_on_from(CheckpointId(1, 1))
    assert [str(each) for each in collect_garbage(run, keep=Keep(last=1)).removed] == ["1.2"]
    save(run, state, CheckpointId(2, 2))
    run.set_complete_floor(CheckpointId(2, 2))
    assert [str(each) for each in collect_garbage(run, keep=Keep(last=1)).removed] == ["1.1", "1.3"]


def test_shards_of_different_worlds_make_no_checkpoint(run: RunStore) -> None:
    run.begin_attempt(1, fresh=False)
    save(run, make_state(run.store), CheckpointId(1, 1), rank=0, world_size=2)
    save(run, make_state(run.store), CheckpointId(1, 1), rank=1, world_size=3)
    info = run.info(CheckpointId(1, 1))
    assert info.state is CheckpointState.DAMAGED
    assert "different world sizes" in info.problems[0]
    assert run.offered() == []


def test_a_manifest_comes_from_whichever_copy_is_whole(run: RunStore, dirs: list[Path]) -> None:
    run.begin_attempt(1, fresh=False)
    manifest = save(run, make_state(run.store), CheckpointId(1, 1)).manifest
    copies = [next(path.glob("runs/*/*/commits/1.1.0.mf")) for path in dirs]
    whole = copies[0].read_bytes()
    copies[0].write_bytes(whole[:-1])
    assert run.manifest(CheckpointId(1, 1), 0).generation == manifest.generation
    copies[1].unlink()
    with pytest.raises(CorruptDataError, match=r"not what was committed.*is gone|is gone.*not what was"):
        run.manifest(CheckpointId(1, 1), 0)
    with pytest.raises(NotFoundError, match="rank 1"):
        run.manifest(CheckpointId(1, 1), 1)
    with pytest.raises(NotFoundError, match=r"1\.2"):
        run.info(CheckpointId(1, 2))


def test_small_files_get_content_before_name_and_name_before_use(dirs: list[Path]) -> None:
    ops = FaultyStorage(RealStorage())
    with opened(dirs, ops=ops.as_ops()) as (store, _):
        run = store.run(UID, "demo", create=True)
        ops.arm(0)
        run.begin_attempt(1, fresh=False)
        for calls in by_device(ops, dirs):
            steps = [call.name for call in calls if call.name != "stat"]
            assert steps == ["write_small_new", "rename_noreplace", "sync_directory"]
        ops.arm(0)
        run.set_complete_floor(CheckpointId(1, 1))
        for calls in by_device(ops, dirs):
            steps = [call.name for call in calls if call.name != "stat"]
            assert steps == ["write_small_new", "replace", "sync_directory"]
        ops.arm(0)
        store.run(UID, "other", create=True)
        for calls in by_device(ops, dirs):
            made = [
                place for place, call in enumerate(calls) if call.path.name in ("attempts", "commits", "data")
            ]
            assert len(made) == 3
            assert made[-1] < [call.name for call in calls].index("rename_noreplace")  # run.json last


def by_device(ops: FaultyStorage, dirs: list[Path]) -> list[list[Call]]:
    """Return the calls on each device, in the order in which they were made there."""
    return [[call for call in ops.calls if call.path.is_relative_to(folder)] for folder in dirs]


def test_of_what_is_gone_nothing_is_remembered(run: RunStore) -> None:
    """A run may take millions of checkpoints and keep two: what is looked at for each must not grow."""
    run.begin_attempt(1, fresh=False)
    state = make_state(run.store)
    for step in range(1, 6):
        save(run, state, CheckpointId(1, step))
        run.set_complete_floor(CheckpointId(1, step))
        with run.reading(CheckpointId(1, step)):
            collect_garbage(run, keep=Keep(last=1))
    assert run._known_complete == set(run.offered()) == {CheckpointId(1, 5), CheckpointId(1, 4)}  # pyright: ignore[reportPrivateUsage]
    assert not run._pins  # pyright: ignore[reportPrivateUsage]


def test_several_are_told_to_be_complete_at_once_and_what_was_collected_is_not_remembered(
    run: RunStore, dirs: list[Path]
) -> None:
    run.begin_attempt(1, fresh=False)
    state = make_state(run.store)
    for step in (1, 2, 3, 4):
        save(run, state, CheckpointId(1, step), rank=0, world_size=2)
    run.set_complete_floor(CheckpointId(1, 3), CheckpointId(1, 4), CheckpointId(1, 2))
    assert run.complete_floor() == CheckpointId(1, 4)
    remove_checkpoint(run, CheckpointId(1, 1))
    run.set_complete_floor(CheckpointId(1, 1))  # as a rank says that was late
    save(run, state, CheckpointId(1, 1), rank=0, world_size=2)
    found = {info.checkpoint.step: info.state for info in run.checkpoints()}
    assert found == {1: CheckpointState.LOCAL, **dict.fromkeys((2, 3, 4), CheckpointState.COMPLETE)}
    run.store.close()
    with opened(dirs) as (store, _):
        found = {info.checkpoint.step: info.state for info in store.run(UID, "demo").checkpoints()}
        assert {step for step, each in found.items() if each is CheckpointState.COMPLETE} == {3, 4}
