"""Devices that drain, leave and come back: on real directories, with every crash in the middle."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.device import lock_directory
from everstep.checkpoint.device_change import (
    Retirement,
    cancel_drain,
    check_retire,
    drain,
    find_device,
    holdings,
    note_missing,
    retire,
)
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.readmission import Readmission, prepare_readmission
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.store_format import decode_disk_id
from everstep.checkpoint.testing import (
    HOLDER,
    Call,
    CrashedError,
    FaultyStorage,
    Mode,
    State,
    load,
    make_state,
    opened,
    save,
)
from everstep.core.errors import (
    ConfigError,
    DeviceLockedError,
    DeviceMissingError,
    NotFoundError,
    ProtectedError,
    StorageError,
    UsageError,
)
from everstep.core.ids import CheckpointId

UID = os.geteuid()
FIRST, SECOND, THIRD, FOURTH = (CheckpointId(1, step) for step in (1, 2, 3, 4))
NOW_S = 1_700_000_000.0


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """Three devices; FIRST lies on a and c only, SECOND and THIRD on all."""
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    with opened(paths) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        drain(store, find_device(store, str(paths[1])))
        commit(run, FIRST)
        cancel_drain(store, find_device(store, str(paths[1])))
        commit(run, SECOND)
        commit(run, THIRD)
    return paths


def commit(run: RunStore, checkpoint: CheckpointId) -> State:
    assert isinstance(run.store, Store)
    state = make_state(run.store, checkpoint.step)
    save(run, state, checkpoint)
    run.set_complete_floor(checkpoint)
    return state


@contextmanager
def demo(dirs: list[Path]) -> Generator[tuple[Store, RunStore]]:
    with opened(dirs) as (store, _):
        yield store, store.run(UID, "demo")


def leave(store: Store, path: Path, *, force: bool = True) -> Retirement:
    return retire(store, find_device(store, str(path)), force=force, now_unix_s=NOW_S)


def content(path: Path) -> dict[str, bytes]:
    found = {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}
    return {name: found[name] for name in found if name not in ("lock", "disk.id")}


def check_bytes(run: RunStore, checkpoint: CheckpointId) -> None:
    expected = make_state(run.store, checkpoint.step).content
    assert load(run, run.manifest(checkpoint, 0)) == expected


# --- draining -----------------------------------------------------------------------------------------------------


def test_a_draining_device_gets_no_new_segments_and_keeps_all_it_has(dirs: list[Path]) -> None:
    with demo(dirs) as (store, run):
        name = find_device(store, str(dirs[1]))
        drain(store, name)
        assert store.device_state(name)[0] is DeviceState.DRAINING
        assert [device.path for device in store.writable] == sorted(
            [dirs[0], dirs[2]], key=lambda path: find_device(store, str(path))
        )
        commit(run, FOURTH)
        assert [each.checkpoint for each in holdings(store, name)] == [THIRD, SECOND]
        assert store.may_delete
    with demo(dirs) as (store, run):
        assert store.device_state(name)[0] is DeviceState.DRAINING, "it is durable"
        assert run.offered() == [FOURTH, THIRD, SECOND, FIRST]
        for checkpoint in run.offered():
            check_bytes(run, checkpoint)
        assert check_retire(store, name, force=False), "what a restart takes lies elsewhere"
        cancel_drain(store, name)
    with demo(dirs) as (store, _):
        assert store.device_state(name)[0] is DeviceState.OK
        assert b'"format":1' in (dirs[0] / "disk.id").read_bytes()
        with pytest.raises(UsageError, match="does not drain"):
            cancel_drain(store, name)


def test_the_last_device_that_can_be_written_to_does_not_drain(dirs: list[Path]) -> None:
    with demo(dirs) as (store, _):
        for path in dirs[:2]:
            drain(store, find_device(store, str(path)))
        with pytest.raises(ProtectedError, match="no other device"):
            drain(store, find_device(store, str(dirs[2])))


def test_a_drain_is_not_cancelled_while_a_member_may_know_more(dirs: list[Path]) -> None:
    with demo(dirs) as (store, _):
        drain(store, find_device(store, str(dirs[1])))
    dirs[0].rename(dirs[0].with_name("away"))
    with demo(dirs) as (store, _), pytest.raises(StorageError, match="is missing"):
        cancel_drain(store, find_device(store, str(dirs[1])))


@pytest.mark.parametrize("number", [0, 1])
def test_a_drain_is_not_cancelled_while_a_member_cannot_be_told(dirs: list[Path], number: int) -> None:
    """When it is well again it says that the device drains, and that counts."""
    with demo(dirs) as (store, _):
        name = find_device(store, str(dirs[1]))
        drain(store, name)
        store.mark_suspect(find_device(store, str(dirs[number])), StorageError("it failed"))
        with pytest.raises(StorageError, match=f"{dirs[number]} is suspect"):
            cancel_drain(store, name)
    with demo(dirs) as (store, _):
        assert store.device_state(name)[0] is DeviceState.DRAINING
        cancel_drain(store, name)
    with demo(dirs) as (store, _):
        assert store.device_state(name)[0] is DeviceState.OK


# --- retiring -----------------------------------------------------------------------------------------------------


def test_a_missing_device_is_retired_and_collection_goes_on(dirs: list[Path]) -> None:
    shutil.rmtree(dirs[1])
    with demo(dirs) as (store, run):
        assert collect_garbage(run, keep=Keep(last=1)).reason
        name = find_device(store, str(dirs[1]))
        assert store.device_state(name)[0] is DeviceState.MISSING
        assert [f"device {name} (last seen at {dirs[1]}) is missing" in note for note in store.notes] == [
            True,
            False,
        ]
        done = leave(store, dirs[1], force=False)
        assert [f"device {name} (last seen at {dirs[1]}) was retired" in note for note in store.notes] == [
            True,
            False,
        ]
        assert [each.checkpoint for each in done.lost] == [THIRD, SECOND]
        assert (done.problems, store.missing, store.may_delete) == ((), (), True)
        assert store.membership.retired[name].highest == {f"{UID}/{run.run_id}": THIRD}
        # Nothing of what is left is the last resort by accident: FIRST is all that can be restored.
        assert collect_garbage(run, keep=Keep(last=1)).removed == (SECOND,)
        assert run.offered() == [FIRST]
    with demo(dirs) as (store, run):
        assert (store.missing, store.may_delete) == ((), True)
        assert store.device_state(name)[0] is DeviceState.RETIRED
        assert run.offered() == [FIRST]
        check_bytes(run, FIRST)
        lost = run.info(THIRD)
        assert lost.state is CheckpointState.DAMAGED
        assert f"{dirs[1]} (retired)" in lost.problems[0]
        run.begin_attempt(2, fresh=False)
        for step in (4, 5):
            commit(run, CheckpointId(2, step))
        assert collect_garbage(run, keep=Keep(last=2)).removed == (FIRST, THIRD)


def test_a_retired_device_that_returns_is_ignored_whatever_it_holds(dirs: list[Path]) -> None:
    away = dirs[1].with_name("away")
    dirs[1].rename(away)
    with demo(dirs) as (store, run):
        leave(store, dirs[1], force=False)
        run.begin_attempt(2, fresh=False)
        for step in (4, 5, 6):
            commit(run, CheckpointId(2, step))
        removed = collect_garbage(run, keep=Keep(last=1)).removed
        assert removed == (FIRST, SECOND, THIRD, CheckpointId(2, 4))
        before_return = [device.device_id for device in store.devices]
    away.rename(dirs[1])
    (next(dirs[1].glob("runs/*/*")) / "attempts" / "9").write_bytes(b'{"format":1,"attempt":9,"fresh":true}')
    held = content(dirs[1])
    for order in (dirs, dirs[::-1]):
        with demo(order) as (store, run):
            assert [device.device_id for device in store.devices] == before_return
            assert run.highest_attempt() == 2
            assert [info.checkpoint for info in run.checkpoints()] == [CheckpointId(2, 6), CheckpointId(2, 5)]
            assert store.may_delete
            assert any("was retired" in note for note in store.notes)
    assert content(dirs[1]) == held


def test_a_well_device_leaves_by_force_and_knows_it(dirs: list[Path]) -> None:
    with demo(dirs) as (store, run):
        name = find_device(store, str(dirs[1]))
        with pytest.raises(ProtectedError, match="well, and not drained"):
            leave(store, dirs[1], force=False)
        assert store.device_state(name)[0] is DeviceState.OK
        held, over_all = content(dirs[1]), make_state(store, 4)
        assert leave(store, dirs[1]).problems == ()
        assert content(dirs[1]) == held
        with pytest.raises(UsageError, match="no member any more"):
            leave(store, dirs[1])
        written = save(run, over_all, FOURTH).manifest  # laid out before it left
        assert name not in {record.device_id for record in written.segments}
        assert load(run, written) == over_all.content
    with pytest.raises(ConfigError, match="nothing but retired devices"), opened(dirs[1:2]):
        pytest.fail("it was opened alone")
    storage = FaultyStorage(RealStorage())
    left = dirs[1] / "disk.id"
    storage.arm(
        1, times=9, number=errno.EIO, only=lambda call: call.path.name == "disk.id" and call.path != left
    )
    with pytest.raises(StorageError, match=r"disk\.id.*EIO"), opened(dirs, ops=storage.as_ops()):
        pytest.fail("it was opened without its members")


def test_the_last_device_stays(dirs: list[Path]) -> None:
    for path in dirs[:2]:
        path.rename(path.with_name(f"away {path.name}"))
    with demo(dirs) as (store, _):
        leave(store, dirs[0], force=False)
        leave(store, dirs[1], force=False)
        assert store.may_delete
        with pytest.raises(ProtectedError, match="no other device"):
            leave(store, dirs[2])


def test_a_manifest_that_only_the_leaving_device_has_is_copied_first(dirs: list[Path]) -> None:
    with demo(dirs) as (store, run):
        name = find_device(store, str(dirs[1]))
        drain(store, name)
        commit(run, FOURTH)
        for device in store.devices:
            if device.device_id != name:
                (run.commits_path(device) / "1.4.0.mf").unlink()
        leave(store, dirs[1])
    with demo(dirs) as (_, run):
        assert run.offered()[0] == FOURTH
        check_bytes(run, FOURTH)


def test_what_is_written_to_a_device_while_it_is_retired_is_not_acknowledged(dirs: list[Path]) -> None:
    """The device leaves between the last byte and the acknowledgement."""
    faulty = FaultyStorage(RealStorage())
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        run = store.run(UID, "demo")
        state = make_state(store, 4)
        real_rename = store.ops.rename_noreplace
        left = False

        def leave_first(source: Path, target: Path) -> bool:
            nonlocal left
            if target.name == "1.4.0.mf" and not left:
                left = True
                leave(store, dirs[1])
            return real_rename(source, target)

        faulty.rename_noreplace = leave_first  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match="retired meanwhile"):
            save(run, state, FOURTH)
        assert FOURTH not in run.offered()
    with demo(dirs) as (_, run):
        assert FOURTH not in run.offered()


def test_what_only_a_leaving_device_says_is_committed_is_not_acknowledged(dirs: list[Path]) -> None:
    """The segments are on those that stay, and they fail before they have the manifest."""
    with failing_before_the_manifest(dirs, first=lambda store: leave(store, dirs[1])) as (_, run):
        with pytest.raises(StorageError, match=f"manifest is only on {dirs[1]}"):
            save(run, make_state(run.store, 4), FOURTH)
        assert FOURTH not in run.offered()
    with demo(dirs) as (_, run):
        assert FOURTH not in run.offered()


def test_a_device_that_drains_is_good_enough_where_the_others_fail(dirs: list[Path]) -> None:
    with failing_before_the_manifest(dirs, first=lambda _: None) as (store, run):
        assert save(run, make_state(run.store, 4), FOURTH).copy_count == 1
        with pytest.raises(ProtectedError, match="no other device"):
            leave(store, dirs[1])
    with demo(dirs) as (_, run):
        assert run.offered()[0] == FOURTH


@contextmanager
def failing_before_the_manifest(
    dirs: list[Path], first: Callable[[Store], object]
) -> Generator[tuple[Store, RunStore]]:
    """The second device drains; the others fail when they are to get a manifest's name, after `first`."""
    faulty, may_fail = FaultyStorage(RealStorage()), threading.Event()
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        drain(store, find_device(store, str(dirs[1])))
        real_rename = store.ops.rename_noreplace

        def fail_or_rename(source: Path, target: Path) -> bool:
            if target.name != "1.4.0.mf" or target.is_relative_to(dirs[1]):
                return real_rename(source, target)
            if target.is_relative_to(dirs[0]):
                first(store)
                may_fail.set()
            assert may_fail.wait(30)
            raise StorageError(f"{target}: planted")

        faulty.rename_noreplace = fail_or_rename  # type: ignore[attr-defined]
        yield store, store.run(UID, "demo")


def test_nothing_is_deleted_until_every_member_knows_who_left(dirs: list[Path]) -> None:
    """Else a crash would bring the device back, with the manifests of what was removed."""
    faulty = FaultyStorage(RealStorage())
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        run = store.run(UID, "demo")
        real_replace, reasons = store.ops.replace, list[str]()

        def collect_first(source: Path, target: Path) -> None:
            if target.name == "disk.id" and store.is_changing:
                reasons.append(collect_garbage(run, keep=Keep(last=1)).reason)
            real_replace(source, target)

        faulty.replace = collect_first  # type: ignore[attr-defined]
        leave(store, dirs[1])
        assert len(reasons) == 2
        assert all("is leaving" in reason for reason in reasons)
        assert not collect_garbage(run, keep=Keep(last=1)).reason


def test_a_device_leaves_only_when_what_is_being_deleted_is_gone(dirs: list[Path]) -> None:
    faulty = FaultyStorage(RealStorage())
    with opened(dirs, ops=faulty.as_ops()) as (store, _), ThreadPoolExecutor(1) as pool:
        run = store.run(UID, "demo")
        real_unlink, leaving = store.ops.unlink, list[Future[Retirement]]()

        def leave_meanwhile(path: Path) -> bool:
            if not leaving:
                leaving.append(pool.submit(leave, store, dirs[1]))
                with pytest.raises(TimeoutError):
                    leaving[0].result(0.3)
            return real_unlink(path)

        faulty.unlink = leave_meanwhile  # type: ignore[attr-defined]
        assert collect_garbage(run, keep=Keep(last=1)).removed == (FIRST,)
        assert [each.checkpoint for each in leaving[0].result(20).lost] == [THIRD, SECOND]


def is_new_file_in(call: Call, directory: Path) -> bool:
    return call.name == "write_small_new" and call.path.parent == directory


def test_a_full_device_that_misses_a_retirement_forbids_deleting(dirs: list[Path]) -> None:
    faulty = FaultyStorage(RealStorage())
    with opened(dirs, ops=faulty.as_ops()) as (store, _):
        last = max(each.device_id for each in store.devices if each.path != dirs[1])
        path = next(each.path for each in store.devices if each.device_id == last)
        rounds = iter((False, True))
        real_replace = store.ops.replace

        def crash_in_round_2(source: Path, target: Path) -> None:
            if target == path / "disk.id" and next(rounds):
                raise CrashedError("power")
            real_replace(source, target)

        faulty.replace = crash_in_round_2  # type: ignore[attr-defined]
        with pytest.raises(CrashedError):
            leave(store, dirs[1])
    full = FaultyStorage(RealStorage())
    full.arm(1, number=errno.ENOSPC, times=99, only=lambda call: is_new_file_in(call, path))
    with opened(dirs, ops=full.as_ops()) as (store, _):
        assert store.device_state(last)[0] is DeviceState.SUSPECT
        assert not store.may_delete
        assert store.run(UID, "demo").offered() == [FIRST]
    with opened(dirs) as (store, _):
        assert store.may_delete


# --- every crash, every failure -----------------------------------------------------------------------------------


def crash_points(dirs: list[Path], tmp_path: Path, mode: Mode) -> Generator[tuple[list[Path], bool]]:
    """Yield copies of the store in which the n-th call of a retirement failed; and whether it went well even so."""
    number = 0
    while True:
        number += 1
        work = tmp_path / f"{mode.name} {number}"
        work.mkdir()
        paths = [Path(shutil.copytree(path, work / path.name)) for path in dirs]
        faulty = FaultyStorage(RealStorage())
        store = open_store(paths, ops=faulty.as_ops(), holder=HOLDER, uid=UID)
        recover(store)
        faulty.arm(number, mode)
        went_well, was_reached = True, True
        try:
            leave(store, paths[1])
            was_reached = len(faulty.calls) >= number
        except (CrashedError, StorageError):
            went_well = False
        faulty.arm(0)
        store.close()
        if not was_reached:
            return
        yield paths, went_well


@pytest.mark.parametrize("mode", [Mode.CRASH, Mode.NOT_DONE])
def test_wherever_a_retirement_ends_all_parts_agree(dirs: list[Path], tmp_path: Path, mode: Mode) -> None:
    seen: set[DeviceState] = set()
    for paths, went_well in crash_points(dirs, tmp_path, mode):
        with demo(paths[1:]) as (store, _):
            part = store.device_state(find_device(store, str(paths[1])))[0]
        with demo(paths) as (store, run):
            name = find_device(store, str(paths[1]))
            state = store.device_state(name)[0]
            seen.add(state)
            assert state is DeviceState.RETIRED or not went_well
            assert run.offered() == ([FIRST] if state is DeviceState.RETIRED else [THIRD, SECOND, FIRST])
            if state is DeviceState.RETIRED:
                assert part in (DeviceState.RETIRED, DeviceState.DRAINING)
            for device in store.devices:
                copy = decode_disk_id((device.path / "disk.id").read_bytes(), "")
                assert copy == store.membership.disk_id(device.device_id, store_id=store.store_id)
    assert {DeviceState.DRAINING, DeviceState.RETIRED} <= seen


# --- coming back --------------------------------------------------------------------------------------------------


def prepare(dirs: list[Path], path: Path, ops: StorageOps | None = None) -> Readmission:
    return prepare_readmission(dirs, path, ops=ops or RealStorage(), holder=HOLDER, uid=UID)


def readmit(dirs: list[Path], path: Path) -> Store:
    ready = prepare(dirs, path)
    store = open_store(dirs, ops=RealStorage(), holder=HOLDER, uid=UID, adopt=ready.adopt)
    recover(store)
    return store


def test_an_empty_directory_in_place_of_a_retired_device_is_left_alone_until_it_is_readmitted(
    dirs: list[Path],
) -> None:
    shutil.rmtree(dirs[1])
    with demo(dirs) as (store, _):
        old = find_device(store, str(dirs[1]))
        leave(store, dirs[1], force=False)
    for _ in range(2):  # not there, then an empty mount point
        with demo(dirs) as (store, _):
            assert len(store.devices) == 2
        dirs[1].mkdir(exist_ok=True)
    assert list(dirs[1].iterdir()) == []
    with readmit(dirs, dirs[1]) as store:
        new = find_device(store, str(dirs[1]))
        assert (new != old, store.device_state(new)[0]) == (True, DeviceState.OK)
        commit(store.run(UID, "demo"), FOURTH)
        assert {each.checkpoint for each in holdings(store, new)} == {FOURTH}
    with demo(dirs) as (store, run):
        assert run.offered() == [FOURTH, FIRST]
        assert len(store.devices) == 3
    # The new one is a member like any other: never made anew.
    shutil.rmtree(dirs[1])
    dirs[1].mkdir()
    with demo(dirs) as (store, _):
        assert [missing.device_id for missing in store.missing] == [new]


def test_a_retired_device_is_readmitted_empty_and_what_it_held_is_put_aside(dirs: list[Path]) -> None:
    with demo(dirs) as (store, _):
        old = find_device(store, str(dirs[1]))
        leave(store, dirs[1])
    held = content(dirs[1])
    with readmit(dirs, dirs[1]) as store:
        assert find_device(store, str(dirs[1])) != old
        assert store.run(UID, "demo").offered() == [FIRST]
    (aside,) = (dirs[1] / "quarantine").glob(f"{old}.*.retired")
    assert content(aside) == held
    assert (aside / "disk.id").exists()


def test_a_readmission_that_crashes_anywhere_can_be_made_again(dirs: list[Path], tmp_path: Path) -> None:
    for number in range(1, 50):
        work = tmp_path / str(number)
        work.mkdir()
        paths = [Path(shutil.copytree(path, work / path.name)) for path in dirs]
        with demo(paths) as (store, _):
            leave(store, paths[1])
        faulty = FaultyStorage(RealStorage())
        faulty.arm(number, Mode.CRASH)
        try:
            prepare(paths, paths[1], faulty.as_ops())
            return
        except CrashedError:
            pass
        with demo(paths) as (store, run):
            assert run.offered() == [FIRST]
            assert len(store.devices) == 2
        with readmit(paths, paths[1]) as store:
            assert len(store.devices) == 3
        assert list((paths[1] / "quarantine").rglob("*.safetensors"))
    pytest.fail("it never ended")


def test_a_device_that_is_back_is_readmitted_with_all_it_has(dirs: list[Path]) -> None:
    assert prepare(dirs, dirs[1]) == Readmission(adopt=(), is_new=False, aside=None)


def test_nothing_new_is_readmitted_while_a_member_is_missing(dirs: list[Path]) -> None:
    with demo(dirs) as (store, _):
        leave(store, dirs[1])
    held = content(dirs[1])
    dirs[0].rename(dirs[0].with_name("away"))
    with pytest.raises(DeviceMissingError, match="while others are missing"):
        prepare(dirs, dirs[1])
    assert content(dirs[1]) == held
    dirs[0].mkdir()
    with pytest.raises(DeviceMissingError, match="while others are missing"):
        prepare(dirs, dirs[0])


def test_what_another_process_holds_is_not_put_aside(dirs: list[Path]) -> None:
    with demo(dirs) as (store, _):
        leave(store, dirs[1])
    lock = lock_directory(RealStorage(), dirs[1], HOLDER)
    with pytest.raises(DeviceLockedError):
        prepare(dirs, dirs[1])
    lock.release()


# --- the time that a device is missing ----------------------------------------------------------------------------


def test_since_when_a_device_is_missing_is_durable_and_ends_when_it_is_back(dirs: list[Path]) -> None:
    away = dirs[1].with_name("away")
    dirs[1].rename(away)
    with demo(dirs) as (store, _):
        name = find_device(store, str(dirs[1]))
        note_missing(store, NOW_S)
    with demo(dirs) as (store, _):
        note_missing(store, NOW_S + 60)
        assert store.membership.missing_since_unix_s == {name: NOW_S}
    away.rename(dirs[1])
    with demo(dirs) as (store, _):
        assert store.membership.missing_since_unix_s == {}
    assert b'"format":1' in (dirs[0] / "disk.id").read_bytes()


def test_a_device_is_found_by_id_beginning_and_path(dirs: list[Path]) -> None:
    with demo(dirs) as (store, _):
        name = find_device(store, str(dirs[0]))
        assert find_device(store, name) == find_device(store, name[:12]) == name
        for wrong in (name[:3], "nvme7", "0" * 32):
            with pytest.raises(NotFoundError):
                find_device(store, wrong)
