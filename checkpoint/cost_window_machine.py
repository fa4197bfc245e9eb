"""The mean of what each checkpoint costs, without what an attempt's first ones pay for once. Pure.

The first copy touches memory, starts CUDA, fills caches of the file system: seconds, and never again in this process.
"""

from collections.abc import Iterable

from .drift_machine import Block, DriftWindow, Spread

FIRSTS = 3
"""Samples of an attempt that may show that those before them paid for what is done once: each slot is touched anew."""
ONCE_SHARE = 0.5
"""They show it when they are below this share of all of them."""


class CostWindow:
    """A DriftWindow whose first samples of this attempt are forgotten as soon as another one of them is far cheaper."""

    __slots__ = ("_firsts", "_remembered", "_seen", "_window")

    def __init__(self, remembered: Iterable[Block] = ()) -> None:
        """`remembered`: of earlier attempts; it goes on to count when this attempt's first samples do not."""
        self._remembered = tuple(remembered)
        self._window = DriftWindow(self._remembered)
        self._firsts: list[float] = []
        """Those of this attempt's first samples that count."""
        self._seen = 0

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation; None before the first sample."""
        return self._window.spread

    @property
    def blocks(self) -> list[Block]:
        """What the next attempt should remember."""
        return self._window.blocks

    def add(self, value: float) -> bool:
        """Take a sample; tell whether it showed that the past is over."""
        if self._seen < FIRSTS:
            self._seen += 1
            if self._firsts and value < ONCE_SHARE * min(self._firsts):
                self._window = DriftWindow(self._remembered)
                self._firsts.clear()
            self._firsts.append(value)
        return self._window.add(value)
