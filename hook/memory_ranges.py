"""Ranges of addresses: does another have memory in common with them, and with which? (pure)"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Generic, TypeVar

T = TypeVar("T")


class Ranges:
    """Addresses of memory, each once."""

    def __init__(self, reaches: Iterable[tuple[int, int]]) -> None:
        """Take pairs of the first byte's address and that behind the last one; they may overlap, or be empty."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(reaches):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif begin < end:
                self._begins.append(begin)
                self._ends.append(end)

    def touch(self, reach: tuple[int, int]) -> bool:
        """Tell whether a range has memory in common with these."""
        begin, end = reach
        after = bisect_right(self._ends, begin)
        return begin < end and after < len(self._begins) and self._begins[after] < end


class RangeMap(Generic[T]):
    """What lies at ranges of addresses, which may overlap."""

    def __init__(self, items: Iterable[tuple[tuple[int, int], T]]) -> None:
        """Take each with its range: the first byte's address and that behind the last one; empty ones touch nothing."""
        self._items = sorted((item for item in items if item[0][0] < item[0][1]), key=lambda item: item[0])
        self._begins = [begin for (begin, _), _ in self._items]
        self._ends = list(accumulate((end for (_, end), _ in self._items), max))
        """The largest of all so far, so that they are sorted, too."""

    def touching(self, reach: tuple[int, int]) -> list[T]:
        """Return what has memory in common with a range, by address."""
        begin, end = reach
        if begin >= end:
            return []
        near = self._items[bisect_right(self._ends, begin) : bisect_left(self._begins, end)]
        return [item for (_, until), item in near if begin < until]
