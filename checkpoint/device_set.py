"""The devices of an opened store: which are present, missing or suspect, and what that forbids."""

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from ..core.errors import EverstepError, NoSpaceError, StorageError
from .device import Device
from .space_ledger import SpaceLedger
from .storage_ops import LockHandle, StorageOps


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


class DeviceSet:
    """The members of a store, held by this process. Thread-safe: the fields are fixed, the states have a lock."""

    def __init__(
        self,
        *,
        store_id: str,
        devices: Sequence[Device],
        missing: Mapping[str, str],
        ops: StorageOps,
        uid: int,
        locks: Sequence[LockHandle] | None,
    ) -> None:
        self.store_id = store_id
        self.devices = tuple(sorted(devices, key=lambda device: device.device_id))
        """Present devices, by id."""
        self.missing = tuple(MissingDevice(device_id=key, path=path) for key, path in missing.items())
        self.ops = ops
        self.uid = uid
        self.is_read_only = locks is None
        self.space = SpaceLedger(ops, self.devices)
        self._locks = tuple(locks or ())
        self._lock = threading.Lock()
        self._suspects: dict[str, str] = {}

    def close(self) -> None:
        """Let go of the devices; a second call does nothing."""
        for lock in self._locks:
            lock.release()

    @property
    def degraded(self) -> bool:
        """Tell whether a member is missing: then the rest is read and written, but nothing is deleted."""
        return bool(self.missing)

    @property
    def is_whole(self) -> bool:
        """Tell whether every member is present and none has failed: only then is the view complete."""
        with self._lock:
            return not (self.missing or self._suspects)

    @property
    def may_delete(self) -> bool:
        """Tell whether the view is complete, and the store not open for reading only."""
        return self.is_whole and not self.is_read_only

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

    @contextmanager
    def reading(self, device_id: str) -> Generator[None]:
        """Mark the device as suspect when the block fails on it for whatever reason.

        For what decides which files are still needed: whoever could not read that may not delete.
        """
        try:
            yield
        except StorageError as exc:
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
