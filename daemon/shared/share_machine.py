"""Which batches of a group are prepared, by whom, and who has not taken them yet: no clock, no bytes.

All jobs of a group walk the same batches, numbered g = epoch * batches_per_epoch + b. A batch is *unprepared*, *leased*
(a job prepares it), *coming* (its bytes are being copied), *ready*, or *gone* (taken by all, or not to be shared).

The window is [floor, floor + lag + ahead). A job whose position (the batch it wants next) is in [floor, floor + lag] is
*inside*. The fastest of them pulls the floor, so that it is never held back: who falls more than `lag` behind it is
outside and prepares for itself until it meets the window. So does a job that is ahead of the window. While nobody is
inside, the window is where the next job that asks is.

A ready batch is kept for the set of jobs that are inside and have not passed it: whoever leaves or dies is out of
every such set at once. Bytes are bounded: a lease reserves what the largest batch so far took; where there is no room
the lowest batches go, which only those behind need; they never take more than half of the budget from who is in front.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """What becomes of a job that wants a batch."""

    READY = "ready"
    """It may read the bytes, until it says that it took them."""
    WAIT = "wait"
    """Somebody prepares it, or the next lease is for it."""
    PRIVATE = "private"
    """It prepares it for itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`until`: the job prepares all batches below this one for itself, without asking."""

    outcome: Outcome
    until: int = 0


@dataclass(slots=True, kw_only=True)
class _Leased:
    size_bytes: int
    """Reserved."""
    job: int
    deadline_s: float


@dataclass(slots=True, kw_only=True)
class _Coming:
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class _Ready:
    size_bytes: int
    readers: set[int] = field(default_factory=set[int])


LAG_MAX = 32
AHEAD_MAX = 32


class ShareMachine:
    """One group. Jobs and batches are numbers; every call leaves the group settled."""

    def __init__(self, *, budget_bytes: int, lag_max: int = LAG_MAX, ahead_max: int = AHEAD_MAX) -> None:
        assert budget_bytes >= 0, budget_bytes
        assert lag_max >= 0 < ahead_max, (lag_max, ahead_max)
        self.budget_bytes = budget_bytes
        self.floor = 0
        self._lag_max, self._ahead_max = lag_max, ahead_max
        self._positions: dict[int, int] = {}
        self._batches: dict[int, _Leased | _Coming | _Ready] = {}
        self._gone: set[int] = set()
        """Of the window: not to be leased."""
        self._let_go: list[tuple[int, _Ready]] = []
        """Dropped while somebody reads them: they count until that ends."""
        self._estimate_bytes = 1

    # -- who is there

    @property
    def jobs(self) -> frozenset[int]:
        """The live jobs."""
        return frozenset(self._positions)

    @property
    def used_bytes(self) -> int:
        """Bytes of all batches in memory, and reserved for those that are being prepared."""
        return sum(batch.size_bytes for batch in self._batches.values()) + self.let_go_bytes

    @property
    def let_go_bytes(self) -> int:
        """Bytes of batches that were dropped while somebody read them, and reads still."""
        return sum(batch.size_bytes for _, batch in self._let_go)

    @property
    def window(self) -> tuple[int, int]:
        """The batches [start, stop) that may be leased, coming or ready."""
        return self.floor, self._front() + self._ahead_max

    @property
    def leased_count(self) -> int:
        """Batches that are being prepared, or copied."""
        return len(self._batches) - len(self.stored)

    def position(self, job: int) -> int:
        """Return the batch that a job wants next."""
        return self._positions[job]

    @property
    def stored(self) -> frozenset[int]:
        """The batches that are ready."""
        return frozenset(g for g, batch in self._batches.items() if isinstance(batch, _Ready))

    @property
    def next_deadline_s(self) -> float | None:
        """When the next lease ends by itself, if there is one."""
        return min(
            (each.deadline_s for each in self._batches.values() if isinstance(each, _Leased)), default=None
        )

    def is_inside(self, job: int) -> bool:
        """Tell whether a job takes part in the window."""
        return self.floor <= self._positions[job] <= self.floor + self._lag_max

    def lowest(self, *, besides: int) -> int:
        """Return the lowest position of the other jobs inside; -1 where there are none."""
        return min((position for job, position in self._inside() if job != besides), default=-1)

    def missing(self, g: int) -> frozenset[int]:
        """Return the jobs for whom a batch is kept: inside, and not past it."""
        return frozenset(job for job, position in self._inside() if position <= g)

    def join(self, job: int, position: int, size_hint_bytes: int = 1) -> None:
        """Add a job that wants `position` next; its batches take about `size_hint_bytes`."""
        assert job not in self._positions, job
        self._estimate_bytes = max(self._estimate_bytes, size_hint_bytes)
        self._move(job, position)

    def leave(self, job: int) -> None:
        """A job ended or died: its leases are free, and nothing is kept for it."""
        self._positions.pop(job, None)
        for g, batch in list(self._batches.items()):
            if isinstance(batch, _Leased) and batch.job == job:
                del self._batches[g]
        self._end_reading(job)
        self._settle()

    # -- preparing

    def lease(self, job: int, count: int, now_s: float, lease_s: float) -> list[int]:
        """Return up to `count` batches that this job is to prepare now: first the one it wants, then the lowest."""
        if not self.is_inside(job):
            return []
        granted: list[int] = []
        for g in self._unprepared(self._positions[job]):
            if len(granted) == count or not self._make_room(self._estimate_bytes, g):
                break
            self._batches[g] = _Leased(size_bytes=self._estimate_bytes, job=job, deadline_s=now_s + lease_s)
            granted.append(g)
        self._check()
        return granted

    def expire(self, now_s: float) -> set[int]:
        """End the leases that are over; return the jobs that had them."""
        late: set[int] = set()
        for g, batch in list(self._batches.items()):
            if isinstance(batch, _Leased) and batch.deadline_s <= now_s:
                late.add(batch.job)
                del self._batches[g]
        return late

    def publish(self, g: int, size_bytes: int) -> bool:
        """Tell whether the bytes of a batch are to be copied; then `published` or `failed` has to follow.

        It does not matter who holds the lease: all make the same bytes, and the first one counts.
        """
        batch = self._batches.get(g)
        is_wanted = self.floor <= g < self.floor + self._lag_max + self._ahead_max and g not in self._gone
        if not is_wanted or isinstance(batch, _Coming | _Ready):
            return False
        if batch is not None:
            del self._batches[g]
        if not self._make_room(size_bytes, g):
            self._gone.add(g)
            return False
        self._estimate_bytes = max(self._estimate_bytes, size_bytes)
        self._batches[g] = _Coming(size_bytes=size_bytes)
        self._check()
        return True

    def published(self, g: int) -> bool:
        """The bytes are there; tell whether anybody wants them still."""
        batch = self._batches[g]
        assert isinstance(batch, _Coming), batch
        self._batches[g] = _Ready(size_bytes=batch.size_bytes)
        self._settle()
        return g in self._batches

    def failed(self, g: int) -> None:
        """A batch cannot be shared (it could not be prepared, copied or stored): each job sees to it itself."""
        if not isinstance(self._batches.get(g), _Ready):
            self._batches.pop(g, None)
            self._gone.add(g)
        self._settle()

    # -- taking

    def want(self, job: int, g: int) -> Answer:
        """A job wants a batch next. If it is ready, the job reads it from now on, until it says something else."""
        self._end_reading(job)
        self._move(job, g)
        if g < self.floor:
            return Answer(Outcome.PRIVATE, self.floor)
        if not self.is_inside(job):
            return Answer(Outcome.PRIVATE, g + self._ahead_max)
        batch = self._batches.get(g)
        if isinstance(batch, _Ready):
            batch.readers.add(job)
            return Answer(Outcome.READY)
        if batch is not None:
            return Answer(Outcome.WAIT)
        if g in self._gone or not self._make_room(self._estimate_bytes, g) or not self.is_inside(job):
            return Answer(Outcome.PRIVATE, self._first_not_gone(g + 1))
        return Answer(Outcome.WAIT)

    def took(self, job: int, g: int) -> None:
        """A job has copied a batch, or prepared it for itself, and goes on with the next one."""
        self._end_reading(job)
        self._move(job, g + 1)

    # -- inside

    def _inside(self) -> Iterator[tuple[int, int]]:
        return ((job, position) for job, position in self._positions.items() if self.is_inside(job))

    def _front(self) -> int:
        """Return the position of the fastest job inside."""
        return max((position for _, position in self._inside()), default=self.floor)

    def _move(self, job: int, position: int) -> None:
        was_inside = job in self._positions and self.is_inside(job)
        if (
            was_inside and self._positions[job] == position
        ):  # it asks again, as whoever waits does with every frame
            return
        self._positions[job] = position
        if was_inside and position <= self.floor + self._lag_max + self._ahead_max:
            self.floor = max(self.floor, position - self._lag_max)
        if not any(True for _ in self._inside()):
            self.floor = position
            self._gone.clear()
            for g, batch in list(self._batches.items()):
                if not isinstance(batch, _Coming) and g >= position + self._lag_max + self._ahead_max:
                    self._drop(g)
        self._settle()

    def _settle(self) -> None:
        """Drop what nobody inside needs."""
        lowest = min((position for _, position in self._inside()), default=None)
        for g, batch in list(self._batches.items()):
            if isinstance(batch, _Coming):
                continue
            if g < self.floor:
                self._drop(g)
            elif isinstance(batch, _Ready) and (lowest is None or g < lowest):
                self._drop(g)
                self._gone.add(g)
        self._gone = {g for g in self._gone if g >= self.floor}
        self._check()

    def _drop(self, g: int) -> None:
        batch = self._batches.pop(g)
        if isinstance(batch, _Ready) and batch.readers:
            self._let_go.append((g, batch))

    def _end_reading(self, job: int) -> None:
        for batch in self._batches.values():
            if isinstance(batch, _Ready):
                batch.readers.discard(job)
        for _, batch in self._let_go:
            batch.readers.discard(job)
        self._let_go = [each for each in self._let_go if each[1].readers]

    def _unprepared(self, first: int) -> Iterator[int]:
        """Yield what may be leased: `first` if it may, then from the lowest position inside on."""
        if first not in self._batches and first not in self._gone:
            yield first
        low = min((position for _, position in self._inside()), default=self.floor)
        for g in range(low, self._front() + self._ahead_max):
            if g >= self.floor and g not in self._batches and g not in self._gone and g != first:
                yield g

    def _first_not_gone(self, g: int) -> int:
        while g in self._gone:
            g += 1
        return g

    def _make_room(self, size_bytes: int, g: int) -> bool:
        """Return whether so many bytes more fit, for batch g, after dropping what only jobs behind the front need."""
        front = self._front()
        ahead_bytes = sum(batch.size_bytes for number, batch in self._batches.items() if number >= front)
        may_drop = g == front or (g > front and 2 * (ahead_bytes + size_bytes) <= self.budget_bytes)
        while self.used_bytes + size_bytes > self.budget_bytes:
            lowest = min(self.stored, default=front)
            if not may_drop or lowest >= front or size_bytes > self.budget_bytes:
                return False
            self.floor = lowest + 1
            self._settle()
        return True

    def _check(self) -> None:
        assert self.used_bytes <= self.budget_bytes, (self.used_bytes, self.budget_bytes)
        assert all(g >= self.floor for g, each in self._batches.items() if not isinstance(each, _Coming))
