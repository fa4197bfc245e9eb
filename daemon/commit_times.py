"""How long a rank has been without a new committed shard. Pure: the caller brings the time."""

from dataclasses import dataclass


@dataclass(slots=True)
class CommitTimes:
    """Moments of one clock, in seconds."""

    since_s: float | None = None
    """The newest commit, or when its trainer attached if that is later; None: nobody has attached."""
    interval_s: float | None = None
    """Between its two newest commits of one attachment; None: there were not two."""
    _has_committed: bool = False

    def attached(self, now_s: float) -> None:
        """A trainer has taken the rank: nothing is expected of it before it had time for a checkpoint."""
        self.since_s, self.interval_s, self._has_committed = now_s, None, False

    def committed(self, now_s: float) -> None:
        """A shard is durable."""
        if self._has_committed and self.since_s is not None:
            self.interval_s = now_s - self.since_s
        self.since_s, self._has_committed = now_s, True

    def age_s(self, now_s: float) -> float:
        """Return how long nothing has been committed; 0 where nobody has attached."""
        return 0.0 if self.since_s is None else max(0.0, now_s - self.since_s)
