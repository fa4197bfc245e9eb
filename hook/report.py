"""What checkpointing cost this run, measured, and what went wrong: nothing is hidden from the training loop."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

STEPS_KEPT = 2000
"""Step times kept per kind: enough for a steady median, 16 KiB each."""

FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole cost so far. Times in seconds, sums over this process unless a name says otherwise."""

    steps: int
    """Boundaries passed by this process."""
    checkpoints_sealed: int
    checkpoints_complete: int
    """Committed on every rank."""
    last_complete: str
    """`<attempt>.<step>` of the newest one, empty before the first."""
    skipped: dict[str, int]
    """Reason -> how many due checkpoints were not taken."""
    failures: tuple[str, ...]
    """Newest last."""
    eager_s: float
    """At boundaries: the state was walked, and what may change at once copied."""
    largest_eager_leaf: str
    eager_bytes: int
    """Of the newest snapshot."""
    guard_s: float
    """Optimizers waited for the copy to end."""
    wait_s: float
    """At boundaries: waiting for other ranks' decision."""
    copy_s: float
    """Beside training: the copy thread's work."""
    step_quiet_s: float
    """Median step without a copy or write beside it; 0 while unknown."""
    step_busy_s: float
    """Median step with one beside it."""
    slower_steps_s: float
    """(busy - quiet) median x number of busy steps: what the work beside training cost."""
    train_s: float
    """Between the first and the last boundary."""

    @property
    def stall_s(self) -> float:
        """Seconds that the training loop stood still for checkpoints."""
        return self.eager_s + self.guard_s + self.wait_s

    @property
    def stall_per_checkpoint_s(self) -> float:
        """Mean stall of one sealed checkpoint."""
        return self.stall_s / self.checkpoints_sealed if self.checkpoints_sealed else 0.0

    @property
    def slowdown(self) -> float:
        """The whole cost as a share of the time without it; the budget bounds this."""
        cost_s = self.stall_s + max(self.slower_steps_s, 0.0)
        return cost_s / (self.train_s - cost_s) if self.train_s > cost_s else 0.0


@dataclass(slots=True)
class CostBook:
    """Collects what a Report shows. Written by the training thread and, for single counters, by the hook's threads."""

    steps: int = 0
    sealed: int = 0
    complete: int = 0
    last_complete: str = ""
    skipped: Counter[str] = field(default_factory=Counter[str])
    failures: deque[str] = field(default_factory=lambda: deque[str](maxlen=FAILURES_KEPT))
    eager_s: float = 0.0
    eager_bytes: int = 0
    largest_eager_leaf: str = ""
    guard_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    train_s: float = 0.0
    _quiet: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_KEPT))
    _busy: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_KEPT))
    _busy_count: int = 0
    _previous_s: float | None = None

    def boundary(self, arrived_s: float, left_s: float, *, busy: bool, guard_s: float) -> None:
        """A boundary was passed: the step before it took from the last one until `arrived_s`, less the guard's wait."""
        if self._previous_s is not None:
            step_s = arrived_s - self._previous_s - guard_s
            (self._busy if busy else self._quiet).append(step_s)
            self._busy_count += busy
            self.train_s += left_s - self._previous_s
        self.steps += 1
        self._previous_s = left_s

    def report(self) -> Report:
        """Return the figures as they are now."""
        quiet = statistics.median(self._quiet) if self._quiet else 0.0
        busy = statistics.median(self._busy) if self._busy else 0.0
        known = bool(self._quiet and self._busy)
        return Report(
            steps=self.steps,
            checkpoints_sealed=self.sealed,
            checkpoints_complete=self.complete,
            last_complete=self.last_complete,
            skipped=dict(self.skipped),
            failures=tuple(self.failures),
            eager_s=self.eager_s,
            largest_eager_leaf=self.largest_eager_leaf,
            eager_bytes=self.eager_bytes,
            guard_s=self.guard_s,
            wait_s=self.wait_s,
            copy_s=self.copy_s,
            step_quiet_s=quiet,
            step_busy_s=busy,
            slower_steps_s=(busy - quiet) * self._busy_count if known else 0.0,
            train_s=self.train_s,
        )
