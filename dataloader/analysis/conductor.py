"""Decides, during one run of a script, what its loaders hand out, and when enough was seen.

The synthetic run hands out real batches first, so that the files are named and in memory, then the last few of them
again and again: those steps count. The warm and the cold run hand out real batches.

The loader that counts is the first that trains (asks for batches with gradients on) and lasts as long as the budget;
validation loaders are passed by. `pick` names another one, by the order of their first iteration.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from .device_clock import CopyWatch, DeviceMarks
from .instrument import AnyLoader, Instrument
from .loader_facts import facts_of
from .lone_worker import lone_cpu_s
from .measured_format import LoaderFacts, Phase
from .recorder_machine import STEPS_MIN, Budget, Recorder, warmup_for
from .replay import Replay
from .window import Window

SYNTHETIC_WARMUP = 3


class Enough(BaseException):
    """Ends the script: everything was seen. No Exception, so that the script's own handlers let it pass."""


class View:
    """One loader of the script: what it handed out, and when."""

    def __init__(
        self, loader: AnyLoader, number: int, budget: Budget, instrument: Instrument, copies: CopyWatch
    ) -> None:
        self.number = number
        self.facts = facts_of(loader, number)
        self.loader = weakref.ref(loader)
        self.instrument = instrument
        self.recorder = Recorder(budget)
        self._copies = copies
        self.window = Window(instrument, copies)
        self.marks = DeviceMarks()
        self.replay = Replay()
        self.is_replaying = False
        self.trains = False
        self.make: Callable[[AnyLoader], Iterator[object]] | None = None
        """What its iterators were made by."""
        self.lone_cpu_s: float | None = None
        """Processor time per sample of one worker alone; None: not measured."""

    def facts_with(self, batch_size: float | None) -> LoaderFacts:
        """Return what the loader is, with the batch size that was seen."""
        return (
            self.facts if batch_size is None else msgspec.structs.replace(self.facts, batch_size=batch_size)
        )

    def follow(self, loader: AnyLoader, instrument: Instrument) -> None:
        """Go on with a loader that takes the place of one that is gone: some scripts make one for each epoch."""
        self.window.follow(instrument)
        self.loader, self.instrument = weakref.ref(loader), instrument

    def begin_replay(self) -> None:
        """Count anew: from here on the batches are those kept."""
        budget = self.recorder.budget
        self.is_replaying = True
        self.window = Window(self.instrument, self._copies)
        self.marks = DeviceMarks()
        self.recorder = Recorder(Budget(steps=budget.steps, warmup=SYNTHETIC_WARMUP, seconds=budget.seconds))
        self.recorder.asked(time.perf_counter())


class Conductor:
    """The run of one script; `finished` is called once, before the script is ended."""

    def __init__(
        self,
        *,
        phase: Phase,
        budget: Callable[[AnyLoader], Budget],
        pick: int | None,
        instrument: Callable[[AnyLoader], Instrument],
        before_epoch: Callable[[], None],
        finished: Callable[[View], None],
    ) -> None:
        self.phase = phase
        self.views: list[View] = []
        self.copies = CopyWatch()
        self._budget = budget
        self._pick = pick
        self._instrument = instrument
        self._before_epoch = before_epoch
        self._finished = finished
        self._parent = os.getppid()
        self._pid = os.getpid()
        self._is_over = False

    def iterate(self, loader: AnyLoader, make: Callable[[AnyLoader], Iterator[object]]) -> Iterator[object]:
        """Return the iterator that the script gets in place of `make(loader)`."""
        if os.getpid() != self._pid:  # a worker that iterates a loader of its own
            return make(loader)
        view = self._view_of(loader)
        if self._is_over:
            raise Enough
        if not view.is_replaying:
            self._before_epoch()
            view.window.close()
            view.recorder.began()
        view.make = make
        with view.instrument.making():
            inner = make(loader)
        return TappedIterator(self, view, inner)

    def best(self) -> View | None:
        """Return the loader to report on when the script ended by itself: most steps, one that trains if any."""
        usable = [view for view in self.views if view.recorder.usable and self._may_count(view)]
        if self.phase is Phase.SYNTHETIC:
            usable = [view for view in usable if view.is_replaying]
        return max(usable, key=lambda view: (view.trains, len(view.recorder.steps)), default=None)

    def next(self, view: View, inner: Iterator[object]) -> object:
        """Return the next batch; Enough once the budget of the loader that counts is used up."""
        self._asked(view)
        if view.is_replaying:
            batch = view.replay.next()
        else:
            try:
                batch = next(inner)
            except StopIteration:
                batch = self._at_end(view)
            else:
                if self.phase is Phase.SYNTHETIC:
                    view.replay.keep(batch)
        view.recorder.handed(time.perf_counter())
        return batch

    def _asked(self, view: View) -> None:
        if self._is_over or os.getppid() != self._parent:
            raise Enough
        recorder = view.recorder
        view.trains = view.trains or torch.is_grad_enabled()
        is_first = recorder.next_is_first
        if is_first:
            view.window.open()
        recorder.asked(time.perf_counter())
        if is_first:
            view.marks.begin()
        elif recorder.measuring:
            view.marks.mark()
        if recorder.enough and self._may_count(view):
            self._enough(view)

    def _enough(self, view: View) -> None:
        view.window.close()
        if self.phase is Phase.SYNTHETIC and not view.is_replaying:
            view.begin_replay()
            return
        self._is_over = True
        loader = view.loader()
        if self.phase is Phase.WARM and loader is not None and view.make is not None:
            view.lone_cpu_s = lone_cpu_s(loader, view.instrument.another(), view.make)
        self._finished(view)
        raise Enough

    def _at_end(self, view: View) -> object:
        """Return a replayed batch where there was enough to go on with; else let the script's loop end."""
        view.window.close()
        view.recorder.ended()
        view.instrument.ended()
        if self.phase is Phase.SYNTHETIC and self._may_count(view) and view.recorder.usable:
            view.begin_replay()
            return view.replay.next()
        raise StopIteration

    def _may_count(self, view: View) -> bool:
        return view.trains if self._pick is None else view.number == self._pick

    def _view_of(self, loader: AnyLoader) -> View:
        for view in self.views:
            if view.loader() is loader:
                return view
        for view in self.views:
            if view.loader() is None and facts_of(loader, view.number) == view.facts:
                view.follow(loader, self._instrument(loader))
                return view
        view = View(loader, len(self.views), self._budget(loader), self._instrument(loader), self.copies)
        self.views.append(view)
        return view


class TappedIterator:
    """In place of the loader's iterator, with all that it can."""

    def __init__(self, conductor: Conductor, view: View, inner: Iterator[object]) -> None:
        self._conductor = conductor
        self._view = view
        self._inner = inner
        self._is_begun = False

    def __iter__(self) -> "TappedIterator":
        """Return itself."""
        return self

    def __next__(self) -> object:
        """Return the next batch."""
        if self._view.is_replaying:
            self._inner = iter(())  # its workers end, and leave their cores to the steps that count
        if self._is_begun:
            return self._conductor.next(self._view, self._inner)
        self._is_begun = True
        with self._view.instrument.making():  # a generator makes its workers only now
            return self._conductor.next(self._view, self._inner)

    def __len__(self) -> int:
        """Return the number of batches, as the loader's iterator says it."""
        return len(self._inner)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        """Return what else the loader's iterator has."""
        return getattr(self._inner, name)


def budget_for(loader: AnyLoader, *, steps: int, warmup: int | None, seconds: float) -> Budget:
    """Return the budget for a loader: without `warmup`, as many steps do not count as batches may wait."""
    if warmup is None:
        try:
            epoch_batches = len(loader)
        except TypeError:  # a stream
            epoch_batches = None
        ahead = (loader.prefetch_factor or 0) * loader.num_workers
        warmup = warmup_for(workers=loader.num_workers, prefetched=ahead, epoch_batches=epoch_batches)
    return Budget(steps=max(STEPS_MIN, steps), warmup=warmup, seconds=seconds)
