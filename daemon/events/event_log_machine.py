"""The last events of one log, numbered from 1: what came after a number, and how much of that is gone. Pure."""

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

from .event_types import Event, EventKind

EVENTS_MAX = 4096
"""About 1 MB of memory, and an hour of a run of 8 ranks that takes a checkpoint every 20 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A piece of a log, in order."""

    events: tuple[Event, ...]
    missed_count: int
    """Events that were asked for and came before these, and are gone."""
    last: int
    """Number to go on after."""


class EventLog:
    """Keeps the newest `size` events."""

    def __init__(self, log_id: str, *, size: int = EVENTS_MAX) -> None:
        assert size >= 1
        self.log_id = log_id
        self._events: deque[Event] = deque(maxlen=size)
        self.last = 0
        """Number of the newest event; 0 before the first."""

    @property
    def first(self) -> int:
        """Number of the oldest event that is kept; the next one's while there is none."""
        return self.last - len(self._events) + 1

    def append(self, event: Event) -> None:
        """Take the next event; where the log is full the oldest one goes."""
        self.last += 1
        self._events.append(event)

    def after(self, sequence: int, *, count_max: int) -> Batch:
        """Return the first events after number `sequence`, at most so many, numbered."""
        assert 0 <= sequence <= self.last, (sequence, self.last)
        begin = max(sequence + 1, self.first)
        found = islice(self._events, begin - self.first, begin - self.first + count_max)
        events = tuple(
            replace(event, sequence=number, log_id=self.log_id) for number, event in enumerate(found, begin)
        )
        return Batch(
            events=events,
            missed_count=begin - sequence - 1,
            last=events[-1].sequence if events else self.last,
        )


def missed(count: int, before: int, *, log_id: str, unix_s: float) -> Event:
    """Return what tells that `count` events before number `before` are gone; 0: of another log, nobody knows."""
    known = f"{count} events are gone: the daemon keeps the last ones only"
    unknown = "what happened before is gone: the daemon has started again"
    return Event(
        kind=EventKind.MISSED,
        unix_s=unix_s,
        text=known if count else unknown,
        sequence=max(before - 1, 0),
        log_id=log_id,
        count=count,
    )
