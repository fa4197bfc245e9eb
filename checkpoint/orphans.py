"""Removing the generations that no manifest refers to, once every device was read and every manifest is known."""

from collections.abc import Iterable

from ..core.ids import is_id
from .device import Device
from .findings import Severity
from .recovery_devices import LOST_SUFFIX, RecoveryDevices
from .run_store import RunStore

_Orphan = tuple[Device, str]
"""A generation, and a device that has its directory."""


def remove_orphans(devices: RecoveryDevices, runs: Iterable[RunStore]) -> None:
    """Remove the generations of recovered runs that no manifest refers to, if the view of the store is complete.

    The locks of all devices are held and no client is served yet, so none of them is being written
    (docs/adr/0016-orphans-go-at-once.md).
    """
    removable = {run: found for run in runs if (found := _removable(devices, run))}
    # Everything is listed before the first goes: what fails in one run forbids deleting in all.
    is_certain = devices.store.is_whole
    for run, orphans in removable.items():
        for device, generation in orphans:
            devices.find(
                Severity.REPAIRABLE if is_certain else Severity.NOTE,
                run.generation_path(device, generation),
                "a generation that no manifest refers to",
                "removes it" if is_certain else "",
            )
    if not devices.store.may_delete:
        return
    for run, orphans in removable.items():
        for device, generation in orphans:
            devices.mend(device, lambda r=run, d=device, g=generation: _remove_generation(devices, r, d, g))


def _removable(devices: RecoveryDevices, run: RunStore) -> list[_Orphan]:
    """Return the run's orphans; none while a manifest that may refer to them cannot be read."""
    shards = run.shards()
    kept = {(ref.device_id, ref.generation) for shard in shards for ref in shard.segments}
    listed = devices.each(devices.present, lambda each: _generations(run, each))
    orphans = [
        (device, name)
        for device, names in listed.items()
        for name in names
        if (device.device_id, name) not in kept
    ]
    if not orphans:
        return []
    run.unreadable = run.unreadable or _quarantined(devices, run)
    if run.unreadable:
        devices.problem(
            f"run {run.name!r}: {len(orphans)} unreferenced generations stay: {run.unreadable}",
            run.data_path(orphans[0][0]),
            severity=Severity.NOTE,
        )
        return []
    return orphans


def _generations(run: RunStore, device: Device) -> Iterable[str]:
    ops, directory = run.store.ops, run.data_path(device)
    if ops.stat(directory) is None:
        return ()
    return [name for name in ops.list_directory(directory) if is_id(name)]


def _quarantined(devices: RecoveryDevices, run: RunStore) -> str:
    names = devices.each(devices.present, lambda each: devices.ops.list_directory(each.quarantine_path))
    for device in names:
        for name in names[device]:
            if name.startswith(run.run_id) and name.endswith(LOST_SUFFIX):
                return f"{device.quarantine_path / name} may refer to them; remove it to free their space"
    return ""


def _remove_generation(devices: RecoveryDevices, run: RunStore, device: Device, generation: str) -> None:
    directory = run.generation_path(device, generation)
    for name in devices.ops.list_directory(directory):
        devices.ops.unlink(directory / name)
    devices.ops.remove_directory(directory)
    devices.ops.sync_directory(run.data_path(device))
    devices.report.orphan_count += 1
