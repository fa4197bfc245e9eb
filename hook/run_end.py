"""The end of a run that somebody announces: the clock, the lock and the threads around `EndMachine`."""

import logging
import os
import threading
import time
from dataclasses import replace
from numbers import Real
from traceback import format_exception_only
from typing import NoReturn

from ..core.errors import UsageError
from ..proto import frames
from .end_machine import LEASE_ENDS, SIGTERM, Ask, Boundary, EndMachine, Notice, Progress
from .notice import ENDED_STATUS, NoticeWatch, Preemption, end_now
from .pace import Pace
from .rank_protocol import Ranks

logger = logging.getLogger(__name__)

NEWS_S = 1.0
"""What all ranks are told at about the same time is no news to any of them."""


class RunEnd:
    """Asks all ranks for a last checkpoint in time. Used by the training thread; notices come on the watch's."""

    def __init__(self, name: str, ranks: Ranks, pace: Pace, preemption: Preemption) -> None:
        self._name, self._ranks, self._pace = name, ranks, pace
        self._lock = threading.RLock()  # `lease` may come from a signal's handler that interrupts a boundary
        self._machine = EndMachine(rank=ranks.rank, world_size=ranks.world_size)
        self._agreed_until_s: float | None = None
        """The earliest end that all ranks were told of, or have told this one of."""
        self._watch = NoticeWatch(preemption, self._on_notice, self._on_unconfirmed)
        self._ask: Ask | None = None
        """What the machine wants to be asked for; it stays where a boundary is left by an exception (Ctrl-C)."""
        self._left = ""
        """Why the process was ended by `leave`; empty: it was not."""
        _open.append(self)

    def lease(self, seconds: float, *, ends: bool) -> None:
        """The process has so long from now on.

        Raises:
            UsageError: no positive number of seconds.
        """
        given: object = seconds
        if isinstance(given, bool) or not isinstance(given, Real) or not seconds > 0:
            raise UsageError(f"a lease of {given!r}", hint="the seconds that are left: a number, more than 0")
        with self._lock:
            self._machine.leased(Notice(reason=LEASE_ENDS, until_s=time.monotonic() + seconds, ends=ends))

    def at_boundary(self, progress: Progress) -> None:
        """Ask for what the machine wants, before the boundary is decided about."""
        self._watch.at_boundary()
        with self._lock:
            ask = self._machine.at_boundary(self._boundary(progress))
            if ask is not None and (self._ask is None or not self._ask.end):
                self._ask = ask
        self._tell_ranks()
        if self._ask is not None:
            self._ranks.ask_for_checkpoint(self._ask)
            self._ask = None

    def saves_last(self, progress: Progress) -> bool:
        """Tell whether the last boundary gets a checkpoint; of several ranks rank 0 decides."""
        with self._lock:
            return self._machine.saves_last(self._boundary(progress))

    def has_time(self, progress: Progress) -> bool:
        """Tell whether a checkpoint that begins now fits, as far as this rank knows."""
        with self._lock:
            return self._machine.has_time(self._boundary(progress))

    @property
    def until_s(self) -> float:
        """When somebody will end this process, of the monotonic clock, as far as this rank knows."""
        with self._lock:
            return self._machine.until_s(time.monotonic())

    def others_end_in(self, left_s: float) -> None:
        """Somebody ends another rank in so many seconds, and with it all of them; from any thread."""
        until_s = time.monotonic() + left_s
        with self._lock:
            known_s = self._machine.known_until_s
            self._machine.others_end_by(until_s)
            self._agreed_until_s = min(until_s, self._agreed_until_s or until_s)
        if known_s is None or until_s < known_s - NEWS_S:
            logger.warning("run_ends run=%s reason=another rank is ended left_s=%.0f", self._name, left_s)

    def confirmed(self) -> None:
        """All ranks were told by SIGTERM; called on the agreement's thread."""
        with self._lock:
            self._machine.confirmed()

    def ranks_lost(self) -> None:
        """No rank hears of another any more; from any thread."""
        with self._lock:
            self._machine.ranks_lost()

    def leave(self, reason: str, *, last_complete: str, in_time: bool, unsaved_steps: int) -> NoReturn:
        """End the process: SystemExit with 0 for a lease, else as SIGTERM would.

        `in_time`: all that was begun is complete. `unsaved_steps`: boundaries behind the newest complete checkpoint.
        """
        self._left = reason
        logger.warning(
            "run_ended run=%s reason=%s last_complete=%s in_time=%s unsaved_steps=%d",
            self._name,
            reason,
            last_complete or "none",
            in_time,
            unsaved_steps,
        )
        raise SystemExit(0 if reason == LEASE_ENDS else ENDED_STATUS)

    @property
    def has_left(self) -> bool:
        """Tell whether a boundary has ended the process, or tried to."""
        return bool(self._left)

    @property
    def is_told(self) -> bool:
        """Tell whether SIGTERM came, and no boundary has ended the process for it, or tried to."""
        with self._lock:
            return self._machine.is_told and not self._left

    def farewell(self, request_id: int, error: BaseException) -> frames.Leave:
        """Return what the daemon is told of a run that ends by what was raised in it, `leave`'s or another."""
        return frames.Leave(
            request_id=request_id,
            reason=_sendable(self._left) or text_of(error),
            # SystemExit and KeyboardInterrupt are what somebody wants.
            is_failure=isinstance(error, Exception),
        )

    def close(self) -> None:
        """Hear nothing more; SIGTERM ends the process again."""
        self._watch.close()
        if self in _open:
            _open.remove(self)

    def _boundary(self, progress: Progress) -> Boundary:
        return Boundary(
            progress=progress,
            at_s=time.monotonic(),
            step_s=self._pace.usual_step_s,
            needed_s=self._pace.needed_s,
        )

    def _tell_ranks(self) -> None:
        """Let all ranks know if this one is ended sooner than they have heard; before any of them is asked to end."""
        with self._lock:
            until_s, agreed_s = self._machine.known_until_s, self._agreed_until_s
            if until_s is None or (agreed_s is not None and until_s >= agreed_s):
                return
        self._ranks.ends_in(until_s - time.monotonic())
        self._agreed_until_s = until_s  # last: who is interrupted before says it at the next boundary

    @property
    def _is_told_with_all(self) -> bool:
        with self._lock:
            return self._machine.is_told and not self._machine.is_alone

    # -- on the watch's thread

    def _on_notice(self, notice: Notice) -> None:
        notice = replace(notice, reason=_sendable(notice.reason))  # it names a file or a command
        left_s = notice.until_s - time.monotonic()
        logger.warning("run_ends run=%s reason=%s left_s=%.0f", self._name, notice.reason, left_s)
        with self._lock:
            self._machine.noticed(notice)
        self._tell_ranks()
        if notice.reason == SIGTERM:
            self._ranks.confirm_end(Ask(end=SIGTERM))

    def _on_unconfirmed(self) -> None:
        """If SIGTERM came not to every rank, a peer has died. The daemon persists what is sealed.

        Nor is there anything to wait for where the ranks are lost, but a boundary that has not come in this time.
        But another run of this process may know better: one that passes no boundaries hears of no other rank.
        """
        with self._lock:
            is_alone = self._machine.is_alone
        if is_alone and not any(each._is_told_with_all for each in tuple(_open)):
            lost = self._ranks.lost
            why = f"SIGTERM, and {lost}" if lost is not None else "SIGTERM came to this rank, not to all"
            logger.error("run_ended run=%s reason=%s", self._name, why)
            end_now()


_open: list[RunEnd] = []
"""Of all runs of this process."""
os.register_at_fork(after_in_child=_open.clear)


def text_of(error: BaseException) -> str:
    """Return what was raised, whoever raised it, with its notes as one line that may be sent to others."""
    return _sendable("; ".join("".join(format_exception_only(error)).strip().splitlines()))


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()[: frames.SHORT_TEXT_MAX]
