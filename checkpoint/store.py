"""A store: the set of devices that a daemon writes to, opened, locked and made durable."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ..core.errors import NoSpaceError, NotFoundError, StorageError
from ..core.ids import random_id
from .catch_up import catch_up_run
from .device import DISK_ID_NAME, QUARANTINE_NAME, RUNS_NAME, Device, Survey, survey_directory
from .device_round import on_trusted
from .device_set import DeviceSet
from .device_survey import lock_all, survey_all
from .durable import make_directories, publish_over
from .membership_plan import Membership
from .run_store import RunStore, create_run_directories
from .storage_ops import LockHandle, StorageOps
from .store_format import DiskId, LockHolder, RunId, encode_disk_id
from .store_plan import StorePlan, members_notes, plan_store

_log = logging.getLogger(__name__)


class Store(DeviceSet):
    """An opened store. `recovery.recover` fills its catalogue of runs; before that it has none. Thread-safe."""

    def __init__(
        self,
        *,
        store_id: str,
        devices: Sequence[Device],
        plan: StorePlan,
        membership: Membership,
        suspects: Mapping[str, str],
        ops: StorageOps,
        uid: int,
        locks: Sequence[LockHandle] | None,
    ) -> None:
        super().__init__(
            store_id=store_id,
            devices=devices,
            membership=membership,
            suspects=suspects,
            unreadable=plan.unreadable,
            ops=ops,
            uid=uid,
            locks=locks,
        )
        self.is_new = plan.is_new
        """It was made by this opening."""
        self.newcomers = frozenset(
            device.device_id for device in devices if not plan.is_new and device.device_id not in plan.known
        )
        """Devices that this opening has made members of a store that was there: they know nothing of it yet."""
        self._opening_notes = plan.notes
        self._catalogue = threading.Lock()
        self._creating = threading.Lock()
        self._runs: dict[tuple[int, str], RunStore] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences that the user should see now."""
        missing, membership = self.missing, self.membership
        paths = {each.device_id: each.path for each in missing}
        reasons = {each.device_id: each.reason for each in missing}
        return (*members_notes(membership, paths, reasons), *self._opening_notes)

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, owner_uid: int, name: str, *, create: bool = False) -> RunStore:
        """Return the run of this owner and name; with `create`, made durable on all trusted devices if it is new.

        Raises:
            NotFoundError: no such run, and not asked to make it.
            StorageError: a device is full, or all have failed.
        """
        run_id = RunId.of(name, owner_uid)
        key = (owner_uid, run_id.run_id)
        with self._creating:
            with self._catalogue:
                found = self._runs.get(key)
            if found is not None:
                return found
            if not create:
                raise NotFoundError(
                    f"no run {name!r} of uid {owner_uid} in this store", hint="`everstep ls` lists the runs"
                )
            on_trusted(
                self,
                lambda device: create_run_directories(self.ops, device, run_id),
                what="making the run's directories",
            )
            made = RunStore(self, run_id)
            self.add_run(made)
            return made

    def runs(self) -> tuple[RunStore, ...]:
        """Return all runs, by owner and name."""
        with self._catalogue:
            return tuple(sorted(self._runs.values(), key=lambda run: (run.owner_uid, run.name)))

    def add_run(self, run: RunStore) -> None:
        """Take a recovered run into the catalogue."""
        with self._catalogue:
            self._runs[run.owner_uid, run.run_id] = run

    # --- a device that was late -----------------------------------------------------------------------------------

    def catch_up(self, device: Device, membership: Membership) -> None:
        """Write the members, and what is known of all runs, to a device that was late.

        Raises:
            NoSpaceError: it is full; what found room is there.
            EverstepError: it failed, or holds what it should not.
        """
        full: NoSpaceError | None = None
        with self.watching(device.device_id):
            self.check_in_place(device)
            before = survey_directory(self.ops, device.path, uid=self.uid).disk_id
            wanted = membership.disk_id(device.device_id, store_id=self.store_id)
            if before != wanted:
                for reason in _record(self.ops, device, before, wanted).values():
                    self.mark_suspect(device.device_id, StorageError(reason))
            for run in self.runs():
                try:
                    catch_up_run(run, device)
                except NoSpaceError as exc:
                    full = full or exc
        if full is not None:
            raise full


def open_store(
    directories: Sequence[Path],
    *,
    ops: StorageOps,
    holder: LockHolder,
    uid: int,
    read_only: bool = False,
    adopt: Sequence[Path] = (),
    recycles: bool = False,
) -> Store:
    """Return the store that these directories are, held by this process; new where all are empty.

    `uid` is the user whom the store's files must belong to. With `read_only` no lock is taken and nothing is
    written; a daemon may hold the store meanwhile. `adopt`: empty directories that become members although a retired
    device was last seen there. `recycles`: new segments are written over files of deleted ones.

    Raises:
        ConfigError, DeviceMissingError, CorruptDataError, FormatVersionError: see store_plan.plan_store.
        DeviceLockedError: another process holds a device.
        NotFoundError: read-only, and there is no store.
        StorageError: a directory cannot be written to.
    """
    # Resolved once: the recorded path and the one compared with it later must not depend on the directory of a process.
    paths = [path.absolute().resolve() for path in directories]
    adopt = [path.absolute().resolve() for path in adopt]
    hanging: Mapping[Path, Survey] = {}

    def planned() -> StorePlan:
        surveys = survey_all(
            ops, paths, lambda path: hanging.get(path) or survey_directory(ops, path, uid=uid)
        )
        return plan_store(surveys, adopt=adopt)

    plan = planned()
    if read_only:
        return _open_read_only(plan, ops, uid)
    locks: dict[Path, LockHandle] = {}
    try:
        hanging = lock_all(ops, [survey.path for survey in plan.named], holder, locks)
        plan = planned()  # what another process did before the locks were ours is seen only now
        if locks.keys() != {survey.path for survey in plan.named}:
            raise StorageError("another process changed the devices while they were opened", hint="try again")
        store = _settle(plan, ops, uid, list(locks.values()))
        store.pool.is_on = recycles
        return store
    except BaseException:
        for lock in locks.values():
            lock.release()
        raise


def _open_read_only(plan: StorePlan, ops: StorageOps, uid: int) -> Store:
    if plan.store_id is None:
        raise NotFoundError("there is no store in these directories", hint="check the paths")
    devices = [_device(device_id, survey) for device_id, survey in plan.known.items()]
    membership = plan.membership.seen({device.device_id: str(device.path) for device in devices})
    return Store(
        store_id=plan.store_id,
        devices=devices,
        plan=plan,
        membership=membership,
        suspects={},
        ops=ops,
        uid=uid,
        locks=None,
    )


def _settle(plan: StorePlan, ops: StorageOps, uid: int, locks: Sequence[LockHandle]) -> Store:
    """Make what the plan says durable on every present device, and return the store.

    A new store is made in two rounds: only when disk.id stands on all devices does any of them say "ready".
    So a crash before leaves a store that was never used, and after it an absent member is really missing.
    """
    store_id = plan.store_id or random_id()
    surveys = dict(plan.known) | {random_id(): survey for survey in plan.blank}
    devices = [_device(device_id, survey) for device_id, survey in surveys.items()]
    membership = plan.membership.seen({device.device_id: str(device.path) for device in devices})
    suspects: dict[str, str] = {}
    for device in devices:
        make_directories(ops, device.path, QUARANTINE_NAME)
        make_directories(ops, device.path, RUNS_NAME)
    # New members first: the others list only devices that exist.
    order = sorted(devices, key=lambda device: surveys[device.device_id].disk_id is not None)
    for is_ready in (False, True) if plan.is_new else (True,):
        for device in order:
            wanted = membership.disk_id(device.device_id, store_id=store_id, is_ready=is_ready)
            if surveys[device.device_id].disk_id != wanted:
                suspects |= _record(ops, device, surveys[device.device_id].disk_id, wanted)
                surveys[device.device_id] = replace(surveys[device.device_id], disk_id=wanted)
    return Store(
        store_id=store_id,
        devices=devices,
        plan=plan,
        membership=membership,
        suspects=suspects,
        ops=ops,
        uid=uid,
        locks=locks,
    )


def _record(ops: StorageOps, device: Device, before: DiskId | None, wanted: DiskId) -> dict[str, str]:
    """Make `wanted` the device's disk.id; a device that is too full for it keeps the old one.

    That is nothing where only paths moved, and what a missing device's age was. Where a change of the members does
    not reach it, the device is returned as suspect, with the reason: nothing is deleted then. Of a new member, or
    where one has come, it is an error.
    """
    try:
        publish_over(ops, device.path / DISK_ID_NAME, encode_disk_id(wanted))
    except NoSpaceError as exc:
        if before is None or not before.is_ready or not wanted.members.keys() <= before.members.keys():
            raise
        _log.warning("disk_id_outdated device=%s reason=%s", device.path, exc)
        if (before.members.keys(), before.draining, before.retired.keys()) != (
            wanted.members.keys(),
            wanted.draining,
            wanted.retired.keys(),
        ):
            return {device.device_id: f"it cannot take a change of the devices: {exc}"}
    return {}


def _device(device_id: str, survey: Survey) -> Device:
    return Device(device_id=device_id, path=survey.path, file_system_id=survey.file_system_id)
