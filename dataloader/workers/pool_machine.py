"""Which worker makes which ticket, and what follows when one dies: events in, commands out, nothing touched.

Tickets get numbers in the order in which the trainer wants them. At most `prefetch * workers` of them are out, made
and not yet handed out, or being made. `add`, `made`, `died` and `hand` are the events; every ticket of a run is handed
once, whatever the order of completions and deaths. Who wants them in order hands the `head`; others any that is made.

A death is held against the sample that the worker was reading, unless somebody asked the worker to end (SIGTERM). A
sample with two deaths is quarantined: left out of every batch from then on. Where the dataset reads a whole ticket at
once, two deaths make the ticket go sample by sample, and one more names the sample. A ticket on which workers die twice
while they collate or send it cannot be made at all, and a pool in which nothing is made between many deaths gives up.

A stream's tickets have no ids, and one worker alone can make each, in their order: nothing of it can be left out, so
the third death over one of them is the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from .phase import Phase

DEATHS_PER_SAMPLE = 2
DEATHS_PER_STREAM_BATCH = 3
"""One more than a sample has, which is only left out: two may have been the choice of the kernel, short of memory."""

BARREN_DEATHS_MAX = 16
"""Deaths without one batch made between them: more than a few bad samples."""

START_DEATHS_MAX = 3
"""Deaths in a row of one worker before it was ready, less those that somebody asked for."""

QUARANTINED_MAX = 100


@dataclass(frozen=True, slots=True)
class Assign:
    """Send a ticket to a worker, less the samples `left_out`; one by one where `is_solo`."""

    worker: int
    number: int
    left_out: frozenset[int]
    is_solo: bool


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new worker in the place of a dead one."""

    worker: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Say that a sample is left out from now on."""

    sample: int
    deaths: int


class Hopeless(Enum):
    """Why a pool gives up."""

    START = auto()
    BARREN = auto()
    COLLATE = auto()
    STREAM = auto()
    QUARANTINED = auto()


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise: more workers would die of the same. `ids` are the samples of the ticket, where one is to blame."""

    reason: Hopeless
    deaths: int
    ids: tuple[int, ...] = ()


Command = Assign | Replace | Quarantine | GiveUp


@dataclass(slots=True)
class _Job:
    """A ticket that is not handed out yet."""

    ids: Sequence[int]
    worker: int
    only: int | None = None
    """The worker that alone can make it."""

    is_made: bool = False
    is_solo: bool = False
    whole_deaths: int = 0
    """Workers that died on it while it was read as a whole."""

    collate_deaths: int = 0
    sent_ids: Sequence[int] = field(default_factory=tuple[int, ...])


class PoolMachine:
    """The book of one pool; knows numbers, sample ids and workers 0 … worker_count - 1."""

    def __init__(self, worker_count: int, prefetch: int, *, is_fixed: bool) -> None:
        """With `is_fixed` ticket k of a run is made by worker k mod worker_count, as in torch; else by the idlest."""
        assert worker_count > 0, worker_count
        assert prefetch > 0, prefetch
        self._window = worker_count * prefetch
        self._is_fixed = is_fixed
        self._queues: list[list[int]] = [[] for _ in range(worker_count)]
        self._is_ready = [False] * worker_count
        self._jobs: dict[int, _Job] = {}
        self._first = self._head = self._next = 0
        self._sample_deaths: dict[int, int] = {}
        self._barren_deaths = 0
        self._start_deaths = [0] * worker_count
        self.quarantined: dict[int, int] = {}
        """Deaths of each sample that is left out."""

    @property
    def head(self) -> int:
        """The lowest number of a ticket that is not handed out yet: in order, the next one."""
        return self._head

    def worker_of(self, number: int) -> int:
        """Return the worker that makes, or made, a ticket that is not handed out yet."""
        return self._jobs[number].worker

    @property
    def count(self) -> int:
        """Tickets that were added and not handed out."""
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Whether every ticket that was added was handed out."""
        return not self._jobs

    @property
    def has_room(self) -> bool:
        """Whether another ticket may be added."""
        return len(self._jobs) < self._window

    def left_out(self, number: int) -> frozenset[int]:
        """Return the quarantined samples of a ticket that is not handed out yet."""
        if not self.quarantined:
            return frozenset()
        return frozenset(self.quarantined.keys() & set(self._jobs[number].ids))

    def sent_ids(self, number: int) -> Sequence[int]:
        """Return what the worker of a ticket was asked to read, in its order."""
        return self._jobs[number].sent_ids if number in self._jobs else ()

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Start a new run: tickets of before are void, also those being made. Return the first number of the run."""
        self._jobs.clear()
        for queue in self._queues:
            queue.clear()
        self._first = self._head = self._next
        return self._first

    def add(self, ids: Sequence[int], *, only: int | None = None) -> Assign:
        """Take the next ticket; `only` that worker can make it."""
        assert self.has_room
        number = self._next
        self._next += 1
        self._jobs[number] = _Job(ids=ids, worker=-1, only=only)
        return self._assign(number, without=None)

    def stands_in(self, number: int, sample: int) -> None:
        """Note that a ticket with nothing left reads this sample, so that it can be blamed, too."""
        self._jobs[number].sent_ids = [sample]

    def ready(self, worker: int) -> None:
        """Note that a worker has started."""
        self._is_ready[worker] = True
        self._start_deaths[worker] = 0

    def made(self, worker: int, number: int) -> bool:
        """Note that a ticket came back; False where nobody waits for it any more."""
        if number not in self._queues[worker]:
            return False
        self._queues[worker].remove(number)
        self._jobs[number].is_made = True
        self._barren_deaths = 0
        return True

    def is_made(self, number: int) -> bool:
        """Whether a ticket came back and is not handed out yet."""
        return number in self._jobs and self._jobs[number].is_made

    def hand(self, number: int) -> None:
        """Note that a ticket that is made was handed out."""
        job = self._jobs.pop(number)
        assert job.is_made, number
        while self._head < self._next and self._head not in self._jobs:
            self._head += 1

    def died(self, worker: int, number: int, place: int, *, is_blamed: bool) -> list[Command]:
        """Note that a worker died at `place` (or Phase) of a ticket; what it had is assigned again.

        Args:
            worker: which one; everything that it had sent was reported by `made` before.
            number: the ticket that it said it was at.
            place: index into the ids that it was sent, or a Phase.
            is_blamed: whether what it was doing may have killed it.
        """
        lost, self._queues[worker] = self._queues[worker], []
        had_started, self._is_ready[worker] = self._is_ready[worker], False
        self._barren_deaths += 1
        commands: list[Command] = []
        if not had_started and place == Phase.START:
            self._start_deaths[worker] += is_blamed
            if self._start_deaths[worker] >= START_DEATHS_MAX:
                return [GiveUp(Hopeless.START, self._start_deaths[worker])]
        elif is_blamed and number in lost:
            commands += self._blame(number, place)
        if self._barren_deaths > BARREN_DEATHS_MAX:
            commands.append(GiveUp(Hopeless.BARREN, self._barren_deaths))
        if any(isinstance(command, GiveUp) for command in commands):
            return commands
        commands.append(Replace(worker))
        commands += [self._assign(each, without=worker) for each in lost]
        return commands

    # -- inside --------------------------------------------------------------------------------------------------

    def _blame(self, number: int, place: int) -> list[Command]:
        job = self._jobs[number]
        if job.only is not None:
            job.whole_deaths += 1
            is_last = job.whole_deaths >= DEATHS_PER_STREAM_BATCH
            return [GiveUp(Hopeless.STREAM, job.whole_deaths)] if is_last else []
        if 0 <= place < len(job.sent_ids):
            return self._blame_sample(job, job.sent_ids[place])
        if place == Phase.READ_ALL:
            job.whole_deaths += 1
            job.is_solo = job.whole_deaths >= DEATHS_PER_SAMPLE
        elif place in {Phase.COLLATE, Phase.SEND}:
            job.collate_deaths += 1
            if job.collate_deaths >= DEATHS_PER_SAMPLE:
                return [GiveUp(Hopeless.COLLATE, job.collate_deaths, tuple(job.ids))]
        return []

    def _blame_sample(self, job: _Job, sample: int) -> list[Command]:
        deaths = self._sample_deaths.get(sample, 0) + 1
        self._sample_deaths[sample] = deaths
        if deaths + job.whole_deaths < DEATHS_PER_SAMPLE or sample in self.quarantined:
            return []
        self.quarantined[sample] = deaths + job.whole_deaths
        commands: list[Command] = [Quarantine(sample, self.quarantined[sample])]
        if len(self.quarantined) > QUARANTINED_MAX:
            commands.append(GiveUp(Hopeless.QUARANTINED, len(self.quarantined)))
        return commands

    def _assign(self, number: int, *, without: int | None) -> Assign:
        job, left_out = self._jobs[number], self.left_out(number)
        job.worker = self._choose(number, without) if job.only is None else job.only
        job.sent_ids = [each for each in job.ids if each not in left_out] if left_out else job.ids
        self._queues[job.worker].append(number)
        return Assign(job.worker, number, left_out, job.is_solo)

    def _choose(self, number: int, without: int | None) -> int:
        """Return who makes a ticket; after a death those first that need not be started."""
        count, start = len(self._queues), (number - self._first) % len(self._queues)
        if self._is_fixed or count == 1:
            return start
        workers = [(start + step) % count for step in range(count)]
        return min(workers, key=lambda worker: (worker == without, len(self._queues[worker])))
