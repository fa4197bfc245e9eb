"""The steps of one loader's loop, from the moments at which the loop asks for batches and gets them.

A step begins when the loop asks for its batch and ends when it asks for the next one: the wait, then the body. The
first steps of each epoch are not counted: workers start, queues fill with batches prepared while nobody took any.
"""

import math
from dataclasses import dataclass

STEPS_MIN = 4
"""Fewer say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much to measure."""

    steps: int
    warmup: int
    """Of each epoch, not counted."""
    seconds: float = math.inf
    """Enough even with fewer steps, once there are STEPS_MIN."""

    def __post_init__(self) -> None:
        """Refuse a budget that measures nothing."""
        assert self.steps >= STEPS_MIN
        assert self.warmup >= 0
        assert self.seconds > 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step, in seconds."""

    wait_s: float
    body_s: float


class Recorder:
    """Events in, steps out. Times are monotonic seconds."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.steps: list[Step] = []
        self.longest_epoch = 0
        """Batches that the loop got between two begins, at most."""
        self._in_epoch = 0
        self._asked_at: float | None = None
        self._handed_at: float | None = None
        self._measured_s = 0.0

    @property
    def enough(self) -> bool:
        """Whether the budget is used up."""
        count = len(self.steps)
        return count >= self.budget.steps or (count >= STEPS_MIN and self._measured_s >= self.budget.seconds)

    @property
    def usable(self) -> bool:
        """Whether there are enough steps to say anything."""
        return len(self.steps) >= STEPS_MIN

    @property
    def measuring(self) -> bool:
        """Whether the step that was last asked for counts."""
        return self._asked_at is not None and self._in_epoch >= self.budget.warmup

    @property
    def next_is_first(self) -> bool:
        """Whether the step that will be asked for next is the first of its epoch that counts."""
        begun = self._in_epoch + (self._handed_at is not None)
        return begun == self.budget.warmup

    def began(self) -> None:
        """Take note of a new iterator: the step under way, if any, is dropped."""
        self._in_epoch = 0
        self._asked_at = self._handed_at = None

    def asked(self, now_s: float) -> None:
        """Take note that the loop asks for a batch: the step before has ended."""
        self._end_step(now_s)
        self._asked_at = now_s

    def handed(self, now_s: float) -> None:
        """Take note that the loop gets the batch."""
        assert self._asked_at is not None, "handed out unasked"
        assert self._handed_at is None
        assert now_s >= self._asked_at
        self._handed_at = now_s
        self.longest_epoch = max(self.longest_epoch, self._in_epoch + 1)

    def ended(self) -> None:
        """Take note that there was no further batch: the wait for it belongs to no step."""
        self._asked_at = self._handed_at = None

    def _end_step(self, now_s: float) -> None:
        if self._asked_at is None or self._handed_at is None:
            return
        assert now_s >= self._handed_at
        if self._in_epoch >= self.budget.warmup and not self.enough:
            self.steps.append(Step(self._handed_at - self._asked_at, now_s - self._handed_at))
            self._measured_s += now_s - self._asked_at
        self._in_epoch += 1
        self._asked_at = self._handed_at = None


def warmup_for(*, workers: int, prefetched: int, epoch_batches: int | None) -> int:
    """Return how many steps not to count: as many as there may be batches prepared ahead, and a few.

    At most a third of the epoch, where its length is known.
    """
    steps = 3 + min(64, prefetched + workers)
    return steps if epoch_batches is None else max(1, min(steps, epoch_batches // 3))
