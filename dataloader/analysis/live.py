"""Where the steps of a running training go: a meter to leave on."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader as TorchDataLoader

from .device_clock import CopyWatch
from .instrument import AnyLoader, Instrument
from .stall_plan import StepSplit, WorkerTimes, split_step
from .worker_counters import WorkTotals

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Seconds since the meter was made; each only grows. The four parts sum up to the time in steps."""

    steps: int = 0
    fetch_s: float = 0.0
    preparation_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0

    def since(self, before: "StepSums") -> "StepSums":
        """Return what was added after an earlier look."""
        names = [field.name for field in fields(self)]
        return StepSums(**{name: getattr(self, name) - getattr(before, name) for name in names})

    def mean(self) -> StepSplit:
        """Return the mean step; zeros if there was none."""
        count = max(1, self.steps)
        return StepSplit(
            fetch_s=self.fetch_s / count,
            preparation_s=self.preparation_s / count,
            copy_s=self.copy_s / count,
            compute_s=self.compute_s / count,
        )


class StallMeter(Generic[T]):
    """A loader whose loop is timed: `for batch in meter`. All else of the loader is reached through it.

        meter = StallMeter(loader)
        for batch in meter:
            train(batch)
        print(meter.split())  # the mean step, in seconds: fetch_s, preparation_s, copy_s, compute_s

    The loop's wait for a batch is shared between fetch and preparation in proportion to the workers' time for both
    (work_meter.py says what counts as fetch). Copies to a CUDA device are timed on the device, by Tensor.to and
    Tensor.cuda. What is left of a step is compute. Numbers are as of the last `period` steps that have ended.

    For loops of one thread. Of a loader that is not derived from torch's, the whole wait counts as preparation.
    """

    def __init__(self, loader: Iterable[T], *, period: int = 16) -> None:
        """`period`: after so many steps the workers' counters are read."""
        assert period >= 1
        self._loader = loader
        self._period = period
        self._instrument = (
            Instrument(cast(AnyLoader, loader)) if isinstance(loader, TorchDataLoader) else None
        )
        self._copies = CopyWatch()
        self._copies.install()
        self._done = StepSums()
        self._steps = 0
        self._step_s = self._wait_s = self._copy_s = 0.0
        self._work = WorkTotals()
        self._asked_s = self._handed_s = 0.0

    def times(self) -> StepSums:
        """Return the sums up to the last step that has ended."""
        self._settle()
        return self._done

    def split(self) -> StepSplit:
        """Return the mean step since the meter was made."""
        return self.times().mean()

    def __iter__(self) -> Iterator[T]:
        """Iterate the loader, timed."""
        self._handed_s = 0.0
        if self._instrument is None:
            inner = iter(self._loader)
        else:
            with self._instrument.making():
                inner = iter(self._loader)
        return self._timed(inner)

    def __len__(self) -> int:
        """Return what the loader says."""
        return len(cast(Any, self._loader))

    def __getattr__(self, name: str) -> Any:
        """Return what else the loader has."""
        if name == "_loader":  # copied or unpickled: there is none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def close(self) -> None:
        """Stop: undo what was put around the loader and around copies."""
        self._copies.remove()
        if self._instrument is not None:
            self._instrument.close()
            self._instrument = None

    def _timed(self, inner: Iterator[T]) -> Iterator[T]:
        try:
            while True:
                asked_s = time.perf_counter()
                self._end_step(asked_s)
                try:
                    batch = next(inner)
                except StopIteration:
                    return
                self._asked_s, self._handed_s = asked_s, time.perf_counter()
                yield batch
        finally:
            self._handed_s = 0.0
            if self._instrument is not None:
                self._instrument.ended()

    def _end_step(self, now_s: float) -> None:
        if not self._handed_s:
            return
        self._steps += 1
        self._wait_s += self._handed_s - self._asked_s
        self._step_s += now_s - self._asked_s
        if self._steps >= self._period:
            self._settle()

    def _settle(self) -> None:
        """Add the steps since the last time, split as the workers' time was meanwhile."""
        if not self._steps:
            return
        count, self._steps = self._steps, 0
        copy_s = self._copies.total_s()
        split = split_step(
            step_s=self._step_s, wait_s=self._wait_s, copy_s=copy_s - self._copy_s, work=self._new_work()
        )
        self._step_s = self._wait_s = 0.0
        self._copy_s = copy_s
        done = self._done
        self._done = StepSums(
            steps=done.steps + count,
            fetch_s=done.fetch_s + split.fetch_s,
            preparation_s=done.preparation_s + split.preparation_s,
            copy_s=done.copy_s + split.copy_s,
            compute_s=done.compute_s + split.compute_s,
        )

    def _new_work(self) -> WorkerTimes:
        if self._instrument is None:
            return WorkerTimes()
        before, self._work = self._work, self._instrument.totals()
        new = self._work.plus(before, -1.0)
        return WorkerTimes(
            samples=max(0, round(new.samples)),
            busy_s=max(0.0, new.busy_s),
            fetch_s=max(0.0, new.fetch_s),
            queued_s=max(0.0, new.queued_s),
        )
