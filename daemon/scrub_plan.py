"""When a store is scrubbed, where a scrub goes on that was cut off, and how fast: pure."""

from dataclasses import dataclass, replace

from ..checkpoint.store_format import ScrubMark, ScrubPlace

_PHASES = 1 << 128


def scrub_period(now_unix_s: float, every_s: float, store_id: str) -> int:
    """Return the number of the period in which this moment lies: a scrub begins when a new one begins.

    Periods have fixed ends, by the clock and the store's id: a restart does not put the next scrub off, and the nodes
    of a cluster do not all read at once.
    """
    return int((now_unix_s - _phase_s(every_s, store_id)) // every_s)


def period_begin_unix_s(period: int, every_s: float, store_id: str) -> float:
    """Return when a period begins."""
    return period * every_s + _phase_s(every_s, store_id)


def is_due(mark: ScrubMark | None, now_unix_s: float, every_s: float, store_id: str) -> bool:
    """Tell whether something is to be read: a scrub was cut off, or none has begun in this period and ended.

    So it does not matter when in a period, how often or for how long the store is open.
    """
    if mark is None or mark.ended_unix_s is None:
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
