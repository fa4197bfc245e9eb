"""Who prepares this job's batches: its own process, or worker processes. The seam: submit tickets, take results.

A result is the batch as bytes, ready to be staged or decoded. Workers that die are replaced, and what they had to do
is done again.
"""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Protocol, cast

from ...core.errors import NodeError
from ..batch_maker import BatchMaker, Ticket
from .batch_tree import EncodedBatch, named_classes
from .worker import WorkerSettings, make_batch, worker_main

DEATHS_MAX = 3
END_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What became of a ticket: a batch, or the error that its samples raised."""

    batch: int
    encoded: EncodedBatch | bytes | None = None
    classes: dict[str, type] = field(default_factory=dict[str, type])
    """Named tuples that the batch holds."""
    error: BaseException | None = None


class Preparer(Protocol):
    """Prepares batches by number."""

    capacity: int
    """Tickets that it can have at once."""

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
        """Return what is done, without waiting for workers."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class OwnProcess:
    """Prepares in the calling thread, one batch at a time; the trainer's random generators are left as they are."""

    capacity = 1

    def __init__(self, maker: BatchMaker) -> None:
        self._maker = maker
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
            made = make_batch(self._maker, ticket)
            encoded = EncodedBatch(made.ids, made.data)
        except Exception as error:  # noqa: BLE001  raised where the loop reaches this batch
            return [Prepared(batch=batch, error=error)]
        return [Prepared(batch=batch, encoded=encoded, classes=named_classes(made.data))]

    def close(self) -> None:
        """Forget what waits."""
        self._tickets.clear()


@dataclass(slots=True, eq=False)
class _Worker:
    process: BaseProcess
    channel: Connection
    tickets: dict[int, Ticket] = field(default_factory=dict[int, Ticket])


class Workers:
    """Worker processes, each with a channel of its own."""

    def __init__(
        self,
        maker: BatchMaker,
        settings: WorkerSettings,
        *,
        context: str | BaseContext | None,
        prefetch_factor: int,
    ) -> None:
        self.capacity = settings.worker_count * prefetch_factor
        self._maker, self._settings = maker, settings
        is_context = isinstance(context, BaseContext)
        self._context = context if is_context else multiprocessing.get_context(context)
        self._deaths: dict[int, int] = {}
        self._failed: list[Prepared] = []
        self._workers: list[_Worker] = []
        try:
            for number in range(settings.worker_count):
                self._workers.append(self._start(number))
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """Tickets that workers have."""
        return sum(len(worker.tickets) for worker in self._workers)

    @property
    def has_work(self) -> bool:
        """Tell whether an error waits to be told."""
        return bool(self._failed)

    def submit(self, batch: int, ticket: Ticket) -> None:
        """Give a ticket to the worker that has the fewest."""
        worker = min(self._workers, key=lambda each: len(each.tickets))
        worker.tickets[batch] = ticket
        self._send(worker, batch)

    def waitables(self) -> Sequence[int]:
        """Return the channels and what tells of deaths."""
        return [fd for each in self._workers for fd in (each.channel.fileno(), each.process.sentinel)]

    def results(self) -> list[Prepared]:
        """Return what came; replace who died."""
        found, self._failed = self._failed, []
        for number, worker in enumerate(list(self._workers)):
            is_alive = worker.process.is_alive()
            try:
                while worker.channel.poll():
                    found.append(self._receive(worker))
            except (EOFError, OSError):
                is_alive = False
            if not is_alive:
                self._replace(number)
        return found

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.send(None)  # others may have inherited this end: closing it may tell nobody
            worker.channel.close()
        for worker in self._workers:
            worker.process.join(END_DEADLINE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers.clear()

    def _start(self, number: int) -> _Worker:
        mine, its = multiprocessing.Pipe()
        make = cast(Callable[..., BaseProcess], self._context.Process)  # pyright: ignore[reportAttributeAccessIssue]
        arguments = (its, mine, self._maker, self._settings, number, os.getpid())
        if self._context.get_start_method() != "fork":
            arguments = (its, None, *arguments[2:])
        process = make(target=worker_main, args=arguments, daemon=True)
        try:
            process.start()
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        return _Worker(process, mine)

    def _send(self, worker: _Worker, batch: int) -> None:
        try:
            worker.channel.send((batch, worker.tickets[batch]))
        except OSError:
            return  # it died: found and mended when results are taken

    def _receive(self, worker: _Worker) -> Prepared:
        batch, classes, error = cast(tuple[int, dict[str, type], BaseException | None], worker.channel.recv())
        encoded = worker.channel.recv_bytes() if error is None else None
        worker.tickets.pop(batch, None)
        self._deaths.pop(batch, None)
        return Prepared(batch=batch, encoded=encoded, classes=classes, error=error)

    def _replace(self, number: int) -> None:
        """Start another worker in the place of one that died; the batch it was at counts one death more."""
        dead = self._workers[number]
        dead.channel.close()
        dead.process.join()
        how = dead.process.exitcode
        dead.process.close()
        new = self._workers[number] = self._start(number)
        for place, (batch, ticket) in enumerate(dead.tickets.items()):
            if place == 0:
                self._deaths[batch] = self._deaths.get(batch, 0) + 1
            if self._deaths.get(batch, 0) >= DEATHS_MAX:
                error = NodeError(
                    f"{DEATHS_MAX} workers died (the last with exit code {how}) while they prepared the batch of "
                    f"samples {ticket.ids[:8]}{' …' if len(ticket.ids) > 8 else ''}",
                    hint="look at these samples, and whether the node ran out of memory",
                )
                self._failed.append(Prepared(batch=batch, error=error))
            else:
                new.tickets[batch] = ticket
                self._send(new, batch)
