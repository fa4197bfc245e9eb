"""Taking a device back into its store: with all it has, or, once it was retired, as a new and empty one.

One that was there all the time and has only failed is taken back while the store is used (ADR 0102).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import DeviceMissingError, StorageError
from ..core.ids import random_id
from .device import DISK_ID_NAME, QUARANTINE_NAME, RUNS_NAME, Device, lock_directory, survey_directory
from .device_set import DeviceState
from .device_survey import survey_all
from .durable import make_directories, publish_over
from .manifest_format import manifest_name, parse_manifest_name
from .run_store import RunStore
from .storage_ops import StorageOps
from .store import Store
from .store_format import LockHolder, encode_disk_id
from .store_plan import plan_store

_HINT = "readmit it when no trainer is attached, or restart the daemon: what it holds is read then"
RETIRED_SUFFIX = ".retired"
"""In quarantine: what a device held that came back after it was retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readmission:
    """A directory that is ready to be opened with its store."""

    adopt: tuple[Path, ...]
    """For open_store."""
    is_new: bool
    """It comes as a new, empty device; else with all it has."""
    aside: Path | None
    """Where what it held lies now."""


def check_readmission(
    directories: Sequence[Path], path: Path, *, ops: StorageOps, uid: int
) -> tuple[bool, str | None]:
    """Return whether `path`, one of the directories of a store, is a member, and else which retired one; reads only.

    Raises:
        DeviceMissingError: a member is missing at this path, or anywhere while a new one should come.
        ConfigError, CorruptDataError: see store_plan.plan_store.
        StorageError: what is at this path cannot be read.
    """
    found = survey_all(ops, directories, lambda each: survey_directory(ops, each, uid=uid))
    surveys = dict(zip(directories, found, strict=True))
    if (error := surveys[path].error) is not None:
        raise error
    plan = plan_store(list(surveys.values()), adopt=[path])
    disk_id = surveys[path].disk_id
    is_member = disk_id is not None and disk_id.device_id in plan.known
    if plan.missing and not is_member:
        names = ", ".join(f"{key} (last seen at {at})" for key, at in plan.missing.items())
        raise DeviceMissingError(
            f"{path} cannot become a new device while others are missing: {names}",
            hint="mount them, or `everstep device retire` them first",
        )
    return is_member, None if disk_id is None or is_member else disk_id.device_id


def prepare_readmission(
    directories: Sequence[Path], path: Path, *, ops: StorageOps, holder: LockHolder, uid: int
) -> Readmission:
    """Make `path`, one of the directories of a store that nobody holds, ready to be opened with it as a member.

    A member that is there again needs nothing: opening the store takes it back with all it has. What a retired device
    holds is moved into its quarantine first, so that it comes as a new one; so does an empty directory.

    Raises:
        DeviceMissingError, ConfigError, CorruptDataError: see `check_readmission`.
        DeviceLockedError: somebody holds it.
        StorageError: a call failed; the same call goes on where this one ended.
    """
    is_member, retired_id = check_readmission(directories, path, ops=ops, uid=uid)
    if is_member:
        return Readmission(adopt=(), is_new=False, aside=None)
    aside = None if retired_id is None else _set_aside(ops, path, retired_id, holder=holder, uid=uid)
    return Readmission(adopt=(path,), is_new=True, aside=aside)


def _set_aside(ops: StorageOps, path: Path, device_id: str, *, holder: LockHolder, uid: int) -> Path:
    """Move what a retired device holds into its quarantine and return where it is; nothing is deleted.

    runs/ before disk.id: at every moment the directory is a retired device, or an empty directory.
    """
    lock = lock_directory(ops, path, holder)
    try:
        found = survey_directory(ops, path, uid=uid).disk_id
        if found is None or found.device_id != device_id:
            raise StorageError(f"another process changed {path} meanwhile", hint="try again")
        aside = make_directories(ops, path, QUARANTINE_NAME, f"{device_id}.{random_id()}{RETIRED_SUFFIX}")
        for name in (RUNS_NAME, DISK_ID_NAME):
            if ops.stat(path / name) is not None:
                ops.rename_noreplace(path / name, aside / name)
                ops.sync_directory(aside)
                ops.sync_directory(path)
        return aside
    finally:
        lock.release()


def take_back(store: Store, device: Device) -> None:
    """Trust a device of an open store that has failed again, when it has taken what it missed; nothing if it is well.

    Raises:
        StorageError: it still fails, or does not answer, or holds what was not read when the store was opened.
    """
    if store.has_failed(device):
        if not store.was_read(device):
            raise StorageError(
                f"{device.path} failed when the store was opened: nobody knows what it holds", hint=_HINT
            )
        with store.taking_back(device):
            store.check_in_place(device)
            for run in store.runs():
                _refuse_unknown(run, device)
            content = encode_disk_id(store.membership.disk_id(device.device_id, store_id=store.store_id))
            publish_over(store.ops, device.path / DISK_ID_NAME, content)  # it takes what is new, and keeps it
    state, reason = store.device_state(device.device_id)
    if state is DeviceState.SUSPECT and store.has_failed(device):
        raise StorageError(f"{device.path} is suspect again: {reason}")
    if state is DeviceState.SUSPECT:
        raise StorageError(
            f"{device.path} is late: {reason}",
            hint="nothing is to be done: it comes back when its call has returned",
        )


def _refuse_unknown(run: RunStore, device: Device) -> None:
    """Raise where a manifest is left of what was removed, or was thought to have failed: only recovery knows of it."""
    path = run.commits_path(device)
    if run.store.ops.stat(path) is None:
        return
    names = [name for name in run.store.ops.list_directory(path) if parse_manifest_name(name)]
    known = {manifest_name(shard.checkpoint, shard.rank) for shard in run.shards()}
    unknown = sorted(set(names) - known)
    if unknown:
        raise StorageError(f"{path / unknown[0]} belongs to no checkpoint that is known here", hint=_HINT)
