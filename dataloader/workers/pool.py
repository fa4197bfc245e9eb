"""The pool of workers: does what `pool_machine` says with real processes, and waits only for the batch that is next.

No thread and no lock. A batch that is there already costs one receive; one that is not, one poll() over the channels
and the deaths of all workers. `begin` and `next_made` are for who wants batches in order; `submit` and `results`, which
never wait, for who takes them as they come.
"""

import contextlib
import logging
import os
import select
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple, NoReturn, cast

from torch._utils import ExceptionWrapper

from ...core.errors import UsageError, WorkerError, WorkerTimeoutError
from ..batch_maker import AnyTicket, MadeBatch, Ticket
from ..stream_plan import StreamTicket
from .cargo import WorkerJob
from .channel import Ended, Kind, Message
from .packing import Packed, unpack
from .phase import Phase
from .pool_machine import Assign, Command, GiveUp, Hopeless, PoolMachine, Quarantine, Replace
from .worker_process import CLOSE_DEADLINE_S, Exit, WorkerProcess, end_workers

logger = logging.getLogger(__name__)

LONG_WAIT_S = 60.0
"""Without a `timeout=` the log says once after this time what is waited for."""


class QuarantinedSample(NamedTuple):
    """A sample that is left out, because workers died while they read it."""

    sample: int
    deaths: int
    last_exit: str
    """How the last of them ended: "was killed by SIGSEGV", "exited with code 3"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a pool is made of."""

    context: BaseContext
    worker_count: int
    prefetch: int
    """Tickets on their way for each worker."""

    timeout_s: float
    """How long one batch may be waited for; 0: for ever."""

    is_fixed: bool
    """Which worker makes a batch is fixed, because its random numbers depend on it."""

    job: Callable[[int], WorkerJob]
    """What the worker of this number is started with, and one that takes its place; WorkerError where none can."""

    came: Callable[[MadeBatch], None] | None = None
    """Called with each batch as it comes from a worker, before it is its turn; a worker's own in their order."""


_Arrived = Message | MadeBatch | ExceptionWrapper
"""What a worker has sent: unpacked when it is its turn, or at once where somebody wants to know of it."""


class PoolWoken(Exception):  # noqa: N818  not an error: somebody wants the thread that waits
    """`wake` was called while `next_made` waited; the pool goes on."""


class WorkerPool:
    """Worker processes that make batches of tickets; not thread safe.

    After a WorkerError, a time-out or an interrupt the pool is closed; after an error of the dataset it goes on.
    """

    def __init__(self, spec: PoolSpec, quarantined: list[QuarantinedSample]) -> None:
        """Start the workers. `quarantined` are left out from the begin; what the pool finds is added to it."""
        self._spec = spec
        self._machine = PoolMachine(spec.worker_count, spec.prefetch, is_fixed=spec.is_fixed)
        self._machine.quarantined.update({each.sample: each.deaths for each in quarantined})
        self._quarantined = quarantined
        self._workers: list[WorkerProcess] = []
        self._poll, self._death_poll = select.poll(), select.poll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._by_fd: dict[int, int] = {}
        self._source: Iterator[AnyTicket] | None = None
        self._tickets: dict[int, AnyTicket] = {}
        self._left_out: dict[int, tuple[int, ...]] = {}
        self._arrived: dict[int, _Arrived] = {}
        self._good_id: int | None = None
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end_pool, self._workers, self._wake_fd, self._owner_pid)
        try:
            for worker in range(spec.worker_count):
                self._workers.append(WorkerProcess(spec.context, spec.job(worker)))
                self._watch(worker)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it can make batches."""
        return self._finalizer.alive

    @property
    def pids(self) -> list[int]:
        """The processes of the workers, by number of the worker."""
        return [each.pid for each in self._workers]

    def begin(self, tickets: Iterator[AnyTicket]) -> None:
        """Start on other tickets; what was not handed out of the ones before is dropped."""
        self._check_owner()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)  # meant for who waited in the run before
        floor = self._machine.begin()
        for worker in self._workers:
            worker.void_below(floor)
        self._drop_all()
        self._source = tickets
        self._refill()

    def next_made(self) -> MadeBatch | None:
        """Return the next ticket's batch, or None after the last.

        Raises:
            WorkerError: workers die as often as they are replaced, or cannot start.
            WorkerTimeoutError: the batch took longer than `timeout_s`.
            PoolWoken: `wake` was called.
        Exception: what the dataset, collate_fn or worker_init_fn raised, with the worker's traceback.
        """
        self._check_owner()
        try:
            number = self._machine.head
            arrived = self._next_arrived()
        except PoolWoken:
            raise
        except BaseException:
            self.close(deadline_s=0.0)
            raise
        if arrived is None:
            return None
        return self._made(number, arrived)

    # -- tickets as they come ------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Tickets that are being made, or made and not taken."""
        return self._machine.count

    def submit(self, ticket: Ticket) -> int:
        """Have a ticket made, while fewer than the pool's window are; return the number that `results` gives it."""
        self._check_owner()
        return self._add(ticket)

    def waitables(self) -> list[int]:
        """Return descriptors of which one is readable when `results` has something to do."""
        return list(self._by_fd)

    def results(self) -> list[tuple[int, MadeBatch | Exception]]:
        """Return what is made, by number, in any order; what the dataset raised stands in the place of its batch.

        Raises:
            WorkerError: workers die as often as they are replaced, or cannot start.
        """
        self._check_owner()
        try:
            self._wait(0.0)
        except BaseException:
            self.close(deadline_s=0.0)
            raise
        return [(number, self._taken(number)) for number in list(self._arrived)]

    def doing(self, number: int) -> str:
        """Return what the worker of a ticket is at, for messages."""
        process = self._workers[self._machine.worker_of(number)]
        return f"worker {process.worker} (pid {process.pid}) is still {self._doing(*process.at)}"

    def quarantine(self, found: QuarantinedSample) -> None:
        """Leave a sample out from now on that others have found to kill workers."""
        if found.sample not in self._machine.quarantined:
            self._machine.quarantined[found.sample] = found.deaths
            self._quarantined.append(found)

    def _taken(self, number: int) -> MadeBatch | Exception:
        self._machine.hand(number)
        try:
            return self._made(number, self._arrived.pop(number))
        except Exception as error:  # noqa: BLE001  whatever the dataset raises; it belongs to this ticket
            return error

    # -- both ----------------------------------------------------------------------------------------------------

    def _made(self, number: int, arrived: _Arrived) -> MadeBatch:
        left_out, ticket = self._left_out.pop(number, ()), self._tickets.pop(number)
        made = _unpacked(arrived)
        if isinstance(made, ExceptionWrapper):
            made.reraise()
        if left_out:
            made = made._replace(left_out=left_out, is_stand_in=len(left_out) == len(ticket.ids))
        if made.ids.size:
            self._good_id = int(made.ids[0])
        return made

    def _add(self, ticket: AnyTicket) -> int:
        assign = self._machine.add(ticket.ids, only=ticket.worker)
        self._tickets[assign.number] = ticket
        self._send(assign)
        return assign.number

    def pause(self) -> None:
        """Drop everything that is being made; `begin` goes on."""
        if self.is_open and os.getpid() == self._owner_pid:
            self.begin(iter(()))

    def wake(self) -> None:
        """Let a `next_made` that waits in another thread, or the next one that has to, raise PoolWoken."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """End the workers; they may finish their present sample within the deadline. Idempotent."""
        if self._finalizer.detach() is not None:
            self._drop_all()
            _end_pool(self._workers, self._wake_fd, self._owner_pid, deadline_s)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise UsageError(
                f"the workers of this iterator belong to process {self._owner_pid}, this is {os.getpid()}",
                hint="make a new iterator after a fork",
            )

    # -- the next batch ------------------------------------------------------------------------------------------

    def _next_arrived(self) -> _Arrived | None:
        machine, deadline = self._machine, None
        if machine.is_idle:
            return None
        number = machine.head
        while not machine.is_made(number):
            if self._receive_one(machine.worker_of(number)):
                continue
            if deadline is None:
                deadline = time.monotonic() + (self._spec.timeout_s or LONG_WAIT_S)
            if not self._wait(deadline):
                self._say_who_is_late()
                deadline = float("inf")
        machine.hand(number)
        self._refill()
        return self._arrived.pop(number)

    def _receive_one(self, worker: int) -> bool:
        """Take one message of a worker, if there is one; tell whether anything has changed."""
        try:
            message = self._workers[worker].receive_nowait()
        except Ended:
            self._bury(worker)
            return True
        if message is not None:
            self._take(worker, message)
        return message is not None

    def _take(self, worker: int, message: Message) -> None:
        if message.kind is Kind.READY:
            self._machine.ready(worker)
        elif message.kind is Kind.FAILED_START:
            cast(ExceptionWrapper, unpack(message.body, message.fds)).reraise()
        elif self._machine.made(worker, message.number):
            self._arrived[message.number] = message if self._spec.came is None else self._told(message)
        else:
            message.close()

    def _told(self, message: Message) -> MadeBatch | ExceptionWrapper:
        """Unpack what a worker sent, and tell whoever wants to know of it."""
        made = _unpacked(message)
        if self._spec.came is not None and isinstance(made, MadeBatch):
            self._spec.came(made)
        return made

    def _wait(self, deadline: float) -> bool:
        """Wait until something comes or somebody dies; False at the deadline."""
        left_ms = None if deadline == float("inf") else max(0.0, deadline - time.monotonic()) * 1000
        for process in self._workers:  # one that passes over void tickets makes room without a word
            self._poll.modify(process.sock.fileno(), select.POLLIN | select.POLLOUT * process.has_backlog)
        events = self._poll.poll(left_ms)
        if any(fd == self._wake_fd for fd, _ in events):
            os.eventfd_read(self._wake_fd)
            raise PoolWoken
        for worker in {self._by_fd[fd] for fd, _ in events}:
            self._drain(worker)
        return bool(events)

    def _drain(self, worker: int) -> None:
        """Take all that a worker has sent; bury it if it is dead."""
        process = self._workers[worker]
        process.flush()
        has_died = bool(_ready(self._death_poll, process.death_fd))
        try:
            while message := process.receive_nowait():
                self._take(worker, message)
        except Ended:
            has_died = True
        if has_died:
            self._bury(worker)

    def _refill(self) -> None:
        """Send tickets until enough are on their way; replace the dead."""
        for fd, _ in self._death_poll.poll(0):
            self._drain(self._by_fd[fd])
        while self._source is not None and self._machine.has_room:
            ticket = next(self._source, None)
            if ticket is None:
                self._source = None
                return
            self._add(ticket)

    def _send(self, assign: Assign) -> None:
        ticket = self._tickets[assign.number]
        if assign.left_out and isinstance(ticket, Ticket):
            left = [each for each in ticket.ids if each not in assign.left_out]
            self._left_out[assign.number] = tuple(each for each in ticket.ids if each in assign.left_out)
            if not left:
                left = [self._stand_in(ticket)]
                self._machine.stands_in(assign.number, left[0])
            ticket = ticket._replace(ids=left)
        kind = Kind.SOLO_TICKET if assign.is_solo else Kind.TICKET
        self._workers[assign.worker].post(kind, assign.number, _body_of(ticket))

    def _stand_in(self, ticket: Ticket) -> int:
        """Return a sample to hand out, with weight 0, in the place of a batch that would be empty."""
        if self._good_id is not None and self._good_id not in self._machine.quarantined:
            return self._good_id
        others = (each for job in self._tickets.values() for each in job.ids)
        good = next((each for each in others if each not in self._machine.quarantined), None)
        if good is None:
            raise WorkerError(
                f"every sample of the batch at {ticket.cursor} kills workers, and no other has been read yet",
                hint="look at the dataset; loader.quarantined names them",
            )
        return good

    # -- deaths --------------------------------------------------------------------------------------------------

    def _bury(self, worker: int) -> None:
        """Replace a dead worker, all of whose messages were taken."""
        process = self._workers[worker]
        number, place = process.at
        self._unwatch(worker)
        was_starting, exit_ = process.is_starting, process.bury()
        doing = self._doing(number, place)
        logger.warning(
            "loader_worker_died worker=%d pid=%d exit=%r doing=%r", worker, process.pid, str(exit_), doing
        )
        if was_starting and exit_.code is not None and exit_.code >= 0:
            raise WorkerError(
                f"DataLoader worker {worker} (pid {process.pid}) {exit_} before it had started",
                hint='its own traceback stands above. With "spawn" and "forkserver" workers import your script: keep '
                'what it runs under `if __name__ == "__main__":`',
            )
        commands = self._machine.died(worker, number, place, is_blamed=exit_.is_blamed)
        for command in commands:
            self._execute(command, exit_, doing)

    def _execute(self, command: Command, exit_: Exit, doing: str) -> None:
        match command:
            case Assign():
                self._send(command)
            case Replace(worker):
                self._workers[worker] = WorkerProcess(self._spec.context, self._spec.job(worker))
                self._workers[worker].void_below(self._machine.head)
                self._watch(worker)
            case Quarantine(sample, deaths):
                self._quarantined.append(QuarantinedSample(sample, deaths, str(exit_)))
                warnings.warn(
                    f"sample {sample} is quarantined: {deaths} workers died while they read it, the last one "
                    f"{exit_}. It is left out of its batch from now on, and counted so in the ledger",
                    RuntimeWarning,
                    stacklevel=2,
                )
            case GiveUp(reason, deaths, ids):
                self._give_up(reason, deaths, ids, f"the last one {exit_} {doing}")

    @staticmethod
    def _give_up(reason: Hopeless, deaths: int, ids: tuple[int, ...], last: str) -> NoReturn:
        match reason:
            case Hopeless.START:
                message = f"{deaths} DataLoader workers in a row died before they had started, {last}"
                hint = "look at the memory that a worker needs for its copy of the dataset"
            case Hopeless.COLLATE:
                message = (
                    f"{deaths} DataLoader workers died over the batch of samples {_shortened(ids)}, {last}"
                )
                hint = "look at collate_fn, and at the memory that a batch needs"
            case Hopeless.STREAM:
                message = f"{deaths} DataLoader workers died over the same batch of a stream, {last}"
                hint = "nobody can read on behind it: look at the dataset there, and at the memory that a batch needs"
            case Hopeless.BARREN:
                message = f"{deaths} DataLoader workers died while no batch was made, {last}"
                hint = "look at the dataset and at the memory that workers need (dmesg names what the kernel killed)"
            case Hopeless.QUARANTINED:
                message = f"{deaths} samples kill workers, {last}"
                hint = "so many are no accident: look at the dataset"
        raise WorkerError(message, hint=hint)

    def _say_who_is_late(self) -> None:
        doing = self.doing(self._machine.head)
        if self._spec.timeout_s:
            raise WorkerTimeoutError(
                f"DataLoader timed out after {self._spec.timeout_s:g} seconds: {doing}",
                hint="raise timeout=, or look at what the dataset waits for there",
            )
        logger.warning("loader_waits_long seconds=%d: %s", LONG_WAIT_S, doing)

    def _doing(self, number: int, place: int) -> str:
        ids = self._machine.sent_ids(number)
        if place == Phase.START:
            return "starting"
        ticket = self._tickets.get(number)
        if isinstance(ticket, StreamTicket):
            return _doing_of_stream(ticket, place)
        if place == Phase.IDLE or not ids:
            return "between batches"
        if 0 <= place < len(ids):
            return f"reading sample {ids[place]}"
        words: dict[int, str] = {Phase.COLLATE: "collating", Phase.SEND: "sending"}
        what = words.get(place, "reading")
        return f"{what} the batch of samples {_shortened(ids)}"

    # -- descriptors ---------------------------------------------------------------------------------------------

    def _watch(self, worker: int) -> None:
        process = self._workers[worker]
        for fd in (process.sock.fileno(), process.death_fd):
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)
        self._death_poll.register(process.death_fd, select.POLLIN)

    def _unwatch(self, worker: int) -> None:
        process = self._workers[worker]
        for fd in (process.sock.fileno(), process.death_fd):
            del self._by_fd[fd]
            self._poll.unregister(fd)
        self._death_poll.unregister(process.death_fd)

    def _drop_all(self) -> None:
        for arrived in self._arrived.values():
            if isinstance(arrived, Message):
                arrived.close()
        self._arrived.clear()
        self._tickets.clear()
        self._left_out.clear()
        self._source = None


def _end_pool(
    workers: list[WorkerProcess], wake_fd: int, owner_pid: int, deadline_s: float = CLOSE_DEADLINE_S
) -> None:
    try:
        end_workers(workers, owner_pid, deadline_s)
    finally:
        os.close(wake_fd)


def _unpacked(arrived: _Arrived) -> MadeBatch | ExceptionWrapper:
    return unpack(arrived.body, arrived.fds) if isinstance(arrived, Message) else arrived


def _body_of(ticket: AnyTicket) -> bytes:
    """Return a ticket as bytes; a stream's state may hold tensors, which go with them."""
    if isinstance(ticket, StreamTicket):
        return Packed(ticket, fds_max=0).body
    return bytes(ForkingPickler.dumps(ticket))


def _doing_of_stream(ticket: StreamTicket, place: int) -> str:
    words: dict[int, str] = {Phase.COLLATE: "collating a batch", Phase.SEND: "sending a batch"}
    what = f"reading sample {place}" if place >= 0 else words.get(place, "between batches")
    return f"{what} of share {ticket.share} of the stream"


def _ready(poll: "select.poll", fd: int) -> bool:
    return any(each == fd for each, _ in poll.poll(0))


def _shortened(ids: Sequence[int]) -> str:
    text = ", ".join(str(each) for each in ids[:8])
    return f"[{text}, … {len(ids)} in all]" if len(ids) > 8 else f"[{text}]"
