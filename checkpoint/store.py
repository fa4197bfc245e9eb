"""A store: the set of devices that a daemon writes to, opened, locked and made durable."""

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import TracebackType

from ..core.errors import EverstepError, NoSpaceError, NotFoundError, StorageError
from ..core.ids import random_id
from .device import DISK_ID_NAME, QUARANTINE_NAME, RUNS_NAME, Device, Survey, lock_directory, survey_directory
from .durable import make_directories, publish_over
from .run_store import RunStore, create_run_directories
from .storage_ops import LockHandle, StorageOps
from .store_format import DiskId, LockHolder, RunId, encode_disk_id
from .store_plan import StorePlan, plan_store

SPACE_MARGIN_BYTES = 16 * 1024 * 1024
"""Left free on each file system for manifests, attempts and the file system's own growth."""


class DeviceState(Enum):
    """How a device of the store is, as far as this process has seen."""

    OK = "ok"
    SUSPECT = "suspect"
    """A call on it failed: nothing is deleted anywhere until the store is opened again."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingDevice:
    """A member that is not there."""

    device_id: str
    path: str
    """Where it was last seen."""


class Reservation:
    """Space promised to one write; give back each device's part once the files are allocated, or all at the end."""

    def __init__(
        self, ledger: "SpaceLedger", needs: Mapping[str, int], file_systems: Mapping[str, int]
    ) -> None:
        self._ledger = ledger
        self._needs = dict(needs)
        self._file_systems = file_systems

    def settle(self, device_id: str) -> None:
        """Give back one device's part; again is nothing."""
        self._ledger.give_back(self._file_systems[device_id], self._needs.pop(device_id, 0))

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        for device_id in tuple(self._needs):
            self.settle(device_id)


class SpaceLedger:
    """Free space less what was promised, per file system. Thread-safe."""

    def __init__(self, ops: StorageOps, devices: Sequence[Device]) -> None:
        self._ops = ops
        self._devices = {device.device_id: device for device in devices}
        self._lock = threading.Lock()
        self._reserved_bytes: dict[int, int] = {}

    def reserve(self, needs: Mapping[str, int]) -> Reservation:
        """Promise `needs` (bytes by device id), all or nothing.

        Raises:
            NoSpaceError: it would not fit; nothing was written.
        """
        file_systems = {device_id: self._devices[device_id].file_system_id for device_id in needs}
        with self._lock:
            for file_system_id in set(file_systems.values()):
                self._check(file_system_id, needs, file_systems)
            for device_id, needed_bytes in needs.items():
                key = file_systems[device_id]
                self._reserved_bytes[key] = self._reserved_bytes.get(key, 0) + needed_bytes
        return Reservation(self, needs, file_systems)

    def give_back(self, file_system_id: int, size_bytes: int) -> None:
        """Take back a promise."""
        with self._lock:
            self._reserved_bytes[file_system_id] -= size_bytes

    def _check(self, file_system_id: int, needs: Mapping[str, int], file_systems: Mapping[str, int]) -> None:
        sharing = [device_id for device_id, found in file_systems.items() if found == file_system_id]
        needed_bytes = sum(needs[device_id] for device_id in sharing)
        path = self._devices[sharing[0]].path
        reserved_bytes = self._reserved_bytes.get(file_system_id, 0)
        free_bytes = self._ops.free_bytes(path) - reserved_bytes - SPACE_MARGIN_BYTES
        if needed_bytes > free_bytes:
            raise NoSpaceError(
                f"{path} has room for {max(free_bytes, 0)} bytes, {needed_bytes} are needed"
                f" ({reserved_bytes} are promised to other writes)",
                hint="free space there, lower keep_last, or add a device",
            )


class Store:
    """An opened store. `recovery.recover` fills its catalogue of runs; before that it has none.

    Thread-safe: the fields are fixed after opening, the catalogue and the device states have a lock.
    """

    def __init__(
        self,
        *,
        store_id: str,
        devices: Sequence[Device],
        plan: StorePlan,
        ops: StorageOps,
        uid: int,
        locks: Sequence[LockHandle] | None,
    ) -> None:
        self.store_id = store_id
        self.devices = tuple(sorted(devices, key=lambda device: device.device_id))
        """Present devices, by id."""
        self.missing = tuple(MissingDevice(device_id=key, path=path) for key, path in plan.missing.items())
        self.is_new = plan.is_new
        """Nothing was ever stored in it."""
        self.notes = plan.notes
        """Sentences that the user should see."""
        self.ops = ops
        self.uid = uid
        self.is_read_only = locks is None
        self.space = SpaceLedger(ops, self.devices)
        self._locks = tuple(locks or ())
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self._suspects: dict[str, str] = {}
        self._runs: dict[tuple[int, str], RunStore] = {}

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the devices; a second call does nothing."""
        for lock in self._locks:
            lock.release()

    @property
    def degraded(self) -> bool:
        """Tell whether a member is missing: then the rest is read and written, but nothing is deleted."""
        return bool(self.missing)

    @property
    def may_delete(self) -> bool:
        """Tell whether every member is present and none has failed: only then is the view complete."""
        with self._lock:
            return not (self.missing or self._suspects or self.is_read_only)

    def device(self, device_id: str) -> Device | None:
        """Return the present device of this id."""
        return next((device for device in self.devices if device.device_id == device_id), None)

    def device_name(self, device_id: str) -> str:
        """Return the path of a device, present or missing, for messages."""
        for device in self.devices:
            if device.device_id == device_id:
                return str(device.path)
        for missing in self.missing:
            if missing.device_id == device_id:
                return f"{missing.path} (missing)"
        return f"(unknown device {device_id})"

    def mark_suspect(self, device_id: str, error: EverstepError) -> None:
        """Remember that a call on a device failed, with the first reason."""
        with self._lock:
            self._suspects.setdefault(device_id, str(error))

    @contextmanager
    def watching(self, device_id: str) -> Generator[None]:
        """Mark the device as suspect when the block fails on it; a full device is not a bad one."""
        try:
            yield
        except StorageError as exc:
            if not isinstance(exc, NoSpaceError):
                self.mark_suspect(device_id, exc)
            raise

    def device_state(self, device_id: str) -> tuple[DeviceState, str]:
        """Return how a device is, and why if it is not well."""
        with self._lock:
            if device_id in self._suspects:
                return DeviceState.SUSPECT, self._suspects[device_id]
        if self.device(device_id) is None:
            return DeviceState.MISSING, self.device_name(device_id)
        return DeviceState.OK, ""

    def run(self, owner_uid: int, name: str, *, create: bool = False) -> RunStore:
        """Return the run of this owner and name; with `create`, made durable on all devices if it is new.

        Raises:
            NotFoundError: no such run, and not asked to make it.
        """
        run_id = RunId.of(name, owner_uid)
        key = (owner_uid, run_id.run_id)
        with self._creating:
            with self._lock:
                found = self._runs.get(key)
            if found is not None:
                return found
            if not create:
                raise NotFoundError(
                    f"no run {name!r} of uid {owner_uid} in this store", hint="`everstep ls` lists the runs"
                )
            for device in self.devices:
                create_run_directories(self.ops, device, run_id)
            made = RunStore(self, run_id)
            self.add_run(made)
            return made

    def runs(self) -> tuple[RunStore, ...]:
        """Return all runs, by owner and name."""
        with self._lock:
            return tuple(sorted(self._runs.values(), key=lambda run: (run.owner_uid, run.name)))

    def add_run(self, run: RunStore) -> None:
        """Take a recovered run into the catalogue."""
        with self._lock:
            self._runs[run.owner_uid, run.run_id] = run


def open_store(
    directories: Sequence[Path], *, ops: StorageOps, holder: LockHolder, uid: int, read_only: bool = False
) -> Store:
    """Return the store that these directories are, held by this process; new where all are empty.

    `uid` is the user whom the store's files must belong to. With `read_only` no lock is taken and nothing is
    written; a daemon may hold the store meanwhile.

    Raises:
        ConfigError, DeviceMissingError, CorruptDataError, FormatVersionError: see store_plan.plan_store.
        DeviceLockedError: another process holds a device.
        NotFoundError: read-only, and there is no store.
        StorageError: a directory cannot be written to.
    """
    # Resolved once: the recorded path and the one compared with it later must not depend on the directory of a process.
    paths = [path.absolute().resolve() for path in directories]
    plan = plan_store([survey_directory(ops, path, uid=uid) for path in paths])
    if read_only:
        return _open_read_only(plan, ops, uid)
    locked = sorted(survey.path for survey in (*plan.known.values(), *plan.blank))
    locks: list[LockHandle] = []
    try:
        for path in locked:
            locks.append(lock_directory(ops, path, holder))  # noqa: PERF401 (each counts at once, to be released)
        # What another process did before the locks were ours is seen only now.
        plan = plan_store([survey_directory(ops, path, uid=uid) for path in paths])
        if locked != sorted(survey.path for survey in (*plan.known.values(), *plan.blank)):
            raise StorageError("another process changed the devices while they were opened", hint="try again")
        return _settle(plan, ops, uid, locks)
    except BaseException:
        for lock in locks:
            lock.release()
        raise


def _open_read_only(plan: StorePlan, ops: StorageOps, uid: int) -> Store:
    if plan.store_id is None:
        raise NotFoundError("there is no store in these directories", hint="check the paths")
    devices = [_device(device_id, survey) for device_id, survey in plan.known.items()]
    return Store(store_id=plan.store_id, devices=devices, plan=plan, ops=ops, uid=uid, locks=None)


def _settle(plan: StorePlan, ops: StorageOps, uid: int, locks: Sequence[LockHandle]) -> Store:
    """Make what the plan says durable on every present device, and return the store.

    A new store is made in two rounds: only when disk.id stands on all devices does any of them say "ready".
    So a crash before leaves a store that was never used, and after it an absent member is really missing.
    """
    store_id = plan.store_id or random_id()
    surveys = dict(plan.known) | {random_id(): survey for survey in plan.blank}
    devices = [_device(device_id, survey) for device_id, survey in surveys.items()]
    members = dict(plan.missing) | {device.device_id: str(device.path) for device in devices}
    for device in devices:
        make_directories(ops, device.path, QUARANTINE_NAME)
        make_directories(ops, device.path, RUNS_NAME)
    # New members first: the others list only devices that exist.
    order = sorted(devices, key=lambda device: surveys[device.device_id].disk_id is not None)
    for is_ready in (False, True) if plan.is_new else (True,):
        for device in order:
            wanted = DiskId(device_id=device.device_id, store_id=store_id, members=members, is_ready=is_ready)
            if surveys[device.device_id].disk_id != wanted:
                publish_over(ops, device.path / DISK_ID_NAME, encode_disk_id(wanted))
                surveys[device.device_id] = replace(surveys[device.device_id], disk_id=wanted)
    return Store(store_id=store_id, devices=devices, plan=plan, ops=ops, uid=uid, locks=locks)


def _device(device_id: str, survey: Survey) -> Device:
    return Device(device_id=device_id, path=survey.path, file_system_id=survey.file_system_id)
