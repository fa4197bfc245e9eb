"""What checkpointing cost this run, measured, and what went wrong: nothing is hidden from the training loop."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from ..core.ids import CheckpointId

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
    notes: tuple[str, ...]
    """What happened to devices and to writes that were repeated, newest last."""
    boundary_s: float
    """All that `run.step()` took; `eager_s` and `wait_s` are its large parts."""
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
    quiet_steps: int
    """Steps without anything beside them."""
    busy_steps: int
    """Steps beside which, at any time, an arena was allocated or a snapshot copied or written."""
    step_quiet_s: float
    """Median quiet step; 0 while there was none, and then nobody knows how much slower the busy ones are."""
    step_busy_s: float
    """Median busy step."""
    slower_steps_s: float
    """(busy - quiet) median x number of busy steps: what the work beside training cost; 0 while one is unknown."""
    train_s: float
    """From the first boundary to the end of the last."""

    @property
    def stall_s(self) -> float:
        """Seconds that the training loop stood still for checkpoints."""
        return self.boundary_s + self.guard_s

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
    newest_complete: CheckpointId | None = None
    skipped: Counter[str] = field(default_factory=Counter[str])
    failures: deque[str] = field(default_factory=lambda: deque[str](maxlen=FAILURES_KEPT))
    notes: deque[str] = field(default_factory=lambda: deque[str](maxlen=FAILURES_KEPT))
    eager_s: float = 0.0
    eager_bytes: int = 0
    largest_eager_leaf: str = ""
    guard_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    train_s: float = 0.0
    boundary_s: float = 0.0
    _quiet: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_KEPT))
    _busy: deque[float] = field(default_factory=lambda: deque[float](maxlen=STEPS_KEPT))
    _quiet_count: int = 0
    _busy_count: int = 0
    _left_s: float | None = None
    _opened_busy: bool = False

    def boundary(self, arrived_s: float, left_s: float, *, opens_busy: bool, guard_s: float) -> None:
        """A boundary was passed: the step that it ends took from the last one until `arrived_s`, less the guard's wait.

        `opens_busy`: as it is left, something runs beside training. Only boundaries begin such work, so a step that
        opens without any has none in it, and one that opens with some is busy however soon that ends.
        """
        if self._left_s is not None:
            step_s = arrived_s - self._left_s - guard_s
            (self._busy if self._opened_busy else self._quiet).append(step_s)
            self._busy_count += self._opened_busy
            self._quiet_count += not self._opened_busy
        self.train_s += left_s - (arrived_s if self._left_s is None else self._left_s)
        self.boundary_s += left_s - arrived_s
        self.steps += 1
        self._left_s, self._opened_busy = left_s, opens_busy

    def completed(self, checkpoint: CheckpointId) -> None:
        """Every rank has committed a checkpoint; several are under way at once, and any of them may end first."""
        self.complete += 1
        self.newest_complete = max(checkpoint, self.newest_complete or checkpoint)

    def report(self) -> Report:
        """Return the figures as they are now."""
        quiet = statistics.median(self._quiet) if self._quiet else 0.0
        busy = statistics.median(self._busy) if self._busy else 0.0
        known = bool(self._quiet and self._busy)
        return Report(
            steps=self.steps,
            checkpoints_sealed=self.sealed,
            checkpoints_complete=self.complete,
            last_complete=str(self.newest_complete or ""),
            skipped=dict(self.skipped),
            failures=tuple(self.failures),
            notes=tuple(self.notes),
            boundary_s=self.boundary_s,
            eager_s=self.eager_s,
            largest_eager_leaf=self.largest_eager_leaf,
            eager_bytes=self.eager_bytes,
            guard_s=self.guard_s,
            wait_s=self.wait_s,
            copy_s=self.copy_s,
            quiet_steps=self._quiet_count,
            busy_steps=self._busy_count,
            step_quiet_s=quiet,
            step_busy_s=busy,
            slower_steps_s=(busy - quiet) * self._busy_count if known else 0.0,
            train_s=self.train_s,
        )
