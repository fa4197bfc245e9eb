"""Which of the daemon's lanes stand still: they have work, and none of it has ended for too long. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """How far a lane is: a device's queue, or anything else that works off pieces."""

    waiting: int
    """Pieces that are queued or being moved."""
    ended: int
    """Pieces that have ended so far, well or not."""


class WatchdogMachine:
    """Looks at the lanes from time to time."""

    def __init__(self, patience_s: float) -> None:
        """A lane that has work stands still when none of it has ended for so long."""
        self._patience_s = patience_s
        self._moved: dict[str, tuple[int, float]] = {}

    def look(self, now_s: float, lanes: Mapping[str, Lane]) -> list[str]:
        """Return the names of the lanes that stand still; `now_s` never goes back."""
        moved: dict[str, tuple[int, float]] = {}
        for name, lane in lanes.items():
            known = self._moved.get(name)
            stays = known is not None and lane.waiting > 0 and known[0] == lane.ended
            moved[name] = known if known is not None and stays else (lane.ended, now_s)
        self._moved = moved
        return sorted(name for name, (_, since_s) in moved.items() if now_s - since_s > self._patience_s)
