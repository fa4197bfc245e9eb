"""Whether, when and how a run ends whose end somebody announces: SIGTERM, a notice, a lease. Pure.

`EndMachine` is one rank's: it hears announcements and boundaries, and says what to ask of all ranks. `Requests` is rank
0's: what was asked, and no plan has answered yet. The plans of `horizon_machine` bring the answer to all.
"""

import math
from dataclasses import dataclass

from ..checkpoint.frequency_plan import DEADLINE_STEPS

SIGTERM = "SIGTERM"
LEASE_ENDS = "the lease ends"
GRACE_S = 30.0
"""What is left where nobody knows: kubelet and torchrun give as much."""
AGREE_S = 2.0
"""Several ranks plan about a second ahead, so that one and a half plans pass until what is asked for begins."""
ASK_AGAIN_S = 0.2
"""After a checkpoint that could not be begun, for want of a slot or memory, or that failed; each time twice as long."""
ASK_AGAIN_S_MOST = 600.0
ASK_AGAIN_SHARE = 0.1
"""At most, of the time that is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Somebody will end the run."""

    reason: str
    until_s: float
    """Of the monotonic clock."""
    ends: bool
    """The run ends by itself before; False: it goes on until somebody ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rank is, and its checkpoints."""

    step: int
    """The boundary that it has come to, and that is not decided about yet."""
    saved: int
    """The newest boundary whose checkpoint is complete or under way, or with which the attempt started."""
    tried: int
    """The newest one that was due, whether its checkpoint could be begun or not."""
    under_way: bool
    """A checkpoint has begun, and is neither complete nor failed."""
    is_busy: bool
    """One is, or memory for one is being allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a rank knows as it reaches one."""

    progress: Progress
    at_s: float
    """Of the monotonic clock."""
    step_s: float
    """What a step takes, but for pauses."""
    needed_s: float | None
    """From a checkpoint's boundary until it is durable, with room; None: nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checkpoint, of all ranks."""

    end: str = ""
    """Why it is the run's last one; empty: the run goes on."""


class EndMachine:
    """What one rank has heard of the run's end, and has not asked for yet.

    A lease is all ranks' alike, and rank 0 minds it. A notice counts from any rank: its node may be the only one that
    goes. SIGTERM counts if all ranks are told, which every rank must confirm.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._minds_lease = rank == 0
        self._agree_s = AGREE_S if world_size > 1 else 0.0
        self._lease: Notice | None = None
        self._notices: list[Notice] = []
        """By others than SIGTERM, after which nobody waits."""
        self._until_s: float | None = None
        self._is_new = False
        """A notice came since the last boundary."""
        self._owed: int | None = None
        """A notice wants a checkpoint of this boundary or a newer one, whatever follows."""
        self._asked: tuple[int, float] | None = None
        """At which boundary, and when, a checkpoint was asked for."""
        self._pause_s = ASK_AGAIN_S
        """Until it is asked for again."""
        self._is_told = False
        self._is_confirmed = world_size == 1

    # -- what is heard

    def leased(self, lease: Notice) -> None:
        """The process has so long; takes the place of an older lease."""
        self._lease = lease
        self._pause_s = ASK_AGAIN_S

    def noticed(self, notice: Notice) -> None:
        """Somebody announces the end: by SIGTERM, after which nobody waits, or otherwise."""
        self._pause_s = ASK_AGAIN_S
        self._ends_by(notice)
        if notice.reason == SIGTERM:
            self._is_told = True
        else:
            self._notices.append(notice)
            self._is_new = True

    def others_end_by(self, until_s: float) -> None:
        """Somebody will end another rank then, and with it all of them."""
        self._least(until_s)

    def confirmed(self) -> None:
        """All ranks were told by SIGTERM."""
        self._is_confirmed = True

    def ranks_lost(self) -> None:
        """No rank hears of another any more: each minds its own lease, and has nobody to agree with."""
        self._minds_lease, self._agree_s = True, 0.0

    @property
    def is_told(self) -> bool:
        """Tell whether SIGTERM came to this rank."""
        return self._is_told

    @property
    def is_alone(self) -> bool:
        """Tell whether SIGTERM came to this rank and, as far as is known, not to all."""
        return self._is_told and not self._is_confirmed

    # -- what to do

    def at_boundary(self, boundary: Boundary) -> Ask | None:
        """Return what to ask for: after a notice a checkpoint at once, since the next boundary may come too late.

        And the last one as late as it still fits, since what follows it is lost. While nobody knows how long that
        takes, one to measure it.
        """
        standing = self._standing()
        last = [notice for notice in standing if self._is_last_chance(notice, boundary)]
        if last:
            return self._last(last, boundary)
        is_wanted = self._owes(boundary.progress) or (bool(standing) and boundary.needed_s is None)
        return self._ask_now(boundary) if is_wanted and not boundary.progress.is_busy else None

    def saves_last(self, boundary: Boundary) -> bool:
        """Tell whether the last boundary is saved; else time is left only for what is under way. Rank 0 decides."""
        is_known = boundary.needed_s is not None
        return not boundary.progress.under_way or (is_known and self.has_time(boundary))

    def has_time(self, boundary: Boundary) -> bool:
        """Tell whether a checkpoint that begins now fits, as far as anybody knows."""
        return boundary.at_s + (boundary.needed_s or 0.0) < self.until_s(boundary.at_s)

    def until_s(self, now_s: float) -> float:
        """Return when somebody will end this process, as far as this rank knows."""
        return self._until_s if self._until_s is not None else now_s + GRACE_S

    @property
    def known_until_s(self) -> float | None:
        """The same; None: nobody has announced it."""
        return self._until_s

    def _left_s(self, now_s: float) -> float:
        """Return how long the first end is away that somebody has announced; infinite where nobody has."""
        ends_s = [notice.until_s for notice in self._standing()]
        return min(ends_s if self._until_s is None else [*ends_s, self._until_s], default=math.inf) - now_s

    def _is_last_chance(self, notice: Notice, boundary: Boundary) -> bool:
        begins_s = max(DEADLINE_STEPS * boundary.step_s, self._agree_s)
        return boundary.at_s + (boundary.needed_s or 0.0) + begins_s >= notice.until_s

    def _standing(self) -> list[Notice]:
        """Return what no last checkpoint was asked for yet."""
        return [*([self._lease] if self._lease is not None and self._minds_lease else []), *self._notices]

    def _last(self, last: list[Notice], boundary: Boundary) -> Ask:
        """Ask for all of them at once; the run ends by the first one that ends it."""
        for notice in last:
            self._ends_by(notice)
        self._asked = boundary.progress.step, boundary.at_s
        end = next((notice.reason for notice in last if notice.ends), "")
        if not end:  # the run waits for none: one that cannot be taken, or fails, is asked for again
            self._owed = boundary.progress.step
        ask = Ask(end=end)
        # Last: who is interrupted before asks at the next boundary.
        lease = None if self._lease in last else self._lease
        self._lease, self._notices = lease, [notice for notice in self._notices if notice not in last]
        return ask

    def _ends_by(self, notice: Notice) -> None:
        if notice.ends:
            self._least(notice.until_s)

    def _least(self, until_s: float) -> None:
        self._until_s = until_s if self._until_s is None else min(self._until_s, until_s)

    def _owes(self, progress: Progress) -> bool:
        """Tell whether a notice has no checkpoint yet. One that was under way when it came will do, unless it fails."""
        if self._is_new:
            last = progress.step - 1
            owed = min(last, progress.saved) if progress.under_way else last
            self._owed = owed if self._owed is None else max(owed, self._owed)
            self._is_new = False
        return self._owed is not None and progress.saved < self._owed

    def _ask_now(self, boundary: Boundary) -> Ask | None:
        """Ask, unless what was asked for before has not come yet, or came to nothing a moment ago.

        On devices that are full each try costs what a checkpoint costs, and the time that is left may be hours.
        """
        if self._asked is not None:
            step, asked_s = self._asked
            if boundary.progress.tried < step or boundary.at_s < asked_s + self._pause_s:
                return None
            most_s = min(ASK_AGAIN_S_MOST, ASK_AGAIN_SHARE * self._left_s(boundary.at_s))
            self._pause_s = max(ASK_AGAIN_S, min(2 * self._pause_s, most_s))
        ask = Ask()
        self._asked = boundary.progress.step, boundary.at_s
        return ask


class Requests:
    """What ranks asked for, until a plan answers it. Of ends the first one counts, and is answered once."""

    def __init__(self) -> None:
        self._open: Ask | None = None
        self._is_ending = False

    @property
    def open(self) -> Ask | None:
        """What the plan that is made now answers: all that was asked for, as one."""
        return self._open

    def add(self, ask: Ask) -> None:
        """Take one."""
        end = self._open.end if self._open is not None else ""
        if ask.end and not self._is_ending:
            end = ask.end
        self._open = Ask(end=end)
        self._is_ending = self._is_ending or bool(end)

    def answered(self, ask: Ask | None) -> None:
        """What was open is in a plan that others may have; anything that was asked for since then is still open."""
        if self._open is ask:
            self._open = None
