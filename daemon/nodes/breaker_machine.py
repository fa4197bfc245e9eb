"""When a peer that did not serve is asked again. Pure: times are given.

A reader pays for a peer that is dead or slow with one deadline: the first failure opens the breaker, and from then on
no reader's samples are asked of the peer. Whether it is well again is found out beside the readers' work (`probe`),
ever more rarely. A peer that answers probes and then fails again costs another deadline; so the pause goes back to its
least only after the peer has served for as long as the last pause was.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0


class State(Enum):
    """Whether a peer is asked."""

    CLOSED = "closed"
    """It is."""
    OPEN = "open"
    """It is left alone until the pause ends."""
    PROBING = "probing"
    """Somebody looks whether it answers again."""


@dataclass(slots=True, kw_only=True)
class Breaker:
    """One peer's. Events that come late, of calls that began before the last change, change nothing."""

    state: State = State.CLOSED
    pause_s: float = 0.0
    """The last pause, or the one that lasts; 0: there has been none."""
    until_s: float = 0.0
    """When the pause ends, or has ended."""
    closed_s: float = 0.0
    """When it was closed last."""

    @property
    def allows(self) -> bool:
        """Tell whether readers' samples may be asked of the peer."""
        return self.state is State.CLOSED

    def failed(self, now_s: float) -> bool:
        """A call failed or took too long; tell whether this opened it."""
        if self.state is State.OPEN:
            return False
        has_held = self.state is State.CLOSED and now_s - self.closed_s >= self.pause_s
        self.pause_s = PAUSE_S if has_held or not self.pause_s else min(2 * self.pause_s, PAUSE_MAX_S)
        self.state, self.until_s = State.OPEN, now_s + self.pause_s
        return True

    def probe(self, now_s: float) -> bool:
        """Tell whether somebody is to look now whether the peer answers: one at a time."""
        if self.state is not State.OPEN or now_s < self.until_s:
            return False
        self.state = State.PROBING
        return True

    def answered(self, now_s: float) -> None:
        """A probe was answered."""
        if self.state is State.PROBING:
            self.state, self.closed_s = State.CLOSED, now_s
