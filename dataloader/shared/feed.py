"""Where a job's batches come from: the group's daemon where it can, its own preparers where it must.

With worker processes a thread keeps it going beside training, so that what this job was leased reaches the others
while it computes. Without, it goes on only while the loop waits for a batch, and helps the others meanwhile.
"""

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import cast

from ...core.errors import CorruptDataError, DaemonUnavailableError, EverstepError, UsageError
from ...proto.frames import Done, Failure
from ...proto.share_frames import (
    FailShare,
    LocateShare,
    OfferShare,
    ShareLeased,
    SharePlace,
    SharePrivate,
    ShareReady,
    TookShare,
    WantShare,
)
from ..batch_maker import MadeBatch, Ticket
from .batch_tree import EncodedBatch, decode_batch
from .link import Answer, ShareLink
from .preparers import Prepared, Preparer
from .walk_plan import Walk

logger = logging.getLogger(__name__)

DEPTH = 2
"""Batches that lie ready for the loop, where a thread fetches them."""

Obtained = MadeBatch | BaseException


class Feed:
    """The batches of walks, in their order. `begin` and `next` are for the loop's thread."""

    def __init__(
        self, preparer: Preparer, ticket: Callable[[int], Ticket], *, pin_memory: bool, threaded: bool
    ) -> None:
        self.prepared_count = 0
        """Batches that this job prepared, for itself or for all."""
        self.received_count = 0
        """Batches that came ready from the group."""
        self.classes: dict[str, type] = {}
        self._preparer, self._ticket, self._pin_memory = preparer, ticket, pin_memory
        self._link: ShareLink | None = None
        self._walk: Walk | None = None
        self._index = self._given = 0
        """Of the walk: what is to be obtained next, and how many the loop has."""
        self._obtained: dict[int, Obtained] = {}
        self._own: set[int] = set()
        self._leases: set[int] = set()
        self._staged: deque[tuple[int, EncodedBatch | bytes]] = deque()
        self._publishing = 0
        self._want: tuple[int, int] | None = None
        """Request and batch that wait for an answer."""
        self._private = (0, 0)
        self._offered = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = (
            threading.Thread(target=self._run, name="everstep-share", daemon=True) if threaded else None
        )
        self._depth = DEPTH if threaded else 1

    @property
    def is_shared(self) -> bool:
        """Tell whether there is a daemon that this job shares by."""
        return self._link is not None

    def use(self, link: ShareLink) -> None:
        """Share by this connection, which has joined, from now on; the feed closes it."""
        with self._changed:
            self._link = link
            self._want, self._offered, self._publishing, self._private = None, 0, 0, (0, 0)
        self._poke()

    def put(self, g: int, made: MadeBatch) -> None:
        """Take over a batch that was prepared before."""
        with self._changed:
            self._obtained[g] = made

    def locate(self) -> int:
        """Return the batch at which the slowest of the other jobs is, or -1 where there is none to be found."""
        with self._changed:
            if self._link is None:
                return -1
            try:
                reply, _ = self._link.ask(lambda number: LocateShare(request_id=number))
            except DaemonUnavailableError as error:
                self._go_alone(error)
                return -1
        self._poke()  # what else came meanwhile waits for the thread
        assert isinstance(reply, SharePlace), reply
        return reply.batch

    def begin(self, walk: Walk) -> None:
        """Go through a walk from now on."""
        with self._changed:
            near = {walk.batch(index) for index in range(min(len(walk), self._preparer.capacity + DEPTH))}
            kept = {g: each for g, each in self._obtained.items() if not isinstance(each, BaseException)}
            self._obtained = {g: each for g, each in kept.items() if g in near}
            self._own &= near
            self._walk, self._index, self._given = walk, 0, 0
            self._want = None
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        self._poke()

    def next(self) -> MadeBatch:
        """Return the next batch of the walk; raises what its samples raised."""
        with self._changed:
            walk = self._walk
            assert walk is not None
            g = walk.batch(self._given)
            self._until(lambda: g in self._obtained)
            while self._thread is None and self._link is not None and (self._leases or self._staged):
                self._turn()  # others wait for what this job was leased while it waited
            found = self._obtained.pop(g)
            self._given += 1
            self._index = max(self._index, self._given)
        self._poke()
        if isinstance(found, BaseException):
            raise found
        return found

    def first(self, g: int) -> MadeBatch:
        """Prepare a batch before anything else, by itself."""
        with self._changed:
            self._submit_own(g)
            while g not in self._obtained:
                self._turn()
            found = self._obtained.pop(g)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Leave the group and end preparers and thread. Again is nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._poke()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._preparer.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        os.close(self._wake)

    # -- the loop's thread

    def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._failure is not None:
                raise self._failure
            if self._thread is None:
                self._turn()
            else:
                self._changed.wait()

    def _poke(self) -> None:
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)

    # -- one turn

    def _run(self) -> None:
        try:
            while not self._is_closed:
                with self._changed:
                    self._prepare_turn()
                    waitables = self._waitables()
                wait([*waitables, self._wake], self._patience())
                with self._changed:
                    self._finish_turn()
                    self._changed.notify_all()
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    continue
        except BaseException as error:  # noqa: BLE001  raised in the loop
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _turn(self) -> None:
        self._prepare_turn()
        wait(self._waitables(), self._patience())
        self._finish_turn()

    def _waitables(self) -> list[int]:
        link = [] if self._link is None else [self._link.fileno()]
        return [*self._preparer.waitables(), *link]

    def _patience(self) -> float | None:
        return 0 if self._preparer.has_work else None

    def _prepare_turn(self) -> None:
        try:
            self._ask()
            self._publish()
            self._offer()
        except DaemonUnavailableError as error:
            self._go_alone(error)
            self._ask()

    def _finish_turn(self) -> None:
        answers: deque[Answer] = deque()
        try:
            answers.extend(self._link.frames() if self._link is not None else ())
            while answers:
                self._on_frame(answers.popleft())
        except DaemonUnavailableError as error:
            for _, fd in answers:
                if fd is not None:
                    os.close(fd)
            self._go_alone(error)
        for prepared in self._preparer.results():
            self._on_prepared(prepared)

    def _ask(self) -> None:
        """Ask for the next batch, or prepare it and those after it, as far as they are this job's own."""
        walk = self._walk
        if walk is None:
            return
        while self._index < len(walk) and walk.batch(self._index) in self._obtained:
            self._index += 1
        if self._index >= len(walk):
            return
        g = walk.batch(self._index)
        if self._is_private(g):
            self._prepare_own(walk)
        elif self._want is None and self._link is not None and self._index - self._given < self._depth:
            number = self._link.number()
            self._want = (number, g)
            self._link.send(WantShare(request_id=number, batch=g))

    def _prepare_own(self, walk: Walk) -> None:
        last = min(len(walk), self._given + self._preparer.capacity + self._depth)
        for index in range(self._index, last):
            g = walk.batch(index)
            if not self._is_private(g):
                return
            if g not in self._obtained and g not in self._own:
                if self._load() >= self._preparer.capacity:
                    return
                self._submit_own(g)

    def _submit_own(self, g: int) -> None:
        self._own.add(g)
        if g not in self._leases:
            self._preparer.submit(g, self._ticket(g))

    def _offer(self) -> None:
        """Say how many batches this job can prepare for the group."""
        if self._link is None or self._walk is None:
            return
        is_waiting = self._want is not None
        is_busy = bool(self._own) or (self._thread is None and not is_waiting)
        free = 0 if is_busy else max(0, self._preparer.capacity - self._load())
        if free != self._offered:
            self._offered = free
            self._link.send(OfferShare(count=free))

    def _load(self) -> int:
        return self._preparer.count + len(self._staged) + (self._publishing > 0)

    def _publish(self) -> None:
        if self._link is None or self._publishing or not self._staged:
            return
        g, encoded = self._staged.popleft()
        try:
            self._publishing = self._link.publish(g, encoded)
        except DaemonUnavailableError:
            raise
        except EverstepError as error:
            logger.debug("share_not_published batch=%d reason=%s", g, error)
            self._link.send(FailShare(batch=g))

    # -- what came

    def _on_frame(self, answer: Answer) -> None:
        frame, fd = answer
        link = self._link
        assert link is not None
        match frame:
            case ShareLeased():
                self._offered = max(0, self._offered - len(frame.batches))
                for g in frame.batches:
                    if g not in self._own and g not in self._leases:
                        self._preparer.submit(g, self._ticket(g))
                    self._leases.add(g)
            case ShareReady():
                assert fd is not None
                try:
                    if self._want == (frame.re, frame.batch):
                        self._take(frame.batch, fd, frame.size_bytes)
                finally:
                    os.close(fd)
            case SharePrivate() if self._want == (frame.re, frame.batch):
                self._answered()
                self._private = (frame.batch, frame.until)
            case Done() | Failure() if frame.re == self._publishing:
                self._publishing = 0
                if isinstance(frame, Failure):
                    logger.debug("share_refused code=%s message=%s", frame.code, frame.message)
            case _:
                logger.debug("share_frame_unexpected kind=%s", type(frame).__name__)

    def _take(self, g: int, fd: int, size_bytes: int) -> None:
        """Copy a ready batch; one that is not what it should be is prepared here."""
        assert self._link is not None
        self._answered()
        try:
            made = self._decode(g, fd, size_bytes)
        except CorruptDataError as error:
            logger.warning("share_batch_refused batch=%d reason=%s", g, error)
            self._private = (g, g + 1)
            return
        self._obtained[g] = made
        self.received_count += 1
        self._link.send(TookShare(batch=g))

    def _answered(self) -> None:
        self._want = None
        if self._thread is None:
            self._offered = 0  # what was offered held while this job waited

    def _decode(self, g: int, fd: int, size_bytes: int) -> MadeBatch:
        with mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as data, memoryview(data) as view:
            return self._made(g, view)

    def _made(self, g: int, data: memoryview) -> MadeBatch:
        ids, content = decode_batch(data, self.classes, pin_memory=self._pin_memory)
        ticket = self._ticket(g)
        if ids.tolist() != ticket.ids:
            raise CorruptDataError(f"batch {g} has other samples than its place in the order")
        return MadeBatch(ticket.cursor, ids, content)

    def _on_prepared(self, prepared: Prepared) -> None:
        g = prepared.batch
        self.prepared_count += 1
        self.classes.update(prepared.classes)
        if g in self._own:
            self._own.discard(g)
            self._obtained[g] = self._unpacked(prepared)
        if g not in self._leases:
            return
        self._leases.discard(g)
        if self._link is None:
            return
        if prepared.encoded is None:
            try:
                self._link.send(FailShare(batch=g))
            except DaemonUnavailableError as error:
                self._go_alone(error)
        else:
            self._staged.append((g, prepared.encoded))

    def _unpacked(self, prepared: Prepared) -> Obtained:
        if prepared.encoded is None:
            if isinstance(prepared.error, StopIteration):
                return UsageError(
                    f"the dataset or collate_fn raised StopIteration in batch {prepared.batch}",
                    hint="raise another error: this one means the end of the epoch",
                )
            return cast(BaseException, prepared.error)
        encoded = prepared.encoded
        content = encoded.to_bytes() if isinstance(encoded, EncodedBatch) else encoded
        try:
            return self._made(prepared.batch, memoryview(content))
        except CorruptDataError as error:
            return error

    def _is_private(self, g: int) -> bool:
        return self._link is None or self._private[0] <= g < self._private[1]

    def _go_alone(self, error: DaemonUnavailableError) -> None:
        """The daemon is gone: from now on this job prepares all for itself, in the same order."""
        assert self._link is not None
        self._link.close()
        self._link = None
        logger.warning(
            "share_alone: %s; every job of the group now prepares its batches for itself", error.message
        )
        walk = self._walk
        last = 0 if walk is None else min(len(walk), self._given + self._preparer.capacity + self._depth)
        near: set[int] = set() if walk is None else {walk.batch(index) for index in range(self._given, last)}
        self._own |= self._leases & near
        for g, encoded in self._staged:
            if g in near and g not in self._obtained:
                self._obtained[g] = self._unpacked(Prepared(batch=g, encoded=encoded))
        self._leases.clear()
        self._staged.clear()
        self._want, self._publishing, self._offered = None, 0, 0
