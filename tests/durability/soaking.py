"""Several searches in turn, round after round, until a time is over: what `make soak` runs, and what it says."""

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from summary import Summary

TURN_MOST_S = 300.0
"""A search that is given more gets it in several rounds, each with another seed: all have had a turn early."""
SEED_STRIDE = 10_007
"""Between the seeds of two rounds: searches use the next few of what they are given."""
FOUND, CUT_OFF = 1, 130
"""Exit codes; 0 when all went on to their end and found nothing."""


@dataclass(frozen=True, slots=True)
class Search:
    """One search: its name, its part of the time, and the call that runs it for (seconds, seed)."""

    name: str
    share: float
    run: Callable[[float, int], Summary]
    is_one_turn: bool = False
    """It has all of its time in the first round: what it looks for takes long to show."""


@dataclass(slots=True)
class Progress:
    """What one search has done in its turns."""

    search: Search
    summary: Summary | None = None
    """None: it has had no turn."""
    taken_s: float = 0.0
    cut_off_s: float | None = None
    """Seconds of a turn that was cut off, of which nothing is counted."""

    def turn(self, seconds: float, seed: int) -> Summary:
        """Run it once more and return what that turn found; a search that breaks has found something, too."""
        started_s = time.monotonic()
        try:
            found = self.search.run(seconds, seed)
        except Exception:  # noqa: BLE001 - reported as a finding
            found = Summary(
                what=self.search.name, count=0, failures=(f"it broke: {traceback.format_exc()}",), seed=seed
            )
        except KeyboardInterrupt:
            self.cut_off_s = time.monotonic() - started_s
            raise
        self.taken_s += time.monotonic() - started_s
        self.summary = found if self.summary is None else self.summary.and_then(found)
        return found


class Soak:
    """These searches, for so long in all."""

    def __init__(self, searches: Sequence[Search], duration_s: float, seed: int) -> None:
        self.progress = [Progress(search) for search in searches]
        self.seed = seed
        whole = sum(search.share for search in searches)
        self._each_s = [duration_s * search.share / whole for search in searches]
        shared_s = [
            each for search, each in zip(searches, self._each_s, strict=True) if not search.is_one_turn
        ]
        self.rounds = max(1, math.ceil(max(shared_s, default=0.0) / TURN_MOST_S))

    def run(self, say: Callable[[str], object]) -> int:
        """Run all and return the exit code; when a turn ends, what it found is said. An interrupt ends it early."""
        try:
            for number in range(self.rounds):
                for progress, seconds in zip(self.progress, self._each_s, strict=True):
                    if progress.search.is_one_turn and number > 0:
                        continue
                    turns = 1 if progress.search.is_one_turn else self.rounds
                    seed = self.seed + number * SEED_STRIDE
                    found = progress.turn(seconds / turns, seed)
                    say(f"{progress.search.name}: {found}")
                    for failure in found.failures:
                        say(f"{progress.search.name}: {failure}")
        except KeyboardInterrupt:
            return FOUND if self.failures() else CUT_OFF
        return FOUND if self.failures() else 0

    def failures(self) -> list[str]:
        """Return everything that was found, each with the name of its search."""
        return [
            f"{each.search.name}: {failure}"
            for each in self.progress
            if each.summary is not None
            for failure in each.summary.failures
        ]

    def unfinished(self) -> list[str]:
        """Return a sentence for each search that was cut off or has had no turn."""
        found = [
            f"{each.search.name}: cut off after {each.cut_off_s:.0f} s of a turn, which counts for nothing"
            for each in self.progress
            if each.cut_off_s is not None
        ]
        unbegun = [each for each in self.progress if each.summary is None and each.cut_off_s is None]
        return [*found, *(f"{each.search.name}: not begun" for each in unbegun)]
