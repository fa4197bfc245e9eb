"""The mean of what each checkpoint costs, without what is paid for once. Pure.

The first copy touches memory, starts CUDA, fills caches of the file system: seconds, and never again in this process.
Later a process may be stopped for a while, or a drive hang: what has passed is no reason to take checkpoints rarely.
"""

import math
from collections.abc import Iterable

from .drift_machine import Block, DriftWindow, Spread

FIRSTS = 3
"""Samples of an attempt that may show that those before them paid for what is done once: each slot is touched anew."""
ONCE_SHARE = 0.5
"""They show it when they are below this share of all of them."""
EXCEPTION, TAIL = 10, 8
"""One above so many times the mean and so many deviations waits until there is a second one like it,"""
LIGHT = 0.5
"""or until so many are known that it raises their mean by less than this share."""


class CostWindow:
    """A DriftWindow whose first samples of this attempt are forgotten as soon as another one of them is far cheaper.

    A single exception does not count until then.
    """

    __slots__ = (
        "_firsts",
        "_is_newest",
        "_remembered",
        "_remembered_waiting",
        "_seen",
        "_waiting",
        "_window",
    )

    def __init__(self, remembered: Iterable[Block] = (), waiting: Iterable[float] = ()) -> None:
        """`remembered`: of earlier attempts; it goes on to count when this attempt's first samples do not.

        `waiting`: theirs.
        """
        self._remembered, self._remembered_waiting = tuple(remembered), tuple(waiting)
        self._window = DriftWindow(self._remembered)
        self._firsts: list[float] = []
        """Those of this attempt's first samples that count."""
        self._seen = 0
        self._waiting = [*self._remembered_waiting]
        """One exception: samples in a row, of what it befell at once."""
        self._is_newest = False
        """No sample came after it."""

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation; None before the first sample."""
        return self._window.spread

    @property
    def blocks(self) -> list[Block]:
        """What the next attempt should remember."""
        return self._window.blocks

    @property
    def waiting(self) -> tuple[float, ...]:
        """The same: an exception that waits for a second one."""
        return tuple(self._waiting)

    def add(self, value: float, *, at_once: int = 1) -> bool:
        """Take a sample; tell whether it showed that the past is over.

        `at_once`: so many in a row may be of one time, and one exception.
        """
        if self._seen < FIRSTS:
            self._seen += 1
            if self._firsts and value < ONCE_SHARE * min(self._firsts):
                self._window = DriftWindow(self._remembered)
                self._firsts.clear()
                self._waiting = [*self._remembered_waiting]
            self._firsts.append(value)
        was_newest, self._is_newest = self._is_newest, False
        if not self._is_exception(value):
            was_over = self._window.add(value)
            if was_over:
                self._waiting.clear()
            elif self._waiting and self._is_light(sum(self._waiting)):
                self._count_waiting()
            return was_over
        if self._waits(value, was_newest=was_newest, at_once=at_once):
            return False
        if max(self._waiting) > EXCEPTION * value:
            return self._window.add(value)
        if not was_newest:
            self._count_waiting()
            return self._window.add(value)
        in_a_row, self._waiting = [*self._waiting, value], []
        was_over = [self._window.add(each) for each in in_a_row]
        return any(was_over)

    def _waits(self, value: float, *, was_newest: bool, at_once: int) -> bool:
        """Let an exception wait, if it is the first one, far above that, or of the same time; tell if it does."""
        if value > EXCEPTION * max(self._waiting, default=0.0):
            self._count_waiting()
        elif not was_newest or len(self._waiting) >= at_once:
            return False
        self._waiting.append(value)
        self._is_newest = True
        return True

    def _count_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for value in waiting:
            self._window.add_to_past(value)

    def _is_exception(self, value: float) -> bool:
        """Tell whether it lies far above all others.

        None of n samples exceeds their mean by more than (n - 1) / sqrt(n) of their deviations (Samuelson 1968).
        """
        known = self._window.spread
        if known is None:
            return False
        tail = min(TAIL, (known.count - 1) / math.sqrt(known.count))
        return value > EXCEPTION * (known.mean + tail * known.deviation)

    def _is_light(self, added: float) -> bool:
        known = self._window.spread
        return known is not None and added <= LIGHT * known.count * known.mean
