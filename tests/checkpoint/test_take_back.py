"""A device that has failed is taken back in use, with what it has missed, or the error says why not."""

import errno
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from hanging_storage import HangingStorage

from everstep.checkpoint import device_set
from everstep.checkpoint.collect import remove_checkpoint
from everstep.checkpoint.device import Device, lock_directory
from everstep.checkpoint.device_set import DeviceState
from everstep.checkpoint.manifest_format import manifest_name
from everstep.checkpoint.readmission import take_back
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.store import Store
from everstep.checkpoint.testing import HOLDER, begun, load, make_state, opened, save
from everstep.core.errors import DeviceLockedError, StorageError
from everstep.core.ids import CheckpointId

UID = os.geteuid()


@pytest.fixture
def run(store: Store) -> RunStore:
    made = begun(store)
    save(made, make_state(store, 1), at(1))
    return made


def at(step: int) -> CheckpointId:
    return CheckpointId(1, step)


@contextmanager
def failing(ops: HangingStorage, device: Device, *names: str) -> Generator[None]:
    """Let these calls on a device (none: all) fail while the block runs."""
    with ops.hanging(device.path, *names) as rule:
        rule.let_go(errno.EIO)
        yield


def state_of(device: Device, store: Store) -> DeviceState:
    return store.device_state(device.device_id)[0]


def manifests(run: RunStore, device: Device) -> set[str]:
    return {path.name for path in run.commits_path(device).iterdir()}


def test_it_takes_what_it_missed_and_is_used_again(store: Store, run: RunStore, ops: HangingStorage) -> None:
    well, device = store.devices
    with failing(ops, device, "write_small_new"):
        save(run, make_state(store, 2), at(2))
        assert state_of(device, store) is DeviceState.SUSPECT
        save(run, make_state(store, 3), at(3))
    assert (store.may_delete, manifests(run, device)) == (False, {manifest_name(at(1), 0)})
    take_back(store, device)
    assert (state_of(device, store), store.may_delete) == (DeviceState.OK, True)
    assert manifests(run, device) == manifests(run, well)
    assert save(run, make_state(store, 4), at(4)).copy_count == 2
    remove_checkpoint(run, at(1))
    store.close()
    with opened([device.path for device in store.devices]) as (again, report):
        assert (report.problems, report.copy_count) == ([], 0)
        run = again.run(UID, "demo")
        assert [info.checkpoint for info in run.checkpoints()] == [at(4), at(3), at(2)]
        for step in (2, 3, 4):
            assert load(run, run.manifest(at(step), 0)) == make_state(store, step).content


@pytest.mark.parametrize("call", ["write_small_new", "list_directory"])
def test_one_that_still_fails_stays_suspect(
    call: str, store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, device = store.devices
    with failing(ops, device, "write_small_new"):
        save(run, make_state(store, 2), at(2))
    with failing(ops, device, call), pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        take_back(store, device)
    assert (state_of(device, store), store.may_delete) == (DeviceState.SUSPECT, False)
    take_back(store, device)
    assert store.may_delete


def test_one_that_fails_again_while_it_catches_up_says_so(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, device = store.devices
    with failing(ops, device, "write_small_new"):
        save(run, make_state(store, 2), at(2))
    target = run.commits_path(device)
    with ops.where(lambda name, path: name == "write_small_new" and path.is_relative_to(target)) as rule:
        rule.let_go(errno.EIO)
        with pytest.raises(StorageError, match="is suspect again: write_small_new"):
            take_back(store, device)
    assert (state_of(device, store), store.may_delete) == (DeviceState.SUSPECT, False)


def test_one_that_is_late_comes_back_by_itself(store: Store, run: RunStore) -> None:
    _, device = store.devices
    store.mark_late(device.device_id, StorageError("writing was done elsewhere, and here it is not"))
    with pytest.raises(StorageError, match=f"{device.path} is late: writing was done elsewhere"):
        take_back(store, device)
    store.late_is_over(device.device_id)
    take_back(store, device)
    assert run.store.may_delete


def test_one_that_hangs_meanwhile_stays_locked_behind_the_store(
    store: Store, run: RunStore, ops: HangingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hangs may yet change what is there."""
    monkeypatch.setattr(device_set, "CHANGE_DEADLINE_S", 0.1)
    _, device = store.devices
    with failing(ops, device, "write_small_new"):
        save(run, make_state(store, 2), at(2))
    with ThreadPoolExecutor(1) as pool, ops.hanging(device.path, "write_small_new") as rule:
        taking = pool.submit(take_back, store, device)
        rule.wait_asked()
        store.close()
        with pytest.raises(DeviceLockedError):
            lock_directory(RealStorage(), device.path, HOLDER)
        rule.let_go()
        taking.result()
    lock_directory(RealStorage(), device.path, HOLDER).release()


def test_one_that_was_not_read_needs_the_store_to_be_opened(dirs: list[Path], ops: HangingStorage) -> None:
    """Recovery left it out: a checkpoint of it that nobody knows could be taken for garbage."""
    with opened(dirs) as (store, _):
        run = begun(store)
        save(run, make_state(store, 1), at(1))
        device = store.devices[1]
    with ops.where(
        lambda name, path: name == "list_directory" and path == device.runs_path / str(UID)
    ) as rule:
        rule.let_go(errno.EIO)
        with opened(dirs, ops=cast(StorageOps, ops)) as (store, _):
            rule.error = 0
            with pytest.raises(StorageError, match="failed when the store was opened"):
                take_back(store, store.devices[1])
            assert not store.may_delete


def test_what_no_run_knows_needs_the_store_to_be_opened(
    store: Store, run: RunStore, ops: HangingStorage
) -> None:
    _, device = store.devices
    with failing(ops, device, "write_small_new"):
        save(run, make_state(store, 2), at(2))
    (run.commits_path(device) / manifest_name(at(9), 0)).write_bytes(b"of a removal that failed halfway")
    with pytest.raises(StorageError, match=r"1\.9\.0\.mf belongs to no checkpoint"):
        take_back(store, device)
    assert not store.may_delete


def test_one_that_was_replaced_is_not_taken_back(store: Store, run: RunStore, ops: HangingStorage) -> None:
    _, device = store.devices
    with failing(ops, device, "write_small_new"):
        save(run, make_state(store, 2), at(2))
    device.path.rename(device.path.with_name("away"))
    device.path.mkdir()
    with pytest.raises(StorageError, match="is not the directory that was opened"):
        take_back(store, device)
    assert list(device.path.iterdir()) == []


def test_one_that_is_well_needs_nothing(store: Store, run: RunStore, ops: HangingStorage) -> None:
    with failing(ops, store.devices[1]):
        take_back(store, store.devices[1])
    assert run.store.may_delete
