"""What checkpoints make the steps beside them slower, one sample from one checkpoint to the next. Pure.

The slow-down of steps is a difference of two noisy means. So it is taken within each cycle: its busy steps against its
quiet ones, which see the same neighbours and the same length of sequences. Long steps among them are a cost or pauses:
somebody else says which, and may have been wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .drift_machine import Block, DriftWindow, Spread
from .frequency_types import SlowerSteps


@dataclass(slots=True)
class Steps:
    """Some steps, by what is needed of them."""

    count: int = 0
    sum_s: float = 0.0

    def add(self, step_s: float) -> None:
        self.count += 1
        self.sum_s += step_s

    def beyond_s(self, step_s: float) -> float:
        """Return what they took longer than as many steps of `step_s`."""
        return self.sum_s - self.count * step_s


@dataclass(slots=True)
class Cycle:
    """The steps since the last checkpoint that was compared with quiet ones."""

    checkpoints: int = 0
    busy: Steps = field(default_factory=Steps)
    long: Steps = field(default_factory=Steps)
    """Busy ones that look like pauses."""
    long_after: Steps = field(default_factory=Steps)
    """The same of the first ones after the busy ones."""
    quiet: Steps = field(default_factory=Steps)

    @property
    def long_count(self) -> int:
        """All that look like pauses, or are a cost."""
        return self.long.count + self.long_after.count

    def slower_s(self, *, with_long: bool) -> float | None:
        """Return what each checkpoint made its steps longer than quiet ones; None where all busy ones were pauses."""
        step_s = self.quiet.sum_s / self.quiet.count
        slower_s = self.busy.beyond_s(step_s)
        if with_long:
            slower_s += self.long.beyond_s(step_s) + self.long_after.beyond_s(step_s)
        elif self.long.count:
            if not self.busy.count:
                return None
            slower_s *= 1 + self.long.count / self.busy.count  # a pause hides a busy step like the others
        return slower_s / self.checkpoints


class SlowDown:
    """The mean of what a checkpoint's steps take longer, with the long ones where they are a cost, and without them."""

    def __init__(self, remembered: Iterable[Block] = (), but_long: Iterable[Block] | None = None) -> None:
        """`remembered`: of earlier attempts; `but_long`: the same without the long steps that they counted, if any."""
        blocks = tuple(remembered)
        self._counted = DriftWindow(blocks)
        self._but_long = DriftWindow(blocks if but_long is None else but_long)
        """By what was said of long steps, and were they all pauses."""
        self._long_total_s = 0.0
        """What long steps made of `compared`."""
        self.counts_long = but_long is not None
        """Long steps were counted as a cost."""
        self.withdrawn = 0
        """How often that was withdrawn."""
        self.compared = SlowerSteps()
        """All cycles of this attempt together, however old."""

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation; None before the first cycle."""
        return self._counted.spread

    @property
    def blocks(self) -> list[Block]:
        """What the next attempt should remember."""
        return self._counted.blocks

    @property
    def blocks_but_long(self) -> list[Block]:
        """The same, were all long steps pauses."""
        return self._but_long.blocks

    def add(self, cycle: Cycle, *, with_long: bool) -> bool:
        """Take a cycle, and tell whether it showed that the past is over. `with_long`: its long steps are a cost."""
        but_long_s, slower_s = cycle.slower_s(with_long=False), cycle.slower_s(with_long=with_long)
        if but_long_s is not None:
            self._but_long.add(but_long_s)
        if slower_s is None:
            return False
        if with_long and cycle.long_count:
            self.counts_long = True
            self._long_total_s += (slower_s - (but_long_s or 0.0)) * cycle.checkpoints
        self.compared = SlowerSteps(
            steps=self.compared.steps + cycle.busy.count + cycle.long.count,
            total_s=self.compared.total_s + slower_s * cycle.checkpoints,
        )
        return self._counted.add(slower_s)

    def withdraw_long(self) -> None:
        """The long steps that were counted were pauses."""
        self._counted = DriftWindow(self._but_long.blocks)
        self.compared = replace(self.compared, total_s=self.compared.total_s - self._long_total_s)
        self._long_total_s, self.counts_long = 0.0, False
        self.withdrawn += 1
