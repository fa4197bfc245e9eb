"""Which ranks have not been heard for too long. Pure.

Each rank changes its beat in the Store every `BEAT_S`; who watches compares what it reads with what it read before, by
its own clock. Time in which the watcher did not look, since it was stopped itself, accuses nobody.
"""

from collections.abc import Iterable, Mapping

BEAT_S = 2.0
"""How often a rank beats, and looks at those that it watches."""
_LOOK_COUNTS_S = 2 * BEAT_S
"""More than that between two looks was the watcher's own pause."""
_BEATS_AFTER_GONE = 2
"""Of those after a rank is said to be gone, the first may have been made before."""


class Silence:
    """What one rank has heard of those that it watches."""

    def __init__(self, ranks: Iterable[int], *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._beats: dict[int, int] = {}
        self._looked_s: float | None = None
        self._gone: dict[int, int] = {}
        """Ranks that are said to be gone, and how many more beats say that they are not."""

    @property
    def watched(self) -> list[int]:
        """The ranks whose beats are to be looked at."""
        return sorted(self._silent_s)

    def gone(self, rank: int) -> None:
        """Somebody who knows says that a rank has died or let go of its daemon."""
        self._silent_s.setdefault(rank, 0.0)
        self._gone[rank] = _BEATS_AFTER_GONE

    def looked(self, beats: Mapping[int, int], now_s: float) -> None:
        """Take what is found of the watched ranks; one that never beat is missing."""
        since_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _LOOK_COUNTS_S)
        self._looked_s = now_s
        for rank in self._silent_s:
            beat = beats.get(rank)
            if beat is None or beat == self._beats.get(rank):
                self._silent_s[rank] += since_s
                continue
            self._beats[rank], self._silent_s[rank] = beat, 0.0
            if rank in self._gone:
                self._gone[rank] -= 1
                if not self._gone[rank]:
                    del self._gone[rank]

    @property
    def silent(self) -> list[int]:
        """The ranks that are gone, or have not been heard within the deadline."""
        late = {rank for rank, silent_s in self._silent_s.items() if silent_s >= self._deadline_s}
        return sorted(late | self._gone.keys())


class Standstill:
    """Whether somebody's turns stand still, watched by who may have been stopped himself, and with him the other."""

    def __init__(self) -> None:
        self._turn_s = 0.0
        self._late: tuple[float, float] | None = None
        """Which turn was found to be long ago, and when."""

    def turned(self, now_s: float) -> None:
        """The watched one begins a turn; from any thread."""
        self._turn_s = now_s

    def stands_s(self, now_s: float, *, deadline_s: float, resumed_s: float) -> float:
        """Return how long the turn takes, if that is beyond the deadline; else 0.

        Also 0 until it was seen so for `resumed_s`: who goes on together needs that to turn.
        """
        turn_s = self._turn_s
        if now_s - turn_s <= deadline_s:
            self._late = None
        elif self._late is None or self._late[0] != turn_s:
            self._late = turn_s, now_s
        elif now_s - self._late[1] > resumed_s:
            return now_s - turn_s
        return 0.0
