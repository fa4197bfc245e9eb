"""What a job does for its next batches, one turn after the other: asks the group, or has its own preparers at it.

No thread and no lock: feed.py says when a turn is.
"""

import logging
import mmap
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ...core.errors import CorruptDataError, DaemonUnavailableError, UsageError
from ..batch_maker import MadeBatch, Ticket
from ..tensor_tree import octets_of
from ..workers.batches import Pinner
from ..workers.pool import QuarantinedSample
from .batch_bytes import BatchBytes, read_batch
from .exchange import Exchange, LeftOut
from .link import ShareLink
from .preparers import Prepared, Preparer
from .walk_plan import Walk

logger = logging.getLogger(__name__)

DEPTH = 2
"""Batches that lie ready for the loop, where a thread fetches them."""

MAPPED_MAX = DEPTH + 2
"""Batches whose tensors lie in the group's memory itself: those that are ready, and two in the loop's hands. Who keeps
more has copies of them, so that a job that keeps all it gets fills its own memory and not the daemon's."""

AGAIN_S = 10.0
"""So long after the daemon was lost, or not found again, it is looked for."""

Obtained = MadeBatch | BaseException

Joined = tuple[ShareLink, LeftOut]
"""A connection that takes part in the group, and what the group leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupplySpec:
    """What batches are made of."""

    ticket: Callable[[int], Ticket]
    """Of a batch, by its number."""
    quarantined: list[QuarantinedSample]
    """The loader's list, to which preparers add."""
    pinner: Pinner | None
    is_threaded: bool


class Supply:
    """The batches of walks: `obtained`, by number, those that are next."""

    def __init__(self, preparer: Preparer, spec: SupplySpec) -> None:
        self.prepared_count = 0
        """Batches that this job prepared, for itself or for all."""
        self.received_count = 0
        """Batches that came ready from the group."""
        self.obtained: dict[int, Obtained] = {}
        self._preparer, self._spec = preparer, spec
        self._classes: dict[str, type] = {}
        """Named tuples that this job's own batches held."""
        self._exchange: Exchange | None = None
        self._again: Callable[[int], Joined | None] | None = None
        self._again_s = 0.0
        self._walk: Walk | None = None
        self._index = self._given = 0
        """Of the walk: what is to be obtained next, and how many the loop has."""
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._own: set[int] = set()
        """Batches that are being prepared for this job."""
        self._depth = DEPTH if spec.is_threaded else 1

    @property
    def is_shared(self) -> bool:
        """Tell whether there is a daemon that this job shares by."""
        return self._exchange is not None

    @property
    def has_duties(self) -> bool:
        """Tell whether others wait for what this job is to prepare."""
        return self._exchange is not None and bool(self._exchange.leases or self._exchange.staged)

    def use(self, joined: Joined, again: Callable[[int], Joined | None]) -> None:
        """Share by this connection from now on. `again` looks for a daemon, should that one go."""
        self._again = again
        self._share(joined)

    def look_later(self, again: Callable[[int], Joined | None]) -> None:
        """Have `again` look for a daemon from now on, every `AGAIN_S` seconds, until there is one."""
        self._again, self._again_s = again, time.monotonic() + AGAIN_S

    def leave(self) -> None:
        """Share no more."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def locate(self) -> int:
        """Return the batch at which the slowest of the other jobs is, or -1 where there is none to be found."""
        try:
            return -1 if self._exchange is None else self._exchange.locate()
        except DaemonUnavailableError as error:
            self._go_alone(error)
            return -1

    def begin(self, walk: Walk) -> None:
        """Go through a walk from now on."""
        self._walk, self._index, self._given = walk, 0, 0
        near = self._near()
        found = self.obtained.items()
        self.obtained = {g: each for g, each in found if g in near and isinstance(each, MadeBatch)}
        self._own &= near
        if self._exchange is not None:
            self._exchange.want_nothing()

    @property
    def next_batch(self) -> int:
        """Return the number of the batch that the loop wants next."""
        assert self._walk is not None
        return self._walk.batch(self._given)

    def hand(self, g: int) -> Obtained:
        """Give a batch that is obtained to the loop."""
        self._given += 1
        self._index = max(self._index, self._given)
        return self.obtained.pop(g)

    def submit_own(self, g: int) -> None:
        """Have a batch prepared for this job."""
        self._own.add(g)
        if self._exchange is None or g not in self._exchange.leases:
            self._preparer.submit(g, self._spec.ticket(g))

    def doing(self, g: int) -> str:
        """Return what is done about a batch, for messages."""
        is_here = g in self._own or self._exchange is None or g in self._exchange.leases
        return self._preparer.doing(g) if is_here else f"another job of the group prepares batch {g}"

    # -- one turn

    def ask_and_offer(self) -> None:
        """Begin a turn."""
        try:
            self._look_for_daemon()
            self._ask()
            if self._exchange is not None:
                self._exchange.say_taken()
            self._offer()
        except DaemonUnavailableError as error:
            self._go_alone(error)
            self._ask()

    def waitables(self) -> list[int]:
        """Return descriptors of which one is readable when `collect` has something to do."""
        exchange = [] if self._exchange is None else [self._exchange.fileno()]
        return [*self._preparer.waitables(), *exchange]

    def collect(self) -> None:
        """End a turn: take what came from the daemon and from the preparers."""
        if self._exchange is not None:
            try:
                self._exchange.receive(lease=self._on_lease, take=self._take, learn=self._learn)
            except DaemonUnavailableError as error:
                self._go_alone(error)
        for prepared in self._preparer.results():
            self._on_prepared(prepared)

    def _ask(self) -> None:
        """Ask for the next batch, or prepare it and those after it, as far as they are this job's own."""
        walk = self._walk
        if walk is None:
            return
        while self._index < len(walk) and walk.batch(self._index) in self.obtained:
            self._index += 1
        if self._index >= len(walk):
            return
        g = walk.batch(self._index)
        if self._exchange is None or self._exchange.is_private(g):
            self._prepare_own(walk)
        elif self._index - self._given < self._depth:
            self._exchange.want(g)

    def _prepare_own(self, walk: Walk) -> None:
        for index in range(self._index, self._last_near(walk)):
            g = walk.batch(index)
            if self._exchange is not None and not self._exchange.is_private(g):
                return
            if g not in self.obtained and g not in self._own:
                if self.load() >= self._preparer.capacity:
                    return
                self.submit_own(g)

    def _offer(self) -> None:
        """Say how many batches this job can prepare for the group."""
        if self._exchange is None or self._walk is None:
            return
        is_busy = bool(self._own) or not (self._spec.is_threaded or self._exchange.is_waiting)
        self._exchange.offer(0 if is_busy else max(0, self._preparer.capacity - self.load()))

    def load(self) -> int:
        """Return how many batches are being prepared here, or are prepared and not yet given to the daemon."""
        return self._preparer.count + (0 if self._exchange is None else self._exchange.count)

    def _near(self) -> set[int]:
        """Return the batches that this job may soon need."""
        walk = self._walk
        if walk is None:
            return set()
        return {walk.batch(index) for index in range(self._given, self._last_near(walk))}

    def _last_near(self, walk: Walk) -> int:
        return min(len(walk), self._given + self._preparer.capacity + self._depth)

    # -- what came

    def _on_lease(self, g: int) -> None:
        if g not in self._own:
            self._preparer.submit(g, self._spec.ticket(g))

    def _take(self, g: int, fd: int, size_bytes: int, left_out: LeftOut) -> bool:
        """Take a ready batch; False where it is not what it should be."""
        self._learn(left_out)
        # Nobody can change these bytes any more (daemon/shared/staging.py); a page that is written to is copied first.
        pages = mmap.mmap(fd, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        is_ours = len(self._mapped) < MAPPED_MAX
        try:
            self.obtained[g] = self._read(
                g, memoryview(pages), {each.sample for each in left_out}, is_ours=is_ours
            )
        except CorruptDataError as error:
            logger.warning("share_batch_refused batch=%d reason=%s", g, error)
            return False
        if is_ours:
            self._mapped.add(pages)
        self.received_count += 1
        return True

    def _on_prepared(self, prepared: Prepared) -> None:
        g, made = prepared
        self.prepared_count += 1
        if g in self._own:
            self._own.discard(g)
            self.obtained[g] = self._outcome(g, made)
        if self._exchange is None or g not in self._exchange.leases:
            return
        try:
            if isinstance(made, MadeBatch):
                left_out = [each for each in self._spec.quarantined if each.sample in made.left_out]
                self._exchange.give(g, cast(BatchBytes, made.data), left_out)
            else:
                self._exchange.give(g, None)
        except DaemonUnavailableError as error:
            self._go_alone(error)

    def _outcome(self, g: int, made: MadeBatch | Exception) -> Obtained:
        if isinstance(made, MadeBatch):
            return self._unpacked(g, cast(BatchBytes, made.data), set(made.left_out))
        if isinstance(made, StopIteration):
            return UsageError(
                f"the dataset or collate_fn raised StopIteration in batch {g}",
                hint="raise another error: this one means the end of the epoch",
            )
        return made

    def _unpacked(self, g: int, prepared: BatchBytes, left_out: set[int]) -> Obtained:
        self._classes |= prepared.classes
        try:
            return self._read(g, octets_of(prepared.octets).data, left_out, is_ours=False)
        except CorruptDataError as error:
            return error

    def _read(self, g: int, data: memoryview, left_out: set[int], *, is_ours: bool) -> MadeBatch:
        ticket, is_pinned = self._spec.ticket(g), self._spec.pinner is not None
        return read_batch(data, ticket, left_out, self._classes, is_ours=is_ours, pin_memory=is_pinned)

    def _learn(self, left_out: LeftOut) -> None:
        """Leave out, from now on, what other jobs of the group found to kill workers."""
        known = {each.sample for each in self._spec.quarantined}
        for each in left_out:
            if each.sample not in known:
                self._preparer.quarantine(each)
                warnings.warn(
                    f"sample {each.sample} is quarantined: {each.deaths} workers of another job of the group died "
                    f"while they read it, the last one {each.last_exit}. It is left out of its batch in all jobs, and "
                    "counted so in the ledger",
                    RuntimeWarning,
                    stacklevel=2,
                )

    # -- with a group and without

    def _share(self, joined: Joined) -> None:
        link, left_out = joined
        self._exchange = Exchange(link, helps_while_waiting=not self._spec.is_threaded)
        self._learn(left_out)

    def _look_for_daemon(self) -> None:
        """Come into the group again, in mid-epoch, if the daemon that went has come back."""
        walk, again, now_s = self._walk, self._again, time.monotonic()
        if self._exchange is not None or again is None or now_s < self._again_s:
            return
        if walk is None or self._index >= len(walk):
            return
        self._again_s = now_s + AGAIN_S
        try:
            joined = again(walk.batch(self._index))
        except UsageError as error:  # by now the group is another one
            logger.warning("share_alone: %s", error)
            self._again = None
        else:
            if joined is not None:
                self._share(joined)

    def _go_alone(self, error: DaemonUnavailableError) -> None:
        """The daemon is gone: from now on this job prepares all for itself, in the same order."""
        exchange = self._exchange
        assert exchange is not None
        self.leave()
        self._again_s = time.monotonic() + AGAIN_S
        logger.warning(
            "share_alone: %s; every job of the group now prepares its batches for itself", error.message
        )
        near = self._near()
        self._own |= exchange.leases & near
        for g, prepared, left_out in exchange.staged:
            if g in near and g not in self.obtained:
                self.obtained[g] = self._unpacked(g, prepared, {each.sample for each in left_out})
