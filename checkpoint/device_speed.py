"""How fast each device of a store is, measured by its own transfers, and whether it has become slow.

Only the time counts in which a device moved bytes, and once where transfers overlap: what queues behind another rank's
transfer, or shares the drive with it, does not look like a slow drive. Nothing here asks a clock: callers say when a
transfer ended.
"""

import math
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

MEASURED_BYTES_MIN = 4 * 1024 * 1024
"""Smaller transfers tell of calls, not of bandwidth."""

RECENT_S = 2.0
"""Busy time over which the speed is averaged."""
TRANSFER_KEEP_MAX = 0.7
"""A new transfer replaces at least 0.3 of the average, however short: fast drives change within few transfers, too."""
HISTORY_S = 600.0
"""Busy time over which a device's own past fades: one that stays slow is measured against its peers in the end."""

BUSY_S_MIN = 1e-6
"""Two transfers that end at the same moment."""

SLOW_FACTOR = 3.0
WELL_FACTOR = 2.0
"""Slow below a third of its history or its peers' median, well again above half of it."""
SLOW_AFTER_S = 10.0
"""Busy time that it must be so, which spares a drive that collects its garbage for a moment."""

FORGET_AFTER_DEALS = 32
"""Deals without a segment after which a slow device's speed counts as unknown, so that it is tried again."""


class SpeedChange(Enum):
    """What a transfer has shown of its device."""

    BECAME_SLOW = auto()
    RECOVERED = auto()


@dataclass(slots=True)
class _Average:
    """Bytes per second, faded by busy time."""

    moved_bytes: float = 0.0
    busy_s: float = 0.0

    def add(self, moved_bytes: int, busy_s: float, keep: float) -> None:
        self.moved_bytes = self.moved_bytes * keep + moved_bytes
        self.busy_s = self.busy_s * keep + busy_s

    @property
    def bytes_per_s(self) -> float | None:
        return self.moved_bytes / self.busy_s if self.busy_s > 0 else None


class SpeedMeter:
    """One device's speed. `add` is told of each transfer that it has finished."""

    def __init__(self) -> None:
        self._recent = _Average()
        self._history = _Average()
        self._below_s = 0.0
        self._deals_without = 0
        self._last_end_s = -math.inf
        self.slow_reason = ""
        """Empty while it is not slow."""

    @property
    def bytes_per_s(self) -> float | None:
        """What it moves now; None before the first transfer that could be measured."""
        return self._recent.bytes_per_s

    def dealt(self, *, got_some: bool) -> None:
        """A deal was made: one that gets nothing for long is measured anew."""
        self._deals_without = 0 if got_some else self._deals_without + 1
        if self._deals_without >= FORGET_AFTER_DEALS:
            self._recent, self._deals_without = _Average(), 0

    def add(
        self, moved_bytes: int, busy_s: float, ended_s: float, peers_bytes_per_s: Sequence[float]
    ) -> SpeedChange | None:
        """Take a transfer that ended at `ended_s` (of any steady clock); return what it changed."""
        if moved_bytes < MEASURED_BYTES_MIN or busy_s <= 0:
            return None
        # What it shared with the transfer before it was counted then.
        busy_s = max(min(busy_s, ended_s - self._last_end_s), BUSY_S_MIN)
        self._last_end_s = ended_s
        self._recent.add(moved_bytes, busy_s, min(math.exp(-busy_s / RECENT_S), TRANSFER_KEEP_MAX))
        self._history.add(moved_bytes, busy_s, math.exp(-busy_s / HISTORY_S))
        speed, own = self._recent.bytes_per_s, self._history.bytes_per_s
        assert speed is not None
        assert own is not None
        peers = statistics.median(peers_bytes_per_s) if peers_bytes_per_s else 0.0
        return self._judge(speed, max(own, peers), busy_s, "its peers" if peers > own else "its own past")

    def _judge(self, speed: float, reference: float, busy_s: float, whose: str) -> SpeedChange | None:
        if speed * (WELL_FACTOR if self.slow_reason else SLOW_FACTOR) >= reference:
            was_slow, self.slow_reason, self._below_s = bool(self.slow_reason), "", 0.0
            return SpeedChange.RECOVERED if was_slow else None
        self._below_s += busy_s
        if self.slow_reason or self._below_s < SLOW_AFTER_S:
            return None
        self.slow_reason = (
            f"writes {speed / 1e6:.0f} MB/s, {whose} {reference / 1e6:.0f} MB/s; it gets fewer segments"
        )
        return SpeedChange.BECAME_SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReading:
    """What a person is told of a device."""

    bytes_per_s: float | None
    slow_reason: str


class SpeedBook:
    """Speed and backlog of each device of a store. Thread-safe."""

    def __init__(self, device_ids: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._meters = {device_id: SpeedMeter() for device_id in device_ids}
        self._backlog_bytes = dict.fromkeys(device_ids, 0)

    def reading(self, device_id: str) -> SpeedReading:
        """Return a device's speed, and why it counts as slow if it does."""
        with self._lock:
            meter = self._meters[device_id]
            return SpeedReading(bytes_per_s=meter.bytes_per_s, slow_reason=meter.slow_reason)

    def backlog_bytes(self, device_id: str) -> int:
        """Return what was dealt to a device and is not yet written."""
        with self._lock:
            return self._backlog_bytes[device_id]

    def queue(self, device_id: str, size_bytes: int) -> None:
        """Add to a device's backlog; a negative size takes away."""
        with self._lock:
            self._backlog_bytes[device_id] += size_bytes

    def dealt(self, counts: Mapping[str, int]) -> None:
        """A deal gave each of these devices so many segments."""
        with self._lock:
            for device_id, count in counts.items():
                self._meters[device_id].dealt(got_some=count > 0)

    def measured(self, device_id: str, moved_bytes: int, busy_s: float, ended_s: float) -> SpeedChange | None:
        """Take a transfer of a device that ended at `ended_s`; return what it changed."""
        with self._lock:
            peers = [
                speed
                for peer, meter in self._meters.items()
                if peer != device_id and (speed := meter.bytes_per_s) is not None
            ]
            return self._meters[device_id].add(moved_bytes, busy_s, ended_s, peers)
