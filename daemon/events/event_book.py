"""The logs of a daemon: one for each user, who sees nothing of others, and one of everything for root.

Numbers are each log's own, so that they tell nobody how much others do. Nothing waits for a reader: it goes through its
log at its own speed, and what has been overwritten meanwhile it is told to have missed.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable

from ...core.errors import LimitError
from .event_log_machine import EVENTS_MAX, EventLog, missed
from .event_types import Event, EventQuery

USERS_MAX = 256
"""Logs beside root's; the user who was heard of longest ago loses theirs."""
WATCHERS_MAX, WATCHERS_USER_MAX = 32, 8
"""Who waits for events takes one of the calls that the daemon answers at once."""
BATCH = 256


class EventBook:
    """Owned by the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.time, size: int = EVENTS_MAX) -> None:
        self._clock, self._size = clock, size
        self._all = self._new_log()
        self._logs: dict[int, EventLog] = {}
        """By user, the one heard of longest ago first."""
        self._watchers: dict[asyncio.Event, int | None] = {}
        self._bounded: dict[asyncio.Event, int | None] = {}
        """Of these, the ones that are calls of clients."""
        self._is_closed = False

    def _new_log(self) -> EventLog:
        return EventLog(secrets.token_hex(16), size=self._size)

    def now_unix_s(self) -> float:
        """Return the time that events carry."""
        return self._clock()

    def log(self, uid: int | None) -> EventLog:
        """Return what this user (None: root, of everything) may see."""
        if uid is None:
            return self._all
        log = self._logs.pop(uid, None)
        if log is None:
            log = self._new_log()
            while len(self._logs) >= USERS_MAX:
                del self._logs[next(each for each in self._logs if each not in self._watchers.values())]
        self._logs[uid] = log
        return log

    def add(self, event: Event) -> None:
        """Take an event, and wake who waits for one."""
        self._all.append(event)
        if event.owner_uid is not None:
            self.log(event.owner_uid).append(event)
        else:
            for log in self._logs.values():
                log.append(event)
        for wake in self._watchers:
            wake.set()

    async def watch(
        self, uid: int | None, query: EventQuery, *, is_bounded: bool = True
    ) -> AsyncGenerator[Event]:
        """Yield what this user (None: of everybody) asks for, in order; with `follow` until `close`.

        `is_bounded`: it counts among those who follow; not so for a part of the daemon.

        Raises:
            LimitError: too many wait for events.
        """
        wake = self._enter(uid, is_bounded=is_bounded) if query.follow else None
        try:
            log = self.log(uid)
            last, is_other = _begin(log, query)
            end = log.last
            if is_other:
                yield missed(0, 1, log_id=log.log_id, unix_s=self._clock())
            while True:
                batch = log.after(last, count_max=BATCH)
                if batch.missed_count:
                    before = last + batch.missed_count + 1
                    yield missed(batch.missed_count, before, log_id=log.log_id, unix_s=self._clock())
                for event in batch.events:
                    if query.wants(event):
                        yield event
                last = batch.last
                if wake is None and last >= end:
                    return
                if last != log.last:
                    await asyncio.sleep(0)  # a filter that lets nothing through must not hold the loop
                elif wake is not None:
                    if self._is_closed:
                        return
                    wake.clear()
                    await wake.wait()
        finally:
            if wake is not None:
                del self._watchers[wake]
                self._bounded.pop(wake, None)

    def _enter(self, uid: int | None, *, is_bounded: bool) -> asyncio.Event:
        mine = sum(each == uid for each in self._bounded.values())
        if is_bounded and (len(self._bounded) >= WATCHERS_MAX or mine >= WATCHERS_USER_MAX):
            raise LimitError(
                f"{mine} of your calls and {len(self._bounded)} in all follow events, as many as the daemon allows",
                hint=f"end one of them: at most {WATCHERS_USER_MAX} of a user and {WATCHERS_MAX} in all",
            )
        wake = asyncio.Event()
        self._watchers[wake] = uid
        if is_bounded:
            self._bounded[wake] = uid
        return wake

    def close(self) -> None:
        """Let all who follow end once they have what is there: nothing more comes."""
        self._is_closed = True
        for wake in self._watchers:
            wake.set()


def _begin(log: EventLog, query: EventQuery) -> tuple[int, bool]:
    """Return the number to begin after, and whether what the client knows is of another log."""
    if query.since is None:
        return (log.last if query.follow else log.first - 1), False
    is_other = query.since > log.last or query.log_id not in ("", log.log_id)
    return (log.first - 1 if is_other else query.since), is_other
