"""Opening a store after whatever happened: which checkpoints are there, and what was left half done.

Metadata only, so that it takes seconds: manifests are read and checked by their digest, segments by size and by
the stamp in their first block; data are verified when they are restored. Every step may be repeated, and may itself be
interrupted by a crash. Nothing is deleted but temporary files and, once every device was read completely, generations
that no manifest refers to; what cannot be believed is moved to quarantine. A device that is merely full is read like
any other, and what would have to be written there waits for the next recovery.

For a store that is opened read-only the same reading is done and nothing is written or removed.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import CorruptDataError, DataError, StorageError
from ..core.ids import is_id, run_id_of
from .device import Device
from .manifest_format import MANIFEST_FILE_BYTES_MAX, decode_manifest_head
from .orphans import remove_orphans
from .recovery_devices import COPY_SUFFIX, RecoveryDevices, RecoveryReport
from .recovery_run import recover_run
from .run_store import ATTEMPTS_NAME, COMMITS_NAME, DATA_NAME, RUN_NAME, run_path
from .store import Store
from .store_format import RunId, decode_run

__all__ = ["RecoveryReport", "recover"]

_log = logging.getLogger(__name__)


def recover(store: Store, *, looks_for_rests: bool = False) -> RecoveryReport:
    """Fill the store's catalogue from its devices, mend what is half done, and say what was found.

    Called once after `open_store`, before anything else uses the store. A device that fails meanwhile is marked as
    suspect and left out; then nothing is deleted. `looks_for_rests`: a store open for reading only is also searched for
    what would be removed; a daemon at work always has some of that.

    Raises:
        StorageError: no device can be read, or none but such as are new.
    """
    started_s = time.perf_counter()
    report = RecoveryReport()
    devices = RecoveryDevices(store, report, looks_for_rests=looks_for_rests)
    for owner_uid, run_id in _find_runs(devices):
        identity = _identity(devices, owner_uid, run_id)
        if identity is not None:
            store.add_run(recover_run(devices, identity))
            report.run_count += 1
    _check_known(store)
    store.mark_read()
    if devices.writes or looks_for_rests:
        remove_orphans(devices, store.runs())
    report.duration_s = time.perf_counter() - started_s
    _log.info(
        "store_recovered store=%s runs=%d shards=%d damaged=%d quarantined=%d orphans=%d seconds=%.3f",
        store.store_id,
        report.run_count,
        report.shard_count,
        report.damaged_count,
        report.quarantined_count,
        report.orphan_count,
        report.duration_s,
    )
    return report


def _check_known(store: Store) -> None:
    """Raise where all devices that knew the store have failed meanwhile, and what became of it only new ones say.

    Who went on there would find nothing to restore, and might give a checkpoint the name of one that is there.
    """
    trusted = {device.device_id for device in store.trusted}
    if trusted <= store.newcomers:
        failed = sorted(str(device.path) for device in store.devices if device.device_id not in trusted)
        raise StorageError(
            f"{', '.join(failed)} failed while a new device was taken into the store, which knows nothing of it yet",
            hint="nothing is lost: open the store again when they answer",
        )


def _find_runs(devices: RecoveryDevices) -> list[tuple[int, str]]:
    """Return (owner, run id) of every run on any device, and drop unfinished files and the pools of the devices."""

    def runs_on(device: Device) -> set[tuple[int, str]]:
        devices.drop_temporaries(device.path)
        devices.empty_pool(device)
        return {
            (int(owner), run_id)
            for owner in devices.ops.list_directory(device.runs_path)
            if owner.isascii() and owner.isdigit()
            for run_id in devices.ops.list_directory(device.runs_path / owner)
            if is_id(run_id)
        }

    return sorted(set[tuple[int, str]]().union(*devices.each(devices.present, runs_on).values()))


def _identity(devices: RecoveryDevices, owner_uid: int, run_id: str) -> RunId | None:
    """Return whose run a directory holds, by run.json of any device, else by a manifest; None if nobody knows."""

    def decode(content: bytes, where: str) -> RunId:
        identity = decode_run(content, where)
        if (identity.owner_uid, identity.run_id) != (owner_uid, run_id):
            raise CorruptDataError(f"{where} belongs to another run")
        return identity

    paths = {device: run_path(device, owner_uid, run_id) for device in devices.present}
    found = devices.read_copies({device: path / RUN_NAME for device, path in paths.items()}, decode)
    identity = next((decode(content, "") for content in found.whole), None)
    if identity is None:
        identity = _identity_from_manifests(devices, paths, owner_uid, run_id)
    for device, error in found.bad.items():
        devices.quarantine(device, paths[device] / RUN_NAME, run_id, COPY_SUFFIX, error)
    if identity is None:
        used = devices.each(devices.present, lambda each: _is_used(devices, paths[each]))
        if any(used.values()):
            devices.problem(
                f"run {run_id} of uid {owner_uid} is not offered: its run.json is lost",
                next(iter(paths.values())),
            )
    return identity


def _is_used(devices: RecoveryDevices, path: Path) -> bool:
    """Tell whether a run's directory holds anything: one that was just being made does not."""
    return any(_names(devices, path / name) for name in (COMMITS_NAME, ATTEMPTS_NAME, DATA_NAME))


def _names(devices: RecoveryDevices, directory: Path) -> tuple[str, ...]:
    return () if devices.ops.stat(directory) is None else devices.ops.list_directory(directory)


def _identity_from_manifests(
    devices: RecoveryDevices, paths: Mapping[Device, Path], owner_uid: int, run_id: str
) -> RunId | None:
    names = devices.each(devices.present, lambda each: _names(devices, paths[each] / COMMITS_NAME))
    for device in names:
        for name in names[device]:
            path = paths[device] / COMMITS_NAME / name
            try:
                content = devices.ops.read_small(path, MANIFEST_FILE_BYTES_MAX, owner_uid=devices.store.uid)
                head = decode_manifest_head(content or b"")
            except DataError:
                continue
            if (head.owner_uid, head.run_id) == (owner_uid, run_id) and run_id_of(head.run_name) == run_id:
                return RunId.of(head.run_name, owner_uid)
    return None
