"""The end of a run that somebody announces: who hears of it, how much time is left, what the process ends with."""

import logging
import time
from typing import NoReturn

from ..checkpoint.frequency_plan import DEADLINE_STEPS
from ..core.errors import UsageError
from .notice import ENDED_STATUS, GRACE_S, SIGTERM, Notice, NoticeWatch, Preemption, end_now
from .pace import Pace
from .rank_protocol import Ranks

logger = logging.getLogger(__name__)

LEASE_ENDS = "the lease ends"
AGREE_S = 2.0
"""Several ranks plan about a second ahead, so that one and a half plans pass until what is asked for begins."""
ASK_AGAIN_S = 0.2
"""After a checkpoint that could not be begun: there was no slot, or no memory."""


class RunEnd:
    """Asks all ranks for a last checkpoint in time. Used by the training thread; notices come on the watch's."""

    def __init__(self, name: str, ranks: Ranks, pace: Pace, preemption: Preemption) -> None:
        self._name, self._ranks, self._pace = name, ranks, pace
        self._lease: Notice | None = None
        self._announced: Notice | None = None
        """By others than SIGTERM, after which nobody waits; set by the watch's thread."""
        self._until_s: float | None = None
        self._asked_s = 0.0
        """When a checkpoint was asked for last, to measure how long one takes."""
        self._watch = NoticeWatch(preemption, self._on_notice)

    def lease(self, seconds: float, *, ends: bool) -> None:
        """The process has so long from now on.

        Raises:
            UsageError: no positive number of seconds.
        """
        if not seconds > 0:
            raise UsageError(f"a lease of {seconds} s", hint="the seconds that are left, more than 0")
        self._lease = Notice(reason=LEASE_ENDS, until_s=time.monotonic() + seconds, ends=ends)

    def mind_deadlines(self, *, under_way: bool) -> None:
        """At each boundary: ask for the last checkpoint as late as it still fits, since what follows it is lost.

        Rank 0's lease counts, and what was announced to any rank: it may be the only one whose node goes. While nobody
        knows how long that takes, ask for one to measure; `under_way`: one is, or memory for it.
        """
        lease, announced = self._lease if self._ranks.rank == 0 else None, self._announced
        if lease is not None and self._is_last_chance(lease):
            self._lease = None
            self._ask(lease)
        elif announced is not None and self._is_last_chance(announced):
            self._announced = None
            self._ask(announced)
        elif (lease or announced) and self._pace.needed_s is None and not under_way:
            self._measure()

    def _is_last_chance(self, end: Notice) -> bool:
        steps_s = DEADLINE_STEPS * self._pace.step_s
        begins_s = max(steps_s, AGREE_S) if self._ranks.world_size > 1 else steps_s
        return time.monotonic() + (self._pace.needed_s or 0.0) + begins_s >= end.until_s

    def _ask(self, end: Notice) -> None:
        self._ends_by(end)
        self._ranks.ask_for_checkpoint(end.reason if end.ends else "")

    def _ends_by(self, end: Notice) -> None:
        if end.ends:
            self._until_s = min(end.until_s, self._until_s or end.until_s)

    def _measure(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._asked_s + ASK_AGAIN_S:
            self._asked_s = now_s
            self._ranks.ask_for_checkpoint()

    @property
    def until_s(self) -> float:
        """When somebody will end this process, of the monotonic clock, as far as this rank knows."""
        return self._until_s if self._until_s is not None else time.monotonic() + GRACE_S

    @property
    def has_time(self) -> bool:
        """Tell whether a checkpoint that begins now would be durable in time, as far as anybody knows."""
        needed_s = self._pace.needed_s
        return needed_s is not None and time.monotonic() + needed_s < self.until_s

    def leave(self, reason: str, *, last_complete: str, in_time: bool) -> NoReturn:
        """End the process: SystemExit with 0 for a lease, else as SIGTERM would."""
        logger.warning(
            "run_ended run=%s reason=%s last_complete=%s in_time=%s",
            self._name,
            reason,
            last_complete or "none",
            in_time,
        )
        raise SystemExit(0 if reason == LEASE_ENDS else ENDED_STATUS)

    def close(self) -> None:
        """Hear nothing more; SIGTERM ends the process again."""
        self._watch.close()

    # -- on the watch's thread

    def _on_notice(self, notice: Notice) -> None:
        left_s = notice.until_s - time.monotonic()
        logger.warning("run_ends run=%s reason=%s left_s=%.0f", self._name, notice.reason, left_s)
        self._ends_by(notice)
        if notice.reason == SIGTERM:
            self._ranks.confirm_end(notice.reason, self._leave_alone)
        else:
            self._announced = notice

    def _leave_alone(self) -> None:
        """Not every rank is to end: a peer has died. The daemon persists what is sealed."""
        logger.error("run_ended run=%s reason=SIGTERM came to this rank, not to all", self._name)
        end_now()
