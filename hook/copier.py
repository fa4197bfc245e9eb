"""The copy thread: moves the lazy part of one snapshot at a time while forward and backward run."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.errors import EverstepError, UsageError
from .copy_plan import Moves
from .gather import copy
from .lazy_leaves import NONE, LazyLeaves

logger = logging.getLogger(__name__)

GUARD_SLICE_S = 1.0


@dataclass(slots=True, kw_only=True)
class CopyJob:
    """The lazy part of a snapshot. `done` is set when host memory that the moves read may change, whatever happened."""

    moves: Sequence[Moves]
    """In the order of the segments."""
    lazy: LazyLeaves
    keep_alive: list[object]
    """Tensors whose memory is read."""
    enqueue: Callable[[], None] = lambda: None
    """Runs first: enqueues what CUDA devices copy."""
    begin: Callable[[], None]
    """Runs before the copy."""
    before: Callable[[int], None] = lambda _: None
    """Returns when a segment may be moved into."""
    copied: Callable[[int], None]
    """Hears of each segment whose last move has been made."""
    wait_cuda: Callable[[], None]
    """Returns when the copies on the side stream have ended."""
    finish: Callable[[float], None]
    """Runs after the copy, with the seconds that it took: seals."""
    fail: Callable[[EverstepError], None]
    enqueued: threading.Event = field(default_factory=threading.Event)
    """All that CUDA devices copy has been enqueued, or has failed: writers can be ordered behind it."""
    done: threading.Event = field(default_factory=threading.Event)
    copy_s: float = 0.0
    is_submitted: bool = False
    """The copy thread has it, and sees to its end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compared: bool = False
    _changed: UsageError | None = None

    def run(self) -> None:
        """Copy, compare, seal; a failure is reported, never lost."""
        began_s = time.perf_counter()
        try:
            try:
                try:
                    self.enqueue()
                finally:
                    self.enqueued.set()
                self.begin()
                self._move()
            finally:
                self.done.set()
                self.wait_cuda()  # a failure, too: nothing may write to a slot that is given up
            self.compare()
            self.copy_s = time.perf_counter() - began_s
            if self._changed is not None:
                raise self._changed
            self.finish(self.copy_s)
        except EverstepError as error:
            self.fail(error)
        except Exception as error:  # logged and reported: the thread must live for the next job
            logger.warning("copy_failed", exc_info=error)  # CUDA's failures of earlier work come here, too
            self.fail(EverstepError(f"the copy failed: {str(error) or type(error).__name__}"))
        finally:
            self.lazy = NONE
            self.keep_alive.clear()

    def _move(self) -> None:
        for moves in self.moves:
            self.before(moves.segment)
            copy(moves)
            self.copied(moves.segment)

    def compare(self) -> None:
        """Compare the leaves that must not change, once: at the copy's end, or before the guard lets writers in."""
        with self._lock:
            if self._compared:
                return
            try:
                self.lazy.check()
            except UsageError as error:
                self._changed = error
            self._compared = True  # last: who is interrupted in the middle has not compared


class Copier:
    """One thread, one job at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Entered itself: Ctrl-C in the middle of `Condition.__enter__`, which is Python, leaves it locked."""
        self._changed = threading.Condition(self._lock)
        self._job: CopyJob | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="everstep-copier", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Tell whether a job is not finished and sealed."""
        return self._job is not None

    def submit(self, job: CopyJob) -> None:
        """Start a job; the copier must not be busy."""
        with self._lock:
            assert self._job is None
            self._changed.notify_all()  # first: the thread comes to the lock, and then never misses the job
            job.is_submitted, self._job = (
                True,
                job,
            )  # no call between the two, so that no signal's handler runs there

    def guard_enqueuing(self) -> float:
        """Return the seconds waited until all that CUDA devices copy for the running job has been enqueued."""
        job = self._job
        return 0.0 if job is None else self._wait(job.enqueued)

    def guard(self) -> float:
        """Return the seconds waited until the running job's sources may change."""
        job = self._job
        if job is None:
            return 0.0
        began_s = time.perf_counter()
        if job.moves:
            self._wait(job.done)
        job.compare()
        return time.perf_counter() - began_s

    def _wait(self, event: threading.Event) -> float:
        began_s = time.perf_counter()
        while not event.wait(GUARD_SLICE_S):
            if not self._thread.is_alive():
                raise EverstepError("the copy thread has died", hint="please report this as a bug")
        return time.perf_counter() - began_s

    def drain(self, deadline_s: float) -> bool:
        """Wait until the job is sealed or has failed; False when the deadline passed."""
        with self._lock:
            return self._changed.wait_for(lambda: self._job is None, deadline_s)

    def close(self) -> None:
        """End the thread after the running job."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._job is not None or self._closing)
                job = self._job
            if job is None:
                return
            job.run()
            with self._lock:
                self._job = job = None  # what it refers to is as large as the state's tensors
                self._changed.notify_all()
