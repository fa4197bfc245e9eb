"""One small thing done on several devices at once, such as writing a manifest, so that one that hangs holds nobody up.

A device that still has not done it when another one has for `LATE_CALL_S` is late: it is left behind, counts as
suspect until its call returns, and then takes what it has missed (`Store`).
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from ..core.errors import StorageError
from .device import Device
from .device_set import DeviceSet
from .late_plan import LATE_CALL_S, LATE_LOOK_S
from .side_by_side import Here

_T = TypeVar("_T")


def one_has_done_it(ended: Iterable[Future[object]]) -> bool:
    """Tell whether one device has done it, and no other has failed for a reason that is not its own."""
    errors = [each.exception() for each in ended]
    return None in errors and all(error is None or isinstance(error, StorageError) for error in errors)


def _ignore(_: Device, __: Future[object]) -> None:
    """Stand in where nobody asks how it ended on a late device."""


def on_each(
    store: DeviceSet,
    devices: Sequence[Device],
    work: Callable[[Device], _T],
    *,
    what: str,
    may_leave: Callable[[Sequence[Future[_T]]], bool] = one_has_done_it,
    on_late_end: Callable[[Device, Future[_T]], object] = _ignore,
) -> dict[Device, Future[_T]]:
    """Return how `work` ended on each of these devices, those that were left behind excepted; it may still run there.

    A StorageError in it, but for a full device, makes its device suspect. `what`: for messages, "writing a manifest".
    `may_leave` tells of those that have ended whether the others may be left. `on_late_end` hears how it ended on
    one that was, before that one counts as well again.
    """
    if len(devices) < 2:
        return {device: Here().submit(_watched, store, work, device) for device in devices}
    return _Round(store, work, what, on_late_end).run(devices, may_leave)


def on_trusted(store: DeviceSet, work: Callable[[Device], object], *, what: str) -> None:
    """Return when `work` is done on all trusted devices; one that fails or is late in it is not trusted from then on.

    Raises:
        StorageError: a device that is still trusted has failed: a full one, or the last one. On the others it is done.
    """

    def in_place(device: Device) -> None:
        store.check_in_place(device)
        store.keep_disk_id(device)
        work(device)

    ended = on_each(store, store.trusted, in_place, what=what)
    errors = {device: error for device, each in ended.items() if (error := each.exception()) is not None}
    for error in errors.values():
        if not isinstance(error, StorageError):
            raise error
    if not errors.keys().isdisjoint(store.trusted):
        raise next(iter(errors.values()))


def _watched(store: DeviceSet, work: Callable[[Device], _T], device: Device) -> _T:
    with store.calls.call(device.device_id), store.watching(device.device_id):
        return work(device)


class _Round(Generic[_T]):
    """A thread for each device, and who is waited for."""

    def __init__(
        self,
        store: DeviceSet,
        work: Callable[[Device], _T],
        what: str,
        on_late_end: Callable[[Device, Future[_T]], object],
    ) -> None:
        self._store, self._work, self._what, self._on_late_end = store, work, what, on_late_end
        self._lock = threading.Lock()
        self._ended: dict[Device, Future[_T]] = {}
        self._left: set[Device] = set()

    def run(
        self, devices: Sequence[Device], may_leave: Callable[[Sequence[Future[_T]]], bool]
    ) -> dict[Device, Future[_T]]:
        """Return how it ended on each device that was waited for."""
        pool = ThreadPoolExecutor(len(devices), thread_name_prefix="everstep-round")
        since_s = math.inf
        """Since when others could have been left behind."""
        try:
            threads = [pool.submit(self._on, device) for device in devices]
            while wait(threads, LATE_LOOK_S).not_done and not self._left:
                now_s = time.monotonic()
                with self._lock:
                    since_s = min(since_s, now_s) if may_leave(list(self._ended.values())) else math.inf
                    if now_s - since_s > LATE_CALL_S:
                        self._leave(devices, now_s - since_s)
        finally:
            pool.shutdown(wait=not self._left)
        with self._lock:
            return {device: each for device, each in self._ended.items() if device not in self._left}

    def _leave(self, devices: Sequence[Device], waited_s: float) -> None:
        error = StorageError(
            f"{self._what} was done on another device {waited_s:.1f} s ago, and here it is not",
            hint="it takes what it has missed when that has ended",
        )
        self._left = set(devices) - self._ended.keys()
        for device in self._left:
            self._store.mark_late(device.device_id, error)

    def _on(self, device: Device) -> None:
        ended = Here().submit(_watched, self._store, self._work, device)
        with self._lock:
            self._ended[device] = ended
        if device in self._left:
            try:
                self._on_late_end(device, ended)
            finally:
                self._store.late_is_over(device.device_id)
