"""Free space less what was promised to writes that are under way."""

import threading
from collections.abc import Mapping, Sequence

from ..core.errors import NoSpaceError
from .device import Device
from .storage_ops import StorageOps

SPACE_MARGIN_BYTES = 16 * 1024 * 1024
"""Left free on each file system for manifests, attempts and the file system's own growth."""


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
