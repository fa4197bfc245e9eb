"""Free space, with what waits to be written again, less what was promised to writes that are under way."""

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import NoSpaceError, StorageError
from ..core.sizes import size_text
from .deal_plan import SPACE_MARGIN_BYTES, shortage
from .device import Device
from .segment_pool import SegmentPool
from .storage_ops import StorageOps


class Reservation:
    """Space promised to one write; give back what is allocated as soon as it is, and all that is left at the end.

    Thread-safe: the lanes of a device allocate at once.
    """

    def __init__(
        self, ledger: "SpaceLedger", needs: Mapping[str, int], file_systems: Mapping[str, int]
    ) -> None:
        self._ledger = ledger
        self._needs = dict(needs)
        self._file_systems = file_systems
        self._lock = threading.Lock()

    def settle(self, device_id: str, size_bytes: int | None = None) -> None:
        """Give back so much of a device's part, or what is left of it; again is nothing."""
        with self._lock:
            left = self._needs[device_id]
            given = left if size_bytes is None else min(size_bytes, left)
            self._needs[device_id] = left - given
        self._ledger.give_back(self._file_systems[device_id], given)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        for device_id in tuple(self._needs):
            self.settle(device_id)


class SpaceLedger:
    """Free space and pools less what was promised, per file system. Thread-safe."""

    def __init__(self, ops: StorageOps, devices: Sequence[Device], pool: SegmentPool) -> None:
        self._ops = ops
        self._pool = pool
        self._devices = {device.device_id: device for device in devices}
        self._lock = threading.Lock()
        self._reserved_bytes: dict[int, int] = {}

    def reserve(self, needs: Mapping[str, int]) -> Reservation:
        """Promise `needs` (bytes by device id), all or nothing.

        Raises:
            NoSpaceError: it would not fit; nothing was written.
        """
        file_systems = self._file_systems(needs)
        with self._lock, self._explained():
            for file_system_id in set(file_systems.values()):
                self._check(file_system_id, needs, file_systems)
            return self._promise(needs)

    def reserve_dealt(
        self,
        devices: Sequence[Device],
        plan: Callable[[Mapping[int, int]], Mapping[str, int]],
        on_failed: Callable[[Device, StorageError], None],
    ) -> Reservation:
        """Promise what `plan` needs (bytes by device id), given the room that each file system of `devices` has left.

        Between the look at the room and the promise nobody else gets any. A device that cannot be asked is told to
        `on_failed` and has no room. What `plan` raises is passed on.
        """
        rooms: dict[int, int] = {}
        with self._lock, self._explained():
            for device in devices:
                key = device.file_system_id
                try:
                    if key not in rooms:
                        rooms[key] = self._room_bytes(key, device.path)
                except StorageError as exc:
                    on_failed(device, exc)
            rooms |= {key: 0 for device in devices if (key := device.file_system_id) not in rooms}
            return self._promise(plan(rooms))

    def shortages(self) -> list[str]:
        """Return a sentence for each device that nothing can be written to now; one that cannot be asked has none."""
        found: list[str] = []
        for device in self._devices.values():
            with suppress(StorageError):
                found.append(self.shortage(device, self._ops.free_bytes(device.path)))
        return [text for text in found if text]

    def too_small(self, device_ids: Collection[str], needed_bytes: int, held_bytes: int) -> str:
        """Return why a checkpoint of so many bytes fits on no free space of the devices; empty where it may fit.

        `held_bytes`: of older checkpoints of its run, which may go for it. A device that cannot be asked counts as
        room enough.
        """
        volumes = {
            device.file_system_id: device.path
            for device in self._devices.values()
            if device.device_id in device_ids
        }
        try:
            room_bytes = sum(
                max(self._ops.free_bytes(path) + self._pool.bytes_on(volume) - SPACE_MARGIN_BYTES, 0)
                for volume, path in volumes.items()
            )
        except StorageError:
            return ""
        if needed_bytes <= room_bytes + held_bytes:
            return ""
        where = ", ".join(str(path) for path in sorted(volumes.values()))
        held = f", {size_text(held_bytes)} are older checkpoints of this run" if held_bytes else ""
        return (
            f"{where}: too small for this state: a checkpoint takes {size_text(needed_bytes)},"
            f" {size_text(room_bytes)} are free{held}. None can be written: free space there, or add a directory"
        )

    def shortage(self, device: Device, free_bytes: int) -> str:
        """Return why nothing can be written to a device with so much free space now; empty where something can."""
        return shortage(device.path, free_bytes + self._pool.bytes_on(device.file_system_id))

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Say of room that does not suffice what was taken from the free space."""
        try:
            yield
        except NoSpaceError as exc:
            promised_bytes = sum(self._reserved_bytes.values())
            raise NoSpaceError(
                f"{exc.message} ({size_text(SPACE_MARGIN_BYTES)} of each file system stay free, and"
                f" {promised_bytes} bytes are promised to other writes)",
                hint=exc.hint,
            ) from exc

    def _promise(self, needs: Mapping[str, int]) -> Reservation:
        file_systems = self._file_systems(needs)
        for device_id, needed_bytes in needs.items():
            key = file_systems[device_id]
            self._reserved_bytes[key] = self._reserved_bytes.get(key, 0) + needed_bytes
        return Reservation(self, needs, file_systems)

    def _file_systems(self, needs: Mapping[str, int]) -> dict[str, int]:
        return {device_id: self._devices[device_id].file_system_id for device_id in needs}

    def _room_bytes(self, file_system_id: int, path: Path) -> int:
        # Free space first: what the pool gives back between the two calls is then missed, not counted twice.
        free_bytes = self._ops.free_bytes(path)
        room_bytes = free_bytes + self._pool.bytes_on(file_system_id) - SPACE_MARGIN_BYTES
        return room_bytes - self._reserved_bytes.get(file_system_id, 0)

    def make_room(self, device: Device, size_bytes: int = 0) -> None:
        """Let the pool give back what a new file of this size, and the margin, lack of free space.

        Raises:
            StorageError: the device failed.
        """
        if self._pool.bytes_on(device.file_system_id):
            free_bytes = self._ops.free_bytes(device.path)
            self._pool.give_back(device.file_system_id, size_bytes + SPACE_MARGIN_BYTES - free_bytes)

    def give_back(self, file_system_id: int, size_bytes: int) -> None:
        """Take back a promise."""
        with self._lock:
            self._reserved_bytes[file_system_id] -= size_bytes

    def _check(self, file_system_id: int, needs: Mapping[str, int], file_systems: Mapping[str, int]) -> None:
        sharing = [device_id for device_id, found in file_systems.items() if found == file_system_id]
        needed_bytes = sum(needs[device_id] for device_id in sharing)
        path = self._devices[sharing[0]].path
        room_bytes = self._room_bytes(file_system_id, path)
        if needed_bytes > room_bytes:
            raise NoSpaceError(
                f"{path} has room for {max(room_bytes, 0)} bytes, {needed_bytes} are needed",
                hint="free space there, lower keep_last, or add a device",
            )
