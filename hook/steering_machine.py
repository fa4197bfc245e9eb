"""What operators ask of a run's controller, as it reaches the ranks on several ways. Pure.

Each wish carries the time at which it was asked, so that the newest one holds wherever it comes from: a rank's own
daemon, or another rank, whose daemon is on another node. Rank 0 decides by it, and its plans tell all others.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """All that was asked so far; times in seconds since 1970-01-01 UTC, 0: never."""

    budget: float | None = None
    """Share of the time that training takes without checkpoints; None: what attach() says."""
    budget_asked_unix_s: float = 0.0
    paused_until_unix_s: float = 0.0
    """No checkpoint that only the controller wants is taken before."""
    pause_asked_unix_s: float = 0.0

    def with_newer(self, other: "Steering") -> "Steering":
        """Return what holds of both: of each wish the one that was asked last."""
        budget = max(self, other, key=lambda each: (each.budget_asked_unix_s, each.budget or 0.0))
        pause = max(self, other, key=lambda each: (each.pause_asked_unix_s, each.paused_until_unix_s))
        return Steering(
            budget=budget.budget,
            budget_asked_unix_s=budget.budget_asked_unix_s,
            paused_until_unix_s=pause.paused_until_unix_s,
            pause_asked_unix_s=pause.pause_asked_unix_s,
        )

    def is_paused(self, now_unix_s: float) -> bool:
        """Tell whether the controller takes no checkpoint now."""
        return now_unix_s < self.paused_until_unix_s
