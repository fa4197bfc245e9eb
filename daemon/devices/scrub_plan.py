"""When a newest checkpoint is read, when a store is scrubbed and where a scrub goes on that was cut off, and how fast:
pure.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...checkpoint.store_format import ScrubMark, ScrubPlace

_PHASES = 1 << 128

GIVE_WAY_S_MAX = 30.0
"""How long a chunk waits at most for persists and restores."""


NEWEST_WITHIN_S = 3600.0
"""So long after its commit the newest checkpoint of a run has been read, as far as the share of a drive allows."""
NEWEST_EVERY_S = NEWEST_WITHIN_S / 2
"""Runs that save every minute have one read so often; the rest of the hour is for the reading."""


def is_newest_due(began_unix_s: float | None, now_unix_s: float) -> bool:
    """Tell whether the newest checkpoint of a run is to be read, if it was not; `began_unix_s`: the last such reading.

    What is unread was committed after that reading began, so that half of its hour is left at least. A clock that was
    set back puts nothing off.
    """
    return began_unix_s is None or not 0 <= now_unix_s - began_unix_s < NEWEST_EVERY_S


def scrub_period(now_unix_s: float, every_s: float, store_id: str) -> int:
    """Return the number of the period in which this moment lies: a scrub begins when a new one begins.

    Periods have fixed ends, by the clock and the store's id: a restart does not put the next scrub off, and the nodes
    of a cluster do not all read at once.
    """
    return int((now_unix_s - _phase_s(every_s, store_id)) // every_s)


def period_begin_unix_s(period: int, every_s: float, store_id: str) -> float:
    """Return when a period begins."""
    return period * every_s + _phase_s(every_s, store_id)


def first_mark(now_unix_s: float, store_id: str) -> ScrubMark:
    """Return the mark of a store that has none: its first scrub comes with the next period.

    Else all nodes of a cluster would read at once when they first start.
    """
    return ScrubMark(store_id=store_id, started_unix_s=now_unix_s, ended_unix_s=now_unix_s)


def is_due(mark: ScrubMark, now_unix_s: float, every_s: float, store_id: str) -> bool:
    """Tell whether something is to be read: a scrub was cut off, or none has begun in this period and ended.

    So it does not matter when in a period, how often or for how long the store is open.
    """
    if mark.ended_unix_s is None:
        return True
    return scrub_period(mark.started_unix_s, every_s, store_id) != scrub_period(now_unix_s, every_s, store_id)


def is_behind(mark: ScrubMark, place: ScrubPlace) -> bool:
    """Tell whether a scrub has passed a checkpoint: it is read by the next one."""
    return mark.place is not None and place.order <= mark.place.order


def _phase_s(every_s: float, store_id: str) -> float:
    return int(store_id, 16) / _PHASES * every_s


def rest_s(busy_s: float, share: float) -> float:
    """Return how long a device that was read for `busy_s` is left to others, so that `share` of its speed is used.

    A token bucket that is filled at `share` of the speed just measured and holds one transfer. 0 < share <= 1.
    """
    return busy_s * (1.0 / share - 1.0)


def patience_s(size_bytes: int, left_bytes: int, left_s: float | None, own_s: float) -> float:
    """Return how long a chunk may wait for persists and restores, so that what is left is read in time all the same.

    Each chunk gets its part of the time that is left, less what it takes itself with its rest; `left_s` is None where
    nothing says when. A store that is written without a pause is read in each period, too, as far as the share allows.
    """
    if left_s is None:
        return GIVE_WAY_S_MAX
    part_s = left_s * size_bytes / max(left_bytes, size_bytes, 1)
    return min(max(part_s - own_s, 0.0), GIVE_WAY_S_MAX)


def late_s(left_bytes: int, s_per_byte: float, left_s: float | None) -> float:
    """Return how much later than promised a device is read even if it waits for nobody; 0 when it is in time."""
    return 0.0 if left_s is None else max(left_bytes * s_per_byte - max(left_s, 0.0), 0.0)


@dataclass(slots=True)
class _Own:
    """What a device has read of the checkpoint that is being read, and how fast."""

    moved_bytes: int = 0
    s_per_byte: float = 0.0


class ScrubPace:
    """How far a scrub is, by the bytes of each device, and how long a chunk may wait.

    Each device's numbers are changed by its own thread only, the rest between two checkpoints.
    """

    def __init__(self, planned: Sequence[Mapping[str, int]], due_unix_s: float | None) -> None:
        """`planned`: bytes of each checkpoint by device, in the order in which they are read."""
        self.due_unix_s = due_unix_s
        self._planned = deque(planned)
        self._left = Counter[str]()
        for bytes_of in planned:
            self._left.update(bytes_of)
        self._own = defaultdict[str, _Own](_Own)

    def patience_s(self, device_id: str, size_bytes: int, now_unix_s: float) -> float:
        """Return how long the next chunk of a device may wait."""
        own_s = self._own[device_id].s_per_byte * size_bytes
        return patience_s(size_bytes, self._left_bytes(device_id), self._left_s(now_unix_s), own_s)

    def moved(self, device_id: str, size_bytes: int, took_s: float) -> None:
        """A chunk was read, with the rest after it."""
        own = self._own[device_id]
        own.moved_bytes += size_bytes
        if size_bytes:
            new = took_s / size_bytes
            own.s_per_byte = new if not own.s_per_byte else 0.9 * own.s_per_byte + 0.1 * new

    def passed(self) -> None:
        """The next checkpoint is behind, read or not."""
        self._left.subtract(self._planned.popleft())
        for own in self._own.values():
            own.moved_bytes = 0

    def late_s(self, now_unix_s: float) -> float:
        """Return how much too late the slowest device ends, at its share; 0 when all are in time."""
        left_s = self._left_s(now_unix_s)
        return max(
            (late_s(self._left_bytes(key), own.s_per_byte, left_s) for key, own in list(self._own.items())),
            default=0.0,
        )

    def _left_bytes(self, device_id: str) -> int:
        return max(self._left[device_id] - self._own[device_id].moved_bytes, 0)

    def _left_s(self, now_unix_s: float) -> float | None:
        return None if self.due_unix_s is None else self.due_unix_s - now_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrub:
    """One scrub of a store: what it has read so far. A value; each method returns the next one."""

    started_unix_s: float
    planned_count: int
    """Checkpoints to read when it began; retention may remove some meanwhile."""
    ended_unix_s: float | None = None
    checkpoint_count: int = 0
    """Read so far."""
    size_bytes: int = 0
    """Of the segments of these."""
    damaged: tuple[str, ...] = ()
    """`<run>@<attempt>.<step>` of those that are not what was committed."""

    def read(self, title: str, size_bytes: int, *, is_intact: bool) -> "Scrub":
        """A checkpoint was read."""
        return replace(
            self,
            checkpoint_count=self.checkpoint_count + 1,
            size_bytes=self.size_bytes + size_bytes,
            damaged=self.damaged if is_intact else (*self.damaged, title),
        )

    def ended(self, now_unix_s: float) -> "Scrub":
        """All were read."""
        return replace(self, ended_unix_s=now_unix_s)
