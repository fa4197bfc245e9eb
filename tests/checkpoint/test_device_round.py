"""A device that hangs holds up no commit, no attempt and no tag, and has all of it in the end."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from hanging_storage import HangingStorage
from pausing import wait_until

from everstep.checkpoint import device_round, device_set
from everstep.checkpoint.collect import refusal, remove_checkpoint
from everstep.checkpoint.damage import record_damage
from everstep.checkpoint.device import Device, lock_directory, survey_directory
from everstep.checkpoint.device_change import drain
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.manifest_format import manifest_name
from everstep.checkpoint.run_store import DAMAGED_NAME, TAGS_NAME, RunStore
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store
from everstep.checkpoint.tags import add_tag, remove_tag
from everstep.checkpoint.testing import HOLDER, begun, load, make_state, opened, save, save_again
from everstep.core.errors import CorruptDataError, DeviceLockedError, FencedError
from everstep.core.ids import CheckpointId

UID = os.geteuid()
LATE_S = 0.2


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(device_round, "LATE_CALL_S", LATE_S)


@pytest.fixture
def run(store: Store) -> RunStore:
    return begun(store)


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


def state_of(device: Device, store: Store) -> DeviceState:
    return store.device_state(device.device_id)[0]


def small_files(device: Device) -> dict[str, bytes]:
    """Return what a device says of the runs of its store, by path."""
    return {
        str(path.relative_to(device.path)): path.read_bytes()
        for path in device.runs_path.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }


def foreign(run: RunStore, device: Device, step: int) -> None:
    """Put under a manifest's name what somebody else wrote."""
    (run.commits_path(device) / manifest_name(at(step), 0)).write_bytes(b"another writer's")


def test_a_shard_is_committed_while_a_device_that_has_no_byte_of_it_hangs(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    well, late = store.devices
    drain(store, late.device_id)
    state = make_state(store, 1)
    with ops.hanging(late.path):
        first = save(run, state, at(1))
        assert (first.copy_count, first.device_count) == (1, 2)
        found, reason = store.device_state(late.device_id)
        assert found is DeviceState.SUSPECT
        assert "writing the manifest of rank 0 of checkpoint 1.1 was done on another device" in reason
        assert reason in first.problems[0]
        assert "suspect" in refusal(run), "it may yet take the manifest"
        assert save(run, state, at(2)).copy_count == 1, "it is not asked while it hangs"
    wait_until(lambda: state_of(late, store) is DeviceState.DRAINING)
    assert small_files(late) == small_files(well)
    assert refusal(run) == ""
    assert load(run, first.manifest) == state.content


def test_nobody_is_left_behind_before_it_is_done_anywhere(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    failing, slow = store.devices
    commits = run.commits_path(failing)
    with ThreadPoolExecutor(1) as pool, ops.hanging(slow.path, "write_small_new") as rule:
        commits.rename(commits.with_name("moved"))
        saved = pool.submit(save, run, make_state(store, 1), at(1))
        rule.wait_asked()
        with pytest.raises(TimeoutError):
            saved.result(5 * LATE_S)
        assert state_of(slow, store) is DeviceState.OK
        rule.let_go()
        assert saved.result().copy_count == 1
    assert [state_of(each, store) for each in (failing, slow)] == [DeviceState.SUSPECT, DeviceState.OK]


def test_where_another_writer_was_there_before_all_are_waited_for(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    taken, slow = store.devices
    foreign(run, taken, 1)
    with ThreadPoolExecutor(1) as pool, ops.hanging(slow.path, "write_small_new") as rule:
        saved = pool.submit(save, run, make_state(store, 1), at(1))
        rule.wait_asked()
        with pytest.raises(TimeoutError):
            saved.result(5 * LATE_S)
        rule.let_go()
        with pytest.raises(FencedError, match="was committed by another writer"):
            saved.result()
    assert not (run.commits_path(slow) / manifest_name(at(1), 0)).exists()


def test_another_writer_on_a_device_that_was_left_behind_makes_it_suspect(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, late = store.devices
    with ops.hanging(late.path, "write_small_new"):
        assert save(run, make_state(store, 1), at(1)).copy_count == 1
        foreign(run, late, 1)
    wait_until(lambda: "was done on another device" not in store.device_state(late.device_id)[1])
    assert "another writer's manifest" in store.device_state(late.device_id)[1]
    assert "suspect" in refusal(run)


def test_a_device_that_was_late_has_all_that_happened_meanwhile_before_anything_is_deleted(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    well, late = store.devices
    save(run, make_state(store, 1), at(1))
    drain(store, late.device_id)
    with ops.hanging(late.path):
        run.begin_attempt(2, fresh=False)
        assert store.device_state(late.device_id)[1].startswith("beginning attempt 2 was done on another")
        new = CheckpointId(2, 1)
        save(run, make_state(store, 2), new)
        run.set_complete_floor(new)
        add_tag(run, "best", new)
        other = store.run(UID, "other", create=True)
        other.begin_attempt(1, fresh=True)
        run.begin_attempt(3, fresh=True)
        assert len(small_files(late)) < len(small_files(well))
    wait_until(lambda: refusal(run) == "")
    assert small_files(late) == small_files(well)
    remove_checkpoint(run, at(1))
    assert small_files(late) == small_files(well)


def test_a_device_that_hangs_while_it_takes_what_it_missed_holds_nobody_up(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    well, late = store.devices
    with ops.where(lambda _, path: path.parent == run.commits_path(late)) as again:
        with ops.hanging(late.path):
            run.begin_attempt(2, fresh=False)
            save(run, make_state(store, 1), CheckpointId(2, 1))
        again.wait_asked()
        run.begin_attempt(3, fresh=False)
        add_tag(run, "best", CheckpointId(2, 1))
        run.set_complete_floor(CheckpointId(2, 1))
        drain(store, late.device_id)
        assert state_of(late, store) is DeviceState.SUSPECT
    wait_until(lambda: refusal(run) == "")
    assert state_of(late, store) is DeviceState.DRAINING
    assert small_files(late) == small_files(well)
    assert known_members(store, late) == known_members(store, well)


def test_nothing_is_deleted_while_a_device_takes_what_it_missed(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    """Also where it is late once more meanwhile, and answers that call first."""
    _, late = store.devices
    first, second = make_state(store, 1), make_state(store, 2)

    def comes_back(name: str, path: Path) -> bool:
        return name == "stat" and path.parent == run.commits_path(late) and late in store.trusted

    save(run, first, at(1))
    with ops.where(comes_back) as catching_up:
        with ops.hanging(late.path):
            run.begin_attempt(2, fresh=False)
        catching_up.wait_asked()
        assert "suspect" in refusal(run)
        with ops.hanging(late.path, "write_small_new"):
            assert save(run, second, CheckpointId(2, 1)).copy_count == 1
            assert late not in store.trusted
        assert "suspect" in refusal(run)
    wait_until(lambda: refusal(run) == "")
    assert late in store.trusted
    remove_checkpoint(run, at(1))
    assert not (run.commits_path(late) / manifest_name(at(1), 0)).exists()


def known_members(store: Store, device: Device) -> tuple[frozenset[str], frozenset[str]]:
    """Return of which members, and which of them drain, a device knows."""
    found = survey_directory(store.ops, device.path, uid=UID).disk_id
    assert found is not None
    return frozenset(found.members), frozenset(found.draining)


def test_a_device_that_was_late_learns_who_belongs_to_the_store(
    dirs: list[Path], ops: HangingStorage
) -> None:
    dirs.append(dirs[0].with_name("c"))
    dirs[2].mkdir()
    with opened(dirs, ops=cast(StorageOps, ops)) as (store, _):
        run = begun(store)
        first, late, third = store.devices
        with ops.hanging(late.path):
            run.begin_attempt(2, fresh=False)
            drain(store, third.device_id)
        wait_until(lambda: refusal(run) == "")
        assert known_members(store, late) == known_members(store, first)
        assert known_members(store, late)[1] == {third.device_id}


def test_what_is_being_removed_comes_back_on_no_device(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    well, late = store.devices
    with store.deleting():  # what is removed may still be in the catalogue
        with ops.hanging(late.path):
            run.begin_attempt(2, fresh=False)
            save(run, make_state(store, 1), CheckpointId(2, 1))
        assert not threading.Event().wait(LATE_S)
        assert late not in store.trusted
        assert small_files(late).keys() < small_files(well).keys()
    wait_until(lambda: refusal(run) == "")
    assert small_files(late) == small_files(well)


def test_a_device_that_fails_when_it_no_longer_hangs_is_suspect(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, late = store.devices
    with ops.hanging(late.path) as rule:
        run.begin_attempt(2, fresh=False)
        rule.let_go(errno.EIO)
        wait_until(lambda: "Input/output error" in store.device_state(late.device_id)[1])
    assert state_of(late, store) is DeviceState.SUSPECT
    assert "suspect" in refusal(run)


def test_one_that_holds_what_it_should_not_is_suspect(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, late = store.devices
    with ops.hanging(late.path):
        run.begin_attempt(2, fresh=False)
        (late.path / "disk.id").write_bytes(b"garbage")
    wait_until(lambda: "could not take what it missed" in store.device_state(late.device_id)[1])
    assert "suspect" in refusal(run)


def test_a_full_one_goes_on_and_gets_directories_with_what_is_written_there(
    store: Store, run: RunStore, ops: HangingStorage, caplog: pytest.LogCaptureFixture
) -> None:
    _, late = store.devices
    with ops.hanging(late.path, "write_small_new", "make_directory") as rule:
        run.begin_attempt(2, fresh=False)
        other = store.run(UID, "other", create=True)
        other.begin_attempt(1, fresh=False)
        rule.let_go(errno.ENOSPC)
        wait_until(lambda: refusal(run) == "")
    assert any(text.startswith(f"device_lacks path={late.path} reason=") for text in caplog.messages)
    assert not other.path_on(late).exists()
    result = save(other, make_state(store, 3), at(1))
    assert (result.copy_count, state_of(late, store)) == (2, DeviceState.OK)


def test_a_shard_is_written_again_although_a_device_has_an_older_manifest(tmp_path: Path) -> None:
    ops = HangingStorage()
    dirs = [tmp_path / name for name in "abc"]
    for path in dirs:
        path.mkdir()
    with opened(dirs, ops=cast(StorageOps, ops)) as (store, _):
        run, (_, second, third) = begun(store), store.devices
        state = make_state(store, 1, segment_count=3)
        save(run, state, at(1))
        for attempt, late in ((2, second), (3, third)):
            with ops.hanging(late.path):
                run.begin_attempt(attempt, fresh=False)
                written = save_again(run, state, at(1))
                assert late.device_id not in {record.device_id for record in written.manifest.segments}
            wait_until(lambda: refusal(run) == "")
        assert load(run, written.manifest) == state.content


def test_a_tag_that_cannot_be_removed_now_holds_up_no_attempt(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, late = store.devices
    save(run, make_state(store, 1), at(1))
    add_tag(run, "best", at(1))
    with ThreadPoolExecutor(1) as pool:
        with ops.hanging(late.path, "unlink") as rule:
            removed = pool.submit(remove_tag, run, "best")
            rule.wait_asked()
            run.begin_attempt(2, fresh=False)
        assert removed.result() == at(1)
    assert not any("tags/" in name for name in small_files(late))


def test_a_device_that_is_late_is_asked_for_no_tag(store: Store, run: RunStore, ops: HangingStorage) -> None:
    well, late = store.devices
    save(run, make_state(store, 1), at(1))
    with ops.where(lambda _, path: path.is_relative_to(run.path_on(late) / TAGS_NAME)) as tagging:
        with ops.hanging(late.path):
            run.begin_attempt(2, fresh=False)
            assert store.answering == (well,)
            add_tag(run, "best", at(1))
            assert not tagging.is_asked
        tagging.wait_asked()
    wait_until(lambda: refusal(run) == "")
    assert small_files(late) == small_files(well)


def test_one_that_cannot_take_what_it_missed_is_suspect(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    well, late = store.devices
    save(run, make_state(store, 1), at(1))
    with ops.hanging(late.path, "stat"):
        run.begin_attempt(2, fresh=False)
        save(run, make_state(store, 1), CheckpointId(2, 1))
        commits = run.commits_path(late)
        commits.rename(commits.with_name("moved"))
    wait_until(lambda: str(commits) in store.device_state(late.device_id)[1])
    assert state_of(well, store) is DeviceState.OK


def test_in_a_directory_that_took_the_place_of_a_device_nothing_is_made(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    """As where a drive is unmounted: its mount point is an empty directory of another file system."""
    _, gone = store.devices
    with ops.hanging(gone.path):
        run.begin_attempt(2, fresh=False)
    wait_until(lambda: refusal(run) == "")
    gone.path.rename(gone.path.with_name("elsewhere"))
    gone.path.mkdir()
    save(run, make_state(store, 1), at(1))
    assert "is not the directory that was opened" in store.device_state(gone.device_id)[1]
    assert list(gone.path.iterdir()) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_damage_is_recorded_where_no_call_hangs(
    store: Store, run: RunStore, ops: HangingStorage, *, is_late: bool
) -> None:
    well, late = store.devices
    result = save(run, make_state(store, 1), at(1))
    with ops.hanging(late.path):
        if is_late:
            run.begin_attempt(2, fresh=False)
        error = CorruptDataError("block 1 is not what was committed")
        record_damage(run, at(1), 0, error, generation=result.manifest.generation)
        assert DAMAGED_NAME in {Path(name).name for name in small_files(well)}
    wait_until(lambda: state_of(late, store) is DeviceState.OK)
    assert small_files(late) == small_files(well)


def test_a_device_on_which_a_call_hangs_stays_locked_when_its_store_is_closed(
    dirs: list[Path], ops: HangingStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_set, "CHANGE_DEADLINE_S", 0.1)
    with opened(dirs, ops=cast(StorageOps, ops)) as (store, _):
        run, (well, late) = begun(store), store.devices
        with ops.hanging(late.path):
            run.begin_attempt(2, fresh=False)
            store.close()
            assert f"device_still_late path={late.path}" in caplog.messages
            with pytest.raises(DeviceLockedError, match=str(late.path)), opened([late.path]):
                pass
            lock_directory(store.ops, well.path, HOLDER).release()
        wait_until(lambda: can_be_opened(dirs))


def can_be_opened(dirs: list[Path]) -> bool:
    """Tell whether nobody holds a store."""
    try:
        with opened(dirs) as (store, _):
            return store.is_whole
    except DeviceLockedError:
        return False
