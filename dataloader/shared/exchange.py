"""What this job gives to its group and gets from it, over one connection: offers, leases, prepared batches."""

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence

from ...core.errors import DaemonUnavailableError, EverstepError
from ...proto.frames import Done, Failure, Reply
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
from ..workers.pool import QuarantinedSample
from .batch_bytes import BatchBytes
from .link import ShareLink

logger = logging.getLogger(__name__)

LeftOut = Sequence[QuarantinedSample]
Take = Callable[[int, int, int, LeftOut], bool]
"""Copies a ready batch (number, descriptor, bytes, what is not in it); False: it is not what it should be."""

Learn = Callable[[LeftOut], None]
"""Hears which samples the group leaves out."""


class Exchange:
    """One job's part in its group; not thread safe. Every method may raise DaemonUnavailableError."""

    def __init__(self, link: ShareLink, *, helps_while_waiting: bool) -> None:
        self.leases: set[int] = set()
        """Batches that this job is to prepare for the group."""
        self.staged: deque[tuple[int, BatchBytes, LeftOut]] = deque()
        """What it has prepared, and the daemon has not got."""
        self._link, self._helps_while_waiting = link, helps_while_waiting
        self._publishing = 0
        self._want: tuple[int, int] | None = None
        """Request and batch that wait for an answer."""
        self._private = range(0)
        self._offered = 0
        self._taken: int | None = None
        """What the daemon does not know yet that this job took."""

    def fileno(self) -> int:
        """Return what becomes readable when something comes."""
        return self._link.fileno()

    def close(self) -> None:
        """Leave the group."""
        self._link.close()

    @property
    def is_waiting(self) -> bool:
        """Tell whether a batch was asked for."""
        return self._want is not None

    @property
    def count(self) -> int:
        """Prepared batches on their way to the daemon."""
        return len(self.staged) + (self._publishing > 0)

    def is_private(self, g: int) -> bool:
        """Tell whether this job was told to prepare a batch for itself."""
        return g in self._private

    def locate(self) -> int:
        """Return the batch at which the slowest of the other jobs is, or -1 where there is none to be found."""
        reply, _ = self._link.ask(lambda number: LocateShare(request_id=number))
        assert isinstance(reply, SharePlace), reply
        return reply.batch

    def want(self, g: int) -> None:
        """Ask for a batch, unless another was asked for. That says, too, that the one before it was taken."""
        if self._want is None:
            self._taken = None
            self._want = (self._link.number(), g)
            self._link.send(WantShare(request_id=self._want[0], batch=g))

    def say_taken(self) -> None:
        """Say what was taken, where nothing is asked for that would say it."""
        if self._taken is not None:
            self._link.send(TookShare(batch=self._taken))
            self._taken = None

    def want_nothing(self) -> None:
        """Another batch is next: the answer that comes counts no more."""
        self._want = None

    def offer(self, count: int) -> None:
        """Say how many batches this job can prepare for the group."""
        if count != self._offered:
            self._offered = count
            self._link.send(OfferShare(count=count))

    def give(self, g: int, prepared: BatchBytes | None, left_out: LeftOut = ()) -> None:
        """Hand over what became of a lease; None: it cannot be prepared."""
        self.leases.discard(g)
        if prepared is None:
            self._link.send(FailShare(batch=g))
        else:
            self.staged.append((g, prepared, left_out))
            self.publish()

    def publish(self) -> None:
        """Send the next batch that is staged and can be sent, one at a time."""
        while self.staged and not self._publishing:
            g, prepared, left_out = self.staged.popleft()
            try:
                named = [(each.sample, each.deaths, each.last_exit) for each in left_out]
                self._publishing = self._link.publish(g, prepared, named)
            except DaemonUnavailableError:
                raise
            except EverstepError as error:
                logger.debug("share_not_published batch=%d reason=%s", g, error)
                self._link.send(FailShare(batch=g))

    def receive(self, *, lease: Callable[[int], None], take: Take, learn: Learn) -> None:
        """Do what the daemon says, without waiting for it."""
        answers = deque(self._link.frames())
        try:
            while answers:
                frame, fd = answers.popleft()
                if isinstance(frame, ShareLeased):
                    learn([QuarantinedSample(*each) for each in frame.quarantined])
                    self._on_leased(frame, lease)
                else:
                    self._on_answer(frame, fd, take)
        finally:
            for _, fd in answers:
                if fd is not None:
                    os.close(fd)

    def _on_leased(self, frame: ShareLeased, lease: Callable[[int], None]) -> None:
        self._offered = max(0, self._offered - len(frame.batches))
        for g in frame.batches:
            if g not in self.leases:
                lease(g)
            self.leases.add(g)

    def _on_answer(self, frame: Reply, fd: int | None, take: Take) -> None:
        match frame:
            case ShareReady():
                assert fd is not None
                try:
                    if self._want == (frame.re, frame.batch):
                        self._take(frame, fd, take)
                finally:
                    os.close(fd)
            case SharePrivate() if self._want == (frame.re, frame.batch):
                self._answered()
                self._private = range(frame.batch, frame.until)
            case Done() | Failure() if frame.re == self._publishing:
                self._publishing = 0
                if isinstance(frame, Failure):
                    logger.debug("share_refused code=%s message=%s", frame.code, frame.message)
                self.publish()
            case _:
                logger.debug("share_frame_unexpected kind=%s", type(frame).__name__)

    def _take(self, frame: ShareReady, fd: int, take: Take) -> None:
        self._answered()
        left_out = [QuarantinedSample(*each) for each in frame.left_out]
        if take(frame.batch, fd, frame.size_bytes, left_out):
            self._taken = frame.batch
            if self._helps_while_waiting:  # the next turn may be long in coming
                self.say_taken()
        else:
            self._private = range(frame.batch, frame.batch + 1)

    def _answered(self) -> None:
        self._want = None
        if self._helps_while_waiting:
            self._offered = 0  # what was offered held while this job waited
