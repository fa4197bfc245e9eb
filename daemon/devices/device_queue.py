"""The transfers of one device: those of all ranks of the node go through it, in turns by bytes (turns_machine.py)."""

import threading
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ...checkpoint.engine import Engine, Transfer, TransferDone, TransferKind
from ...checkpoint.engine_choice import EngineChoice
from ...checkpoint.engine_lanes import LanedEngine
from ...core.errors import DeadlineError
from ..blocking import started_threads
from ..processor_class import take_turn_at_once
from ..watchdog_machine import Lane
from .queue_counts import QueueCounts
from .turns_machine import Turns, Urgency, cut

QUEUE_LANES = 4
"""So many pieces are under way at once: their 512 MiB are what two whole transfers had in flight (ADR 0034)."""


class DeviceQueue:
    """An Engine that any thread may use: it cuts each transfer into pieces, which the device's own threads move.

    What is read through it is a restore's, what is read through `beside` somebody's who can wait. Whose memory a
    transfer needs says whose it is: each rank has an arena of its own.

    Raises:
        LimitError: its threads cannot be started; later on none is.
    """

    def __init__(self, choice: EngineChoice) -> None:
        self.choice = choice
        with ExitStack() as made:
            self._engine: Engine = LanedEngine(choice.factory, QUEUE_LANES)
            made.callback(self._engine.close)
            self._threads = started_threads(QUEUE_LANES, "everstep-device", take_turn_at_once)
            made.callback(self._threads.shutdown)
            self._forgetting = started_threads(1, "everstep-forget")
            made.pop_all()
        self._lock = threading.Lock()
        self._turns = Turns[_Piece]()
        self._jobs = set[_Job]()
        self._waiting_count = self._ended_count = 0
        self.counts = QueueCounts()
        self.beside: Engine = _Beside(self)

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._engine.name

    @property
    def lane(self) -> Lane:
        """Return how far it is; asked by any thread."""
        with self._lock:
            return Lane(waiting=self._waiting_count, ended=self._ended_count)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the device or are under way."""
        return self.counts.read.queued_bytes + self.counts.write.queued_bytes

    def run(self, transfer: Transfer) -> TransferDone:
        """Block until the transfer has had its turns and every byte has moved; `busy_s` counts from the first turn."""
        return self.move(transfer, Urgency.RESTORE if transfer.kind is TransferKind.READ else Urgency.OTHER)

    def move(self, transfer: Transfer, urgency: Urgency) -> TransferDone:
        """As `run`, for whom it is urgent or not."""
        pieces = [
            replace(
                transfer,
                arena_offset_bytes=transfer.arena_offset_bytes + offset,
                file_offset_bytes=transfer.file_offset_bytes + offset,
                length_bytes=length,
            )
            for offset, length in cut(transfer.length_bytes)
        ]
        job, counts = _Job(transfer, len(pieces)), self.counts.of(transfer.kind)
        with self._lock:
            self._jobs.add(job)
            self._waiting_count += len(pieces)
            counts.queued_bytes += transfer.length_bytes
            for piece in pieces:
                self._turns.add(transfer.arena_fd, urgency, piece.length_bytes, _Piece(job, piece))
        for _ in pieces:
            self._threads.submit(self._serve_next)
        try:
            done = job.done.result()
        except BaseException:
            with self._lock:
                counts.failed_count += 1
            raise
        else:
            with self._lock:
                counts.moved_bytes += transfer.length_bytes
            return done
        finally:
            with self._lock:
                self._jobs.remove(job)
                counts.queued_bytes -= transfer.length_bytes
                counts.waited_s += job.waited_s

    def _serve_next(self) -> None:
        """Move one piece: as many calls wait as pieces do, and which one is taken is decided now."""
        with self._lock:
            piece = self._turns.take()
        began_s = time.perf_counter()
        try:
            piece.job.move(piece.transfer, self._engine)
        finally:
            with self._lock:
                self._waiting_count -= 1
                self._ended_count += 1
                self.counts.of(piece.transfer.kind).busy_s += time.perf_counter() - began_s

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena, after its transfers."""
        self.forgetting(arena_fd).result()

    def forgetting(self, arena_fd: int) -> Future[None]:
        """Begin to let go of an arena: done after its transfers, which may take seconds."""
        with self._lock:
            before = [job.done for job in self._jobs if job.transfer.arena_fd == arena_fd]
        return self._forgetting.submit(self._forget, arena_fd, before)

    def _forget(self, arena_fd: int, before: "list[Future[TransferDone]]") -> None:
        wait(before)
        self._engine.forget(arena_fd)

    def close(self) -> None:
        """Finish what is queued, release the engines and end the threads."""
        self._threads.shutdown()
        self._forgetting.shutdown()
        self._engine.close()


class _Beside:
    """The same queue for those who read and can wait."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._queue.name

    def run(self, transfer: Transfer) -> TransferDone:
        """As the queue's `run`, in turns with those who write."""
        return self._queue.move(transfer, Urgency.OTHER)

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena, after its transfers."""
        self._queue.forget(arena_fd)

    def close(self) -> None:
        """Leave the queue to its owner."""


class _Job:
    """A transfer on its way, piece by piece."""

    def __init__(self, transfer: Transfer, piece_count: int) -> None:
        self.transfer = transfer
        self.done = Future[TransferDone]()
        self._lock = threading.Lock()
        self._left = piece_count
        self._asked_s = time.perf_counter()
        self._began_s: float | None = None
        self._error: BaseException | None = None

    @property
    def waited_s(self) -> float:
        """From being asked for until its first turn; 0 before that."""
        return 0.0 if self._began_s is None else self._began_s - self._asked_s

    def move(self, piece: Transfer, engine: Engine) -> None:
        """Move a piece, unless another one has failed. The last one to end says how it went."""
        error: BaseException | None = None
        if self._begin():
            try:
                engine.run(piece)
            except BaseException as exc:  # noqa: BLE001 - raised to whoever waits for the transfer
                error = exc
        self._end(error)

    def _begin(self) -> bool:
        with self._lock:
            if self._began_s is None:
                self._began_s = time.perf_counter()
            return self._error is None

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._error is None or isinstance(
                error, DeadlineError
            ):  # the memory is lost: that goes before all
                self._error = error
            self._left -= 1
            if self._left:
                return
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            busy_s = time.perf_counter() - (self._began_s or 0.0)
            self.done.set_result(TransferDone(bytes_moved=self.transfer.length_bytes, busy_s=busy_s))


@dataclass(frozen=True, slots=True)
class _Piece:
    job: _Job
    transfer: Transfer
