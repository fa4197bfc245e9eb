"""How fast each device of a store is, measured by its own transfers, and whether it has become slow.

Only the time counts in which a device moved bytes, and once where transfers overlap: what queues behind another rank's
transfer, or shares the drive with it, does not look like a slow drive. Nothing here asks a clock: callers say when a
transfer ended.
"""

import math
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

MEASURED_BYTES_MIN = 4 * 1024 * 1024
"""Smaller transfers tell of calls as much as of bandwidth: they are summed up to so many bytes, and compared only with
those of peers, which have the same calls to make."""
SMALL_S_MIN = 1.0
"""Or up to so much busy time, which no call explains: before that a slow device has cost no more than this."""

RECENT_S = 2.0
"""Busy time over which the speed is averaged."""
TRANSFER_KEEP_MAX = 0.7
"""A new transfer replaces at least 0.3 of the average, however short: fast drives change within few transfers, too."""
HISTORY_S = 600.0
"""Busy time over which a device's own past fades while it is well. While it is slow its past stays as it was: a device
that is slow for good gets another one when its store is opened again, by a restart or a readmission."""

BUSY_S_MIN = 1e-6
"""Two transfers that end at the same moment."""

SLOW_FACTOR = 3.0
WELL_FACTOR = 2.0
"""Slow below a third of its past or its peers' median, well again above half of it."""
SLOW_AFTER_S = 10.0
"""Busy time over which it must be so, which spares a drive that collects its garbage for a moment. It is the present:
the past is what came before, so that whoever turns slow is not measured against what it is now."""
SAMPLE_S_MIN = 0.01
"""Transfers that follow each other faster are taken together, so that the present is a thousand samples at most."""

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


@dataclass(slots=True)
class _Sample:
    """Transfers in a row. Whole numbers, so that their sum may be kept by adding and taking away."""

    moved_bytes: int = 0
    busy_ns: int = 0
    peers_bytes: int = 0
    """What its peers would have moved meanwhile."""

    @property
    def bytes_per_s(self) -> float:
        return self.moved_bytes / self.busy_ns * 1e9

    def change(self, other: "_Sample", sign: int = 1) -> None:
        self.moved_bytes += sign * other.moved_bytes
        self.busy_ns += sign * other.busy_ns
        self.peers_bytes += sign * other.peers_bytes


class _Present:
    """The last samples that make SLOW_AFTER_S of busy time together."""

    def __init__(self) -> None:
        self._samples = deque[_Sample]()
        self.total = _Sample()

    @property
    def is_full(self) -> bool:
        return self.total.busy_ns >= SLOW_AFTER_S * 1e9

    @property
    def ends(self) -> tuple[_Sample, _Sample]:
        return self._samples[0], self._samples[-1]

    def add(self, sample: _Sample) -> list[_Sample]:
        """Take a sample; return those that are the past now."""
        self.total.change(sample)
        if self._samples and self._samples[-1].busy_ns < SAMPLE_S_MIN * 1e9:
            self._samples[-1].change(sample)
        else:
            self._samples.append(sample)
        past: list[_Sample] = []
        while self.total.busy_ns - self._samples[0].busy_ns >= SLOW_AFTER_S * 1e9:
            past.append(self._samples.popleft())
            self.total.change(past[-1], -1)
        return past


class _Pace:
    """One device's speed at transfers of one kind."""

    def __init__(self, *, is_small: bool) -> None:
        self._is_small = is_small
        self._sum = _Average()
        """Small transfers that are not enough yet."""
        self._recent = _Average()
        self._present = _Present()
        self._past = _Average()
        self._deals_without = 0
        self._ended_s = math.inf
        self._is_tried_again = False
        self.slow_reason = ""

    @property
    def bytes_per_s(self) -> float | None:
        return self._recent.bytes_per_s

    @property
    def guess_bytes_per_s(self) -> float | None:
        """As `bytes_per_s`, else by what is not enough yet."""
        return self._recent.bytes_per_s or self._sum.bytes_per_s

    def dealt(self, now_s: float, peers: float, *, got_some: bool) -> None:
        self._deals_without = 0 if got_some else self._deals_without + 1
        if got_some or not self._is_due(now_s, peers):
            return
        self._recent, self._deals_without = _Average(), 0

    def _is_due(self, now_s: float, peers: float) -> bool:
        """Tell whether a device that gets nothing is to be measured anew.

        One that seemed slow gets so little to do that its ten seconds would never be full: it is asked once more when
        they are over, and whoever is slow at both ends of them is slow.
        """
        if not self.slow_reason and self._seems_slow(peers) and now_s - self._ended_s >= SLOW_AFTER_S:
            self._is_tried_again = True
            return True
        return self._deals_without >= FORGET_AFTER_DEALS

    def _seems_slow(self, peers: float) -> bool:
        return self.bytes_per_s is not None and self.bytes_per_s * SLOW_FACTOR < peers

    def add(self, moved_bytes: int, busy_s: float, ended_s: float, peers: float) -> SpeedChange | None:
        if self._is_small:
            self._sum.add(moved_bytes, busy_s, 1.0)
            if self._sum.moved_bytes < MEASURED_BYTES_MIN and self._sum.busy_s < SMALL_S_MIN:
                return None
            moved_bytes, busy_s, self._sum = round(self._sum.moved_bytes), self._sum.busy_s, _Average()
        self._ended_s = ended_s
        self._recent.add(moved_bytes, busy_s, min(math.exp(-busy_s / RECENT_S), TRANSFER_KEEP_MAX))
        left = self._present.add(_Sample(moved_bytes, round(busy_s * 1e9), round(peers * busy_s)))
        if self.slow_reason:
            return self._recovery(peers)
        was_tried_again, self._is_tried_again = self._is_tried_again, False
        if was_tried_again and self._seems_slow(peers):
            return self._is_slow(self._recent.bytes_per_s or 0.0, peers, "its peers")
        for sample in () if self._is_small else left:
            self._past.add(
                sample.moved_bytes, sample.busy_ns / 1e9, math.exp(-sample.busy_ns / 1e9 / HISTORY_S)
            )
        return self._slowness() if self._present.is_full else None

    def _slowness(self) -> SpeedChange | None:
        """Judge the present by the past and by its peers: as a whole, at its beginning and at its end.

        A pause that is shorter than the present has one of the two outside.
        """
        total, own = self._present.total, self._past.bytes_per_s or 0.0
        speed, peers = total.bytes_per_s, total.peers_bytes / total.busy_ns * 1e9
        reference, whose = (peers, "its peers") if peers > own else (own, "its own past")
        if max(each.bytes_per_s for each in (total, *self._present.ends)) * SLOW_FACTOR >= reference:
            return None
        return self._is_slow(speed, reference, whose)

    def _is_slow(self, speed: float, reference: float, whose: str) -> SpeedChange:
        self.slow_reason = (
            f"writes {_rate(speed)} MB/s, {whose} {_rate(reference)} MB/s; it gets fewer segments"
        )
        return SpeedChange.BECAME_SLOW

    def _recovery(self, peers: float) -> SpeedChange | None:
        """Judge what it does now: the present must be as slow again before it counts as slow again."""
        speed = self._recent.bytes_per_s
        assert speed is not None
        if speed * WELL_FACTOR < max(self._past.bytes_per_s or 0.0, peers):
            return None
        self.slow_reason = ""
        self._present = _Present()
        return SpeedChange.RECOVERED


def _rate(bytes_per_s: float) -> str:
    """Return it in MB/s, of a very slow device with a digit more."""
    return f"{bytes_per_s / 1e6:.0f}" if bytes_per_s >= 10e6 else f"{bytes_per_s / 1e6:.1f}"


class SpeedMeter:
    """One device's speed. `add` is told of each transfer that it has finished.

    Small transfers and others are measured apart: neither is a device slower than it was because a run of smaller
    states writes to it now, nor does it hide what it does with large ones.
    """

    def __init__(self) -> None:
        self._large, self._small = _Pace(is_small=False), _Pace(is_small=True)
        self._newest = self._large
        self._last_end_s = -math.inf

    def _pace(self, size_bytes: int) -> _Pace:
        return self._large if size_bytes >= MEASURED_BYTES_MIN else self._small

    @property
    def slow_reason(self) -> str:
        """Empty while it is not slow."""
        return self._large.slow_reason or self._small.slow_reason

    @property
    def bytes_per_s(self) -> float | None:
        """What it moves now; None before the first transfers that could be measured."""
        return self._newest.bytes_per_s

    def at(self, size_bytes: int) -> float | None:
        """Return what it moves in transfers of this size, perhaps by few of them; None: nobody knows."""
        return self._pace(size_bytes).guess_bytes_per_s

    def measured_at(self, size_bytes: int) -> float | None:
        """Return the same by enough of them; None: they were too few to call it slow."""
        return self._pace(size_bytes).bytes_per_s

    def dealt(
        self, size_bytes: int, now_s: float, peers_bytes_per_s: Sequence[float], *, got_some: bool
    ) -> None:
        """A deal of such segments was made: one that gets nothing for long is measured anew."""
        self._pace(size_bytes).dealt(now_s, _median(peers_bytes_per_s), got_some=got_some)

    def add(
        self, moved_bytes: int, busy_s: float, ended_s: float, peers_bytes_per_s: Sequence[float]
    ) -> SpeedChange | None:
        """Take a transfer that ended at `ended_s` (of any steady clock); return what it changed.

        The peers' speeds are those at transfers of this size.
        """
        if moved_bytes <= 0 or busy_s <= 0:
            return None
        # What it shared with the transfer before it was counted then.
        busy_s = max(min(busy_s, ended_s - self._last_end_s), BUSY_S_MIN)
        self._last_end_s = ended_s
        was_slow, pace = bool(self.slow_reason), self._pace(moved_bytes)
        change = pace.add(moved_bytes, busy_s, ended_s, _median(peers_bytes_per_s))
        if pace.bytes_per_s is not None:
            self._newest = pace
        return change if bool(self.slow_reason) != was_slow else None


def _median(speeds: Sequence[float]) -> float:
    return statistics.median(speeds) if speeds else 0.0


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

    def at(self, device_id: str, size_bytes: int) -> float | None:
        """Return the speed to deal segments of this size by; None: nobody knows.

        Small ones take their time by chance as much as by the drive: there all count as typical but those that are
        slow, so that drives of one kind get equal parts.
        """
        with self._lock:
            own = self._meters[device_id].at(size_bytes)
            if size_bytes >= MEASURED_BYTES_MIN:
                return own
            typical = _median([*self._peers(device_id, size_bytes), *([] if own is None else [own])])
            measured = self._meters[device_id].measured_at(size_bytes)
            return measured if measured is not None and measured * SLOW_FACTOR < typical else typical or None

    def dealt(self, counts: Mapping[str, int], size_bytes: int, now_s: float) -> None:
        """A deal gave each of these devices so many segments of about this size."""
        with self._lock:
            peers = {device_id: self._peers(device_id, size_bytes) for device_id in counts}
            for device_id, count in counts.items():
                self._meters[device_id].dealt(size_bytes, now_s, peers[device_id], got_some=count > 0)

    def measured(self, device_id: str, moved_bytes: int, busy_s: float, ended_s: float) -> SpeedChange | None:
        """Take a transfer of a device that ended at `ended_s`; return what it changed."""
        with self._lock:
            peers = self._peers(device_id, moved_bytes)
            return self._meters[device_id].add(moved_bytes, busy_s, ended_s, peers)

    def _peers(self, device_id: str, size_bytes: int) -> list[float]:
        """Return what the others are known to move in such transfers."""
        return [
            speed
            for peer, meter in self._meters.items()
            if peer != device_id and (speed := meter.at(size_bytes)) is not None
        ]
