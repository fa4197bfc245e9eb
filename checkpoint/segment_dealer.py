"""Who writes which segment of a shard: dealt at the start, and taken over from a device that turns out slower."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.errors import NoSpaceError, StorageError
from .deal_plan import DeviceLoad, Work, deal, victim
from .device import Device
from .device_set import DeviceSet
from .manifest_types import SegmentPlan
from .segment_format import align_up
from .space_ledger import Reservation

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Hand:
    """What one device holds of the shard."""

    device: Device
    waiting: deque[SegmentPlan]
    running: dict[int, SegmentPlan] = field(default_factory=dict[int, SegmentPlan])
    """By segment number."""
    running_since_s: float = 0.0
    """When the last of those was taken."""


class SegmentDealer:
    """Deals the segments of one shard to devices, and hands them out one by one. Thread-safe after `reserve`."""

    def __init__(self, store: DeviceSet, plans: Sequence[SegmentPlan], devices: Sequence[Device]) -> None:
        self._store = store
        self._plans = plans
        self._candidates = devices
        self._size_bytes = max((plan.file_size_bytes for plan in plans), default=0)
        """Of about this size are all of them: the layout cuts them equal."""
        self._lock = threading.Lock()
        self._hands: dict[str, _Hand] = {}

    def reserve(self) -> Reservation:
        """Deal, and promise each device's part of the room.

        Raises:
            NoSpaceError: there is no room for all segments.
        """
        reservation = self._store.space.reserve_dealt(self._candidates, self._deal, self._cannot_be_asked)
        if self._plans:
            self._store.speeds.dealt(
                {device.device_id: len(self.dealt_to(device)) for device in self._candidates},
                self._size_bytes,
                time.monotonic(),
            )
        return reservation

    def _deal(self, rooms_bytes: Mapping[int, int]) -> Mapping[str, int]:
        """Return the bytes that each device needs, which are in its backlog before anybody else deals."""
        speeds = self._store.speeds
        loads = [
            DeviceLoad(
                device_id=device.device_id,
                name=str(device.path),
                volume=device.file_system_id,
                speed_bytes_per_s=speeds.at(device.device_id, self._size_bytes),
                backlog_bytes=speeds.backlog_bytes(device.device_id),
            )
            for device in self._candidates
        ]
        sizes = [align_up(plan.file_size_bytes) for plan in self._plans]
        owners = deal(sizes, loads, rooms_bytes)
        for device in self._candidates:
            mine = [
                plan for plan, owner in zip(self._plans, owners, strict=True) if owner == device.device_id
            ]
            if mine:
                self._hands[device.device_id] = _Hand(device, deque(mine))
                self._queue(device, sum(plan.file_size_bytes for plan in mine))
        needs: Counter[str] = Counter()
        for size, owner in zip(sizes, owners, strict=True):
            needs[owner] += size
        return needs

    def _cannot_be_asked(self, device: Device, error: StorageError) -> None:
        self._store.mark_suspect(device.device_id, error)

    @property
    def devices(self) -> list[Device]:
        """The devices that were dealt a segment."""
        return [hand.device for hand in self._hands.values()]

    def dealt_to(self, device: Device) -> list[SegmentPlan]:
        """Return the segments that wait for a device."""
        hand = self._hands.get(device.device_id)
        return list(hand.waiting) if hand else []

    def take(self, device: Device) -> SegmentPlan | None:
        """Return the segment that a device writes next; None: there is none left for it."""
        with self._lock:
            hand = self._hands[device.device_id]
            plan = hand.waiting.popleft() if hand.waiting else self._taken_over(hand)
            if plan is not None:
                hand.running[plan.segment], hand.running_since_s = plan, time.monotonic()
            return plan

    def began(self, device: Device) -> None:
        """A device has begun to write the segment that it took: until now that had to be copied first."""
        with self._lock:
            self._hands[device.device_id].running_since_s = time.monotonic()

    def _taken_over(self, thief: _Hand) -> SegmentPlan | None:
        if thief.running:
            return None
        speeds, now_s = self._store.speeds, time.monotonic()
        works = [
            Work(
                device_id=device_id,
                waiting_bytes=tuple(plan.file_size_bytes for plan in hand.waiting),
                running_bytes=sum(plan.file_size_bytes for plan in hand.running.values()),
                running_s=now_s - hand.running_since_s if hand.running else 0.0,
                speed_bytes_per_s=speeds.at(device_id, self._size_bytes),
            )
            for device_id, hand in self._hands.items()
            if hand is not thief
        ]
        chosen = victim(speeds.at(thief.device.device_id, self._size_bytes), works)
        if chosen is None or not self._has_room(thief.device, self._hands[chosen].waiting[-1]):
            return None
        loser = self._hands[chosen]
        plan = loser.waiting.pop()
        self._queue(loser.device, -plan.file_size_bytes)
        self._queue(thief.device, plan.file_size_bytes)
        _log.info(
            "segment_taken_over segment=%d size_bytes=%d from=%s by=%s",
            plan.segment,
            plan.file_size_bytes,
            loser.device.path,
            thief.device.path,
        )
        return plan

    def _has_room(self, device: Device, plan: SegmentPlan) -> bool:
        """Tell whether the ledger would promise the room now; allocating the file a moment later has the last word."""
        needed = {device.device_id: align_up(plan.file_size_bytes)}
        try:
            with self._store.space.reserve(needed):
                return True
        except NoSpaceError:
            return False

    def written(self, device: Device, plan: SegmentPlan) -> None:
        """A device has written the segment that it took."""
        with self._lock:
            del self._hands[device.device_id].running[plan.segment]
            self._queue(device, -plan.file_size_bytes)

    def leave(self, device: Device) -> None:
        """Nobody waits for a device any more: it gets nothing, and nothing is taken over from it."""
        with self._lock:
            self._empty(self._hands[device.device_id])

    def close(self) -> None:
        """The write has ended, well or not: nothing of it waits any more."""
        with self._lock:
            for hand in self._hands.values():
                self._empty(hand)

    def _empty(self, hand: _Hand) -> None:
        left = [*hand.waiting, *hand.running.values()]
        self._queue(hand.device, -sum(plan.file_size_bytes for plan in left))
        hand.waiting.clear()
        hand.running.clear()

    def _queue(self, device: Device, size_bytes: int) -> None:
        self._store.speeds.queue(device.device_id, size_bytes)
