"""Ranges of addresses, each byte once: does another have memory in common with them? (pure)"""

from bisect import bisect_right
from collections.abc import Iterable


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
