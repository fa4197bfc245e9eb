"""Segments of deleted checkpoints that wait to be written again: over written blocks a drive writes faster.

Into a new file every block is allocated and its extent converted once it is written; over a file that was written
before neither happens (docs/adr/0026-files-are-written-again.md has the figures). What waits here is room, not data:
it is given back whenever somebody needs it, and none of it outlives the opening of the store.

Who puts a file here has made sure that no manifest can come back that refers to it. Nobody else has it: it is held
alone while it moves here, and again while it moves to its new name (`StorageOps.recycle`, `open_recycled`).
"""

import contextlib
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import StorageError
from ..core.ids import random_id
from .device import Device
from .pool_plan import best_fit, count_reaching, surplus_count
from .segment_format import align_up
from .storage_ops import SegmentHandle, StorageOps

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A file of the pool."""

    path: Path
    size_bytes: int
    """Its length."""
    owner_uid: int
    """Of the run that it was part of: no other user's run gets it."""

    @property
    def room_bytes(self) -> int:
        """What its removal frees."""
        return align_up(self.size_bytes)


class SegmentPool:
    """The pools of a store's devices. Thread-safe; the lock is never held during I/O."""

    def __init__(self, ops: StorageOps, devices: Sequence[Device]) -> None:
        self.is_on = False
        """Whether it takes files; whoever opens the store says so."""
        self._ops = ops
        self._lock = threading.Lock()
        self._waiting: dict[Device, list[_Waiting]] = {device: [] for device in devices}
        """The oldest first."""

    def size_bytes(self, device_id: str) -> int:
        """Return the bytes that wait on a device."""
        with self._lock:
            return sum(
                each.room_bytes
                for device, files in self._waiting.items()
                for each in files
                if device.device_id == device_id
            )

    def bytes_on(self, file_system_id: int) -> int:
        """Return the bytes that wait on all devices of a file system: `give_back` makes room of them."""
        with self._lock:
            return sum(each.room_bytes for _, each in self._on(file_system_id))

    def _on(self, file_system_id: int) -> list[tuple[Device, _Waiting]]:
        return [
            (device, each)
            for device, files in self._waiting.items()
            for each in files
            if device.file_system_id == file_system_id
        ]

    def put(self, device: Device, path: Path, *, owner_uid: int, bound_bytes: int) -> bool:
        """Take the file of a segment that no manifest can refer to any more; False: it stays where it is.

        It stays where recycling is off, or while anybody has it open, mapped or linked. At most `bound_bytes` wait on
        a device: the oldest files go.

        Raises:
            StorageError: a file that should go could not be removed.
        """
        if not self.is_on or device not in self._waiting:
            return False
        try:
            self._ops.make_directory(device.pool_path)
        except StorageError:  # a full device has to get rid of files all the same
            return False
        target = device.pool_path / random_id()
        size_bytes = self._ops.recycle(path, target)
        if size_bytes is None:
            return False
        with self._lock:
            files = self._waiting[device]
            files.append(_Waiting(path=target, size_bytes=size_bytes, owner_uid=owner_uid))
            count = surplus_count([each.size_bytes for each in files], bound_bytes)
            surplus = files[:count]
            del files[:count]
        for each in surplus:
            self._ops.unlink(each.path)
        return True

    def take(self, device: Device, target: Path, *, owner_uid: int, size_bytes: int) -> SegmentHandle | None:
        """Return a file of about this size, opened for writing under its new name; None: make a new one.

        What it holds and how long it is means nothing. Whatever goes wrong, nothing stands under `target` then.
        """
        while (found := self._pick(device, owner_uid, size_bytes)) is not None:
            handle = self._ops.open_recycled(found.path, target)
            if handle is not None:
                return handle
            _log.warning("file_not_recycled path=%s", found.path)
            for path in (found.path, target):
                with contextlib.suppress(StorageError):
                    self._ops.unlink(path)
        return None

    def _pick(self, device: Device, owner_uid: int, size_bytes: int) -> _Waiting | None:
        with self._lock:
            files = self._waiting.get(device, [])
            own = [each for each in files if each.owner_uid == owner_uid]
            index = best_fit([each.size_bytes for each in own], size_bytes)
            if index is None:
                return None
            files.remove(own[index])
            return own[index]

    def give_back(self, file_system_id: int, needed_bytes: int | None = None) -> int:
        """Remove files, the oldest first, until a file system has so many bytes more (None: all); return the bytes.

        Raises:
            StorageError: a file could not be removed.
        """
        with self._lock:
            found = self._on(file_system_id)
            sizes = [each.room_bytes for _, each in found]
            going = found if needed_bytes is None else found[: count_reaching(sizes, needed_bytes)]
            # Out of the books first: else these bytes would for a moment be free and in the pool.
            for device, each in going:
                self._waiting[device].remove(each)
        for _, each in going:
            self._ops.unlink(each.path)
        return sum(each.room_bytes for _, each in going)

    def keep_only(self, device_ids: Collection[str]) -> None:
        """Forget the files on all other devices: what lies on a device that was retired is not touched any more."""
        with self._lock:
            self._waiting = {
                device: files for device, files in self._waiting.items() if device.device_id in device_ids
            }

    def close(self) -> None:
        """Give everything back, as far as the devices let us; the next opening of the store removes the rest."""
        with self._lock:
            file_systems = {device.file_system_id for device in self._waiting}
        for file_system_id in file_systems:
            with contextlib.suppress(StorageError):
                self.give_back(file_system_id)
