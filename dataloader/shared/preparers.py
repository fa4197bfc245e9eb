"""Who prepares this job's batches: its own process, or worker processes. The seam: submit tickets, take results.

A result is the batch as `BatchBytes`, ready to be staged or read. Samples that kill workers are left out
(workers/pool.py); so are those that another job of the group found to.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...core.errors import WorkerError
from ..batch_maker import BatchMaker, MadeBatch, Ticket
from ..workers.pool import PoolSpec, QuarantinedSample, WorkerPool


class Prepared(NamedTuple):
    """What became of a ticket: a batch, or the error that its samples raised."""

    batch: int
    made: MadeBatch | Exception


class Preparer(Protocol):
    """Prepares batches by number."""

    capacity: int
    """Tickets that it is worth to have at once."""

    @property
    def count(self) -> int:
        """Tickets that it has."""
        ...

    @property
    def has_work(self) -> bool:
        """Tell whether `results` itself prepares."""
        ...

    def submit(self, batch: int, ticket: Ticket) -> None:
        """Take a ticket."""
        ...

    def waitables(self) -> Sequence[int]:
        """Return descriptors of which one is readable when there is a result."""
        ...

    def results(self) -> list[Prepared]:
        """Return what is done, without waiting for workers; WorkerError where they cannot go on."""
        ...

    def quarantine(self, found: QuarantinedSample) -> None:
        """Leave a sample out from now on."""
        ...

    def doing(self, batch: int) -> str:
        """Return what is done about a batch, for messages."""
        ...

    def close(self, *, is_patient: bool) -> None:
        """End all workers, after their present sample or at once."""
        ...


class OwnProcess:
    """Prepares in the calling thread, one batch at a time; the trainer's random generators are left as they are."""

    capacity = 1

    def __init__(self, maker: BatchMaker, quarantined: list[QuarantinedSample]) -> None:
        self._maker, self._quarantined = maker, quarantined
        self._tickets: deque[tuple[int, Ticket]] = deque()

    @property
    def count(self) -> int:
        """Tickets that wait."""
        return len(self._tickets)

    @property
    def has_work(self) -> bool:
        """Tell whether one waits."""
        return bool(self._tickets)

    def submit(self, batch: int, ticket: Ticket) -> None:
        """Take a ticket."""
        self._tickets.append((batch, ticket))

    def waitables(self) -> Sequence[int]:
        """Return nothing: there is nobody to wait for."""
        return ()

    def results(self) -> list[Prepared]:
        """Prepare the next one."""
        if not self._tickets:
            return []
        batch, ticket = self._tickets.popleft()
        try:
            return [Prepared(batch, self._made(ticket))]
        except Exception as error:  # noqa: BLE001  raised where the loop reaches this batch
            return [Prepared(batch, error)]

    def quarantine(self, found: QuarantinedSample) -> None:
        """Leave a sample out from now on."""
        self._quarantined.append(found)

    def doing(self, batch: int) -> str:
        """Return that it is waited for."""
        return f"this process prepares batch {batch}"

    def close(self, *, is_patient: bool) -> None:
        """Forget what waits."""
        del is_patient
        self._tickets.clear()

    def _made(self, ticket: Ticket) -> MadeBatch:
        out = {each.sample for each in self._quarantined}
        if out.isdisjoint(ticket.ids):
            return self._maker.make(ticket)
        left = [each for each in ticket.ids if each not in out]
        made = self._maker.make(ticket._replace(ids=left or [self._stand_in(out)]))
        return made._replace(left_out=tuple(each for each in ticket.ids if each in out), is_stand_in=not left)

    def _stand_in(self, out: set[int]) -> int:
        found = next((each for each in range(len(self._maker.dataset)) if each not in out), None)
        if found is None:
            raise WorkerError(
                "every sample of the dataset kills workers", hint="loader.quarantined names them"
            )
        return found


class Workers:
    """Worker processes: a `WorkerPool` whose results are taken as they come."""

    def __init__(self, spec: PoolSpec, quarantined: list[QuarantinedSample]) -> None:
        self.capacity = spec.worker_count * spec.prefetch
        self._pool = WorkerPool(spec, quarantined)
        self._batches: dict[int, int] = {}
        """By number of the ticket."""
        self._waiting: deque[tuple[int, Ticket]] = deque()

    @property
    def count(self) -> int:
        """Tickets that workers have, or will have."""
        return self._pool.count + len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Tell that workers do it."""
        return False

    def submit(self, batch: int, ticket: Ticket) -> None:
        """Give a ticket to a worker; it waits where they have enough."""
        self._waiting.append((batch, ticket))
        self._refill()

    def waitables(self) -> Sequence[int]:
        """Return the channels and what tells of deaths."""
        return self._pool.waitables()

    def results(self) -> list[Prepared]:
        """Return what came."""
        found = [Prepared(self._batches.pop(number), made) for number, made in self._pool.results()]
        self._refill()
        return found

    def quarantine(self, found: QuarantinedSample) -> None:
        """Leave a sample out from now on."""
        self._pool.quarantine(found)

    def doing(self, batch: int) -> str:
        """Return what the worker of a batch is at."""
        number = next((each for each, other in self._batches.items() if other == batch), None)
        return f"batch {batch} waits for a worker" if number is None else self._pool.doing(number)

    def close(self, *, is_patient: bool) -> None:
        """End all workers."""
        if is_patient:
            self._pool.close()
        else:
            self._pool.close(deadline_s=0.0)

    def _refill(self) -> None:
        while self._waiting and self._pool.count < self.capacity:
            batch, ticket = self._waiting.popleft()
            self._batches[self._pool.submit(ticket)] = batch
