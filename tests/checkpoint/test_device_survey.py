"""A store is opened beside a drive that hangs, as if that one were missing; when it answers it is taken back."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from hanging_storage import HangingStorage
from pausing import wait_until

from everstep.checkpoint import device_survey
from everstep.checkpoint.device import LOCK_NAME, lock_directory
from everstep.checkpoint.fsck import fsck
from everstep.checkpoint.readmission import check_readmission
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import HOLDER, load, make_state, opened, save, save_steps
from everstep.core.errors import DeviceLockedError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(
        device_survey, "LATE_CALL_S", 1.0
    )  # what does not hang takes less on a busy machine, too


@pytest.fixture
def hanging() -> HangingStorage:
    return HangingStorage()


@pytest.fixture
def ops(hanging: HangingStorage) -> StorageOps:
    return cast(StorageOps, hanging)


@pytest.fixture
def stored(dirs: list[Path]) -> list[Path]:
    """The devices of a store with one checkpoint."""
    with opened(dirs) as (store, _):
        save_steps(store, [1])
    return dirs


def paths(store: Store) -> tuple[list[Path], list[Path]]:
    """Return where its devices are, and where missing ones were."""
    return sorted(each.path for each in store.devices), [Path(each.path) for each in store.missing]


def is_free(path: Path) -> bool:
    """Tell whether nobody has the device's lock, nor gets it late."""
    if path in device_survey._being_locked:
        return False
    try:
        lock_directory(RealStorage(), path, HOLDER).release()
    except DeviceLockedError:
        return False
    return True


@pytest.mark.parametrize("call", ["stat", "read_small", "try_lock"])
def test_a_member_that_hangs_is_missing_until_the_store_is_opened_again(
    call: str, stored: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    *well, drive = stored
    with hanging.hanging(drive, call):
        with opened(stored, ops=ops) as (store, _):
            assert paths(store) == (well, [drive])
            assert any(f"{drive} has not answered for" in note for note in store.notes), store.notes
            run = store.run(UID, "demo")
            run.begin_attempt(2, fresh=False)
            save(run, make_state(store, 2), CheckpointId(2, 2))
        assert all(map(is_free, well))
    wait_until(lambda: is_free(drive))
    with opened(stored, ops=ops) as (store, report):
        assert (paths(store), report.problems) == ((stored, []), [])
        run = store.run(UID, "demo")
        for step, checkpoint in enumerate((CheckpointId(1, 1), CheckpointId(2, 2)), 1):
            assert load(run, run.manifest(checkpoint, 0)) == make_state(store, step).content


def test_a_store_is_looked_at_beside_a_member_that_hangs(
    stored: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    *well, drive = stored
    with hanging.hanging(drive), opened(stored, ops=ops, read_only=True) as (store, _):
        assert paths(store) == (well, [drive])


def test_no_store_is_made_beside_a_directory_that_hangs(
    dirs: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    """What hangs may be the store."""
    for call in ("stat", "try_lock"):
        with (
            hanging.hanging(dirs[-1], call),
            pytest.raises(StorageError, match=f"{re.escape(str(dirs[-1]))} has not answered"),
            opened(dirs, ops=ops),
        ):
            pass
        wait_until(lambda: is_free(dirs[-1]))
        assert {path.name for each in dirs for path in each.iterdir()} <= {LOCK_NAME}


@pytest.mark.parametrize("call", ["stat", "try_lock"])
def test_who_is_alone_is_waited_for(
    call: str, dirs: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    alone = dirs[:1]
    with opened(alone) as (store, _):
        save_steps(store, [1])
    with ThreadPoolExecutor(1) as pool, hanging.hanging(alone[0], call) as rule:

        def opens() -> tuple[list[Path], list[Path]]:
            with opened(alone, ops=ops) as (store, _):
                return paths(store)

        opening = pool.submit(opens)
        rule.wait_asked()
        rule.let_go()
        assert opening.result() == (alone, [])


def test_who_still_hangs_is_missing_in_the_next_opening_too(
    stored: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    """Its lock is still asked for: by this process, and not held by it."""
    *well, drive = stored
    with hanging.hanging(drive, "try_lock"):
        for _ in range(2):
            with opened(stored, ops=ops) as (store, _):
                assert paths(store) == (well, [drive])
    wait_until(lambda: is_free(drive))


def test_what_hangs_in_an_inspection_ends_it_and_keeps_no_lock(
    stored: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    with (
        hanging.hanging(stored[-1], "try_lock"),
        pytest.raises(StorageError, match=f"{re.escape(str(stored[-1]))} has not answered"),
    ):
        fsck(stored, ops=ops, holder=HOLDER, uid=UID)
    assert is_free(stored[0])
    wait_until(lambda: is_free(stored[-1]))


def test_an_inspection_names_who_hangs_and_repairs_nothing(
    stored: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    with hanging.hanging(stored[-1]):
        found = fsck(stored, ops=ops, holder=HOLDER, uid=UID, repair=True)
    assert not found.is_repaired
    assert any(f"{stored[-1]} has not answered" in each.problem for each in found.findings)


def test_who_hangs_is_not_taken_back(stored: list[Path], hanging: HangingStorage, ops: StorageOps) -> None:
    with hanging.hanging(stored[-1]), pytest.raises(StorageError, match="has not answered"):
        check_readmission(stored, stored[-1], ops=ops, uid=UID)


def test_the_lock_of_who_hung_is_not_kept(
    stored: list[Path], hanging: HangingStorage, ops: StorageOps
) -> None:
    """Else no other process could open it when it answers, though nobody uses it here."""
    *well, drive = stored
    with hanging.hanging(drive, "try_lock") as rule, opened(stored, ops=ops):
        rule.let_go()
        wait_until(lambda: is_free(drive))
        assert not any(map(is_free, well))
