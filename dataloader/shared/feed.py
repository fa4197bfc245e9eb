"""When a job's batches are seen to: in a thread beside training, or while the loop waits for one.

With worker processes a thread keeps it going, so that what this job was leased reaches the others while it computes.
Without, it goes on only while the loop waits for a batch, and helps the others meanwhile.
"""

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from ...core.errors import WorkerTimeoutError
from ..batch_maker import MadeBatch
from ..workers.pool import LONG_WAIT_S
from .preparers import Preparer
from .supply import Joined, Obtained, Supply, SupplySpec
from .walk_plan import Walk

logger = logging.getLogger(__name__)


class Feed:
    """The batches of walks, in their order. All methods are for the loop's thread."""

    def __init__(self, preparer: Preparer, spec: SupplySpec, *, timeout_s: float = 0.0) -> None:
        """With `timeout_s` a batch may be waited for so long; 0: for ever."""
        self._preparer, self._pinner, self._timeout_s = preparer, spec.pinner, timeout_s
        self._supply = Supply(preparer, spec)
        self._is_closed = self._ends_itself = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = (
            threading.Thread(target=self._run, name="everstep-share", daemon=True)
            if spec.is_threaded
            else None
        )

    @property
    def prepared_count(self) -> int:
        """Batches that this job prepared, for itself or for all."""
        return self._supply.prepared_count

    @property
    def received_count(self) -> int:
        """Batches that came ready from the group."""
        return self._supply.received_count

    @property
    def is_shared(self) -> bool:
        """Tell whether there is a daemon that this job shares by."""
        return self._supply.is_shared

    @property
    def is_broken(self) -> bool:
        """Tell whether it failed, or was interrupted, so that it can only be closed."""
        return self._failure is not None

    def use(self, joined: Joined, again: Callable[[int], Joined | None]) -> None:
        """Share by this connection from now on; the feed closes it. `again` looks for a daemon, should that one go."""
        with self._changed:
            self._supply.use(joined, again)
        self._poke()

    def look_later(self, again: Callable[[int], Joined | None]) -> None:
        """There is no daemon to share by now; `again` looks for one, now and then."""
        with self._changed:
            self._supply.look_later(again)

    def put(self, g: int, made: MadeBatch) -> None:
        """Take over a batch that was prepared before."""
        with self._changed:
            self._supply.obtained[g] = made

    def locate(self) -> int:
        """Return the batch at which the slowest of the other jobs is, or -1 where there is none to be found."""
        with self._changed:
            found = self._supply.locate()
        self._poke()  # what else came meanwhile waits for the thread
        return found

    def begin(self, walk: Walk) -> None:
        """Go through a walk from now on."""
        with self._changed:
            self._supply.begin(walk)
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        self._poke()

    def next(self) -> MadeBatch:
        """Return the next batch of the walk; raises what its samples raised.

        Raises:
            WorkerError: workers die as often as they are replaced.
            WorkerTimeoutError: it took longer than `timeout_s`.
        """
        with self._changed:
            g = self._supply.next_batch
            self._obtain(g)
            found = self._supply.hand(g)
        self._poke()
        return _unless_error(found)

    def first(self, g: int) -> MadeBatch:
        """Prepare a batch before anything else, by itself."""
        with self._changed:
            self._supply.submit_own(g)
            self._obtain(g)
            return _unless_error(self._supply.obtained.pop(g))

    def close(self) -> None:
        """Leave the group and end preparers and thread. Again is nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._poke()
        if self._thread is threading.current_thread():  # the loader was collected there
            self._ends_itself = True
            return
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._end()

    def _end(self) -> None:
        self._preparer.close(is_patient=not self.is_broken)
        self._supply.leave()
        os.close(self._wake)

    # -- waiting for a batch

    def _obtain(self, g: int) -> None:
        """Return when a batch is there; whatever ends the waiting breaks the feed."""
        try:
            self._wait_for(g)
            while self._thread is None and self._supply.has_duties:
                self._turn(None)  # others wait for what this job was leased while it waited
        except BaseException as error:
            self._failure = error
            raise

    def _wait_for(self, g: int) -> None:
        until_s = time.monotonic() + (self._timeout_s or LONG_WAIT_S)
        while g not in self._supply.obtained:
            if self._failure is not None:
                raise self._failure
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                self._say_late(g)
                until_s = float("inf")
            patience_s = None if until_s == float("inf") else max(0.0, left_s)
            if self._thread is None or self._thread.ident is None:
                self._turn(patience_s)
            else:
                self._changed.wait(patience_s)

    def _say_late(self, g: int) -> None:
        doing = self._supply.doing(g)
        if self._timeout_s:
            raise WorkerTimeoutError(
                f"the loader timed out after {self._timeout_s:g} seconds: {doing}",
                hint="raise timeout=, or look at what the dataset waits for there",
            )
        logger.warning("share_waits_long seconds=%d: %s", LONG_WAIT_S, doing)

    # -- turns

    def _turn(self, patience_s: float | None) -> None:
        self._supply.ask_and_offer()
        _wait(self._supply.waitables(), 0.0 if self._preparer.has_work else patience_s)
        self._supply.collect()

    def _run(self) -> None:
        if self._pinner is not None:
            self._pinner.begin()
        try:
            while not self._is_closed:
                with self._changed:
                    self._supply.ask_and_offer()
                    waitables = self._supply.waitables()
                _wait([*waitables, self._wake], None)
                with self._changed:
                    self._supply.collect()
                    self._changed.notify_all()
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    continue
        except BaseException as error:  # noqa: BLE001  raised in the loop
            with self._changed:
                self._failure = error
                self._supply.leave()  # what it was leased goes to others at once
                self._changed.notify_all()
        if self._ends_itself:
            self._end()

    def _poke(self) -> None:
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)


def _wait(descriptors: Iterable[int], patience_s: float | None) -> None:
    """Return when one is readable, or after so long; there are several waits for each batch."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    poll.poll(None if patience_s is None else math.ceil(patience_s * 1000))


def _unless_error(found: Obtained) -> MadeBatch:
    if isinstance(found, BaseException):
        raise found
    return found
