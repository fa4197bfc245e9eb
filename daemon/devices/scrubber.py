"""Reads all committed bytes of a store from time to time, beside everything else, and says what is damaged."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...checkpoint.catalogue import CheckpointInfo, CheckpointState
from ...checkpoint.run_store import RunStore
from ...checkpoint.scrub_mark import read_scrub_mark, write_scrub_mark
from ...checkpoint.store_format import ScrubMark, ScrubPlace
from ...core.durations import duration_text
from ...core.errors import NotFoundError, RunBusyError
from ..blocking import in_thread
from ..control.views import ScrubStarted, ScrubView
from .scrub_plan import (
    Scrub,
    ScrubPace,
    first_mark,
    is_behind,
    is_due,
    period_begin_unix_s,
    scrub_period,
)
from .stores import OpenStore
from .verifier import bytes_by_device

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

LOOK_AT_CLOCK_S = 60.0
"""How often at least, because it may be set."""
KEEP_PLACE_S = 5.0
"""How much reading a crash may undo; fsync after each of many small checkpoints would disturb who writes."""

Work = Sequence[tuple[RunStore, CheckpointInfo]]


class Scrubber:
    """One scrub per store at a time, by the schedule or on request. Owned by the event loop."""

    def __init__(self, node: "Node", *, clock: Callable[[], float] = time.time) -> None:
        self._node, self._clock = node, clock
        self._tasks: dict[asyncio.Task[None], OpenStore] = {}
        self._schedules: dict[OpenStore, asyncio.Task[None]] = {}
        """Of the tasks those that go by the schedule."""
        self._scrubs: dict[OpenStore, Scrub] = {}
        """Of each store the one that goes on, else the last one of this process."""
        self._paces: dict[OpenStore, ScrubPace] = {}
        """Of the scrubs that go on."""
        self._last_unix_s = 0.0
        node.metrics.readings.late_s.set_function(self._late_s)

    def watch(self, opened: OpenStore) -> None:
        """Scrub a store by the schedule from now on."""
        if self._node.config.scrub.every_s is not None:
            schedule = self._keep_schedule(opened, self._node.config.scrub.every_s)
            self._schedules[opened] = self._spawn(opened, schedule)

    async def keep_other_schedule(self) -> None:
        """Go by a schedule that has changed; what one of the old schedule is reading goes on by the new one."""
        ended = list(self._schedules.values())
        self._schedules.clear()
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)
        for opened in self._node.stores.stores:
            if opened not in self._schedules and not self._node.lifetime.is_ending:
                self.watch(opened)

    def stop(self) -> None:
        """End what goes on, after the chunks that are being read."""
        for task in list(self._tasks):
            task.cancel()

    async def forget(self, opened: OpenStore) -> None:
        """Return when nothing reads a store any more: it is about to be closed."""
        tasks = [task for task, store in self._tasks.items() if store is opened]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._scrubs.pop(opened, None)
        self._schedules.pop(opened, None)

    def is_asked_for(self, opened: OpenStore) -> bool:
        """Tell whether a scrub of a store goes on that somebody has asked for."""
        schedule = self._schedules.get(opened)
        return any(store is opened and task is not schedule for task, store in self._tasks.items())

    def view(self, opened: OpenStore) -> ScrubView:
        """Return what is known of a store's scrubs."""
        every_s, store_id = self._node.config.scrub.every_s, opened.store.store_id
        next_unix_s = None
        if every_s is not None:
            period = scrub_period(self._clock(), every_s, store_id)
            next_unix_s = period_begin_unix_s(period + 1, every_s, store_id)
        return ScrubView(newest=self._scrubs.get(opened), next_unix_s=next_unix_s)

    def lateness(self, opened: OpenStore) -> str:
        """Return why a scrub of a store cannot end in time; empty when it can."""
        pace = self._paces.get(opened)
        late_s = 0.0 if pace is None else pace.late_s(self._clock())
        if not late_s:
            return ""
        return (
            f"the scrub ends {duration_text(late_s)} after the next one should begin, at"
            f" {self._node.config.scrub.bandwidth_share:.3g} of the devices' speed: raise scrub.bandwidth_share, or"
            " scrub.every"
        )

    def _late_s(self) -> float:
        """Return how much too late the last of the scrubs ends; asked by the thread of a scrape."""
        now_unix_s = self._clock()
        return max((pace.late_s(now_unix_s) for pace in list(self._paces.values())), default=0.0)

    def start(self, stores: Sequence[OpenStore], runs: Sequence[RunStore]) -> ScrubStarted:
        """Begin to read what these runs have committed in these stores.

        Raises:
            RunBusyError: a scrub of one of the stores goes on; nothing has begun.
        """
        for opened in stores:
            if self._goes_on(opened):
                raise RunBusyError(
                    f"a scrub of {opened.describe()} goes on", hint="`everstep status` shows how far it is"
                )
        checkpoint_count = size_bytes = 0
        for opened in stores:
            work = [(run, info) for run in runs if run.store is opened.store for info in _unspoilt(run)]
            if work:
                self._begin(opened, work)
                self._spawn(opened, self._read(opened, work, _pace_of(work, None)))
            checkpoint_count += len(work)
            size_bytes += sum(info.size_bytes for _, info in work)
        return ScrubStarted(checkpoint_count=checkpoint_count, size_bytes=size_bytes)

    async def _keep_schedule(self, opened: OpenStore, every_s: float) -> None:
        store_id = opened.store.store_id
        mark = await in_thread(read_scrub_mark, opened.store)
        course = Course(opened, mark or first_mark(self._clock(), store_id), clock=self._clock)
        if mark is None:
            await course.keep()
        elif mark.checkpoint_count:
            self._show_end(mark.ended_unix_s)
        await self._node.verifier.newest_are_read(opened)  # which a restart may have delayed
        while True:
            now_unix_s = self._clock()
            if is_due(course.mark, now_unix_s, every_s, store_id) and not self._goes_on(opened):
                await self._go_on(opened, course, every_s)
            else:
                period = scrub_period(now_unix_s, every_s, store_id)
                next_unix_s = period_begin_unix_s(period + 1, every_s, store_id)
                await asyncio.sleep(min(max(next_unix_s - now_unix_s, 0.01), LOOK_AT_CLOCK_S))

    async def _go_on(self, opened: OpenStore, course: "Course", every_s: float) -> None:
        """Read what the scrub that the schedule asks for has not read yet, before the next one begins."""
        store_id = opened.store.store_id
        period = scrub_period(self._clock(), every_s, store_id)
        course.begin(period_begin_unix_s(period, every_s, store_id))
        work = course.rest([(run, info) for run in opened.store.runs() for info in _unspoilt(run)])
        pace = _pace_of(work, period_begin_unix_s(period + 1, every_s, store_id))
        self._begin(opened, work)
        try:
            await self._read(opened, work, pace, course)
        except asyncio.CancelledError:
            await course.keep()
            raise
        await course.end()

    def _show_end(self, ended_unix_s: float | None) -> None:
        self._last_unix_s = max(self._last_unix_s, ended_unix_s or 0.0)
        self._node.metrics.readings.last_s.set(self._last_unix_s)

    def _goes_on(self, opened: OpenStore) -> bool:
        scrub = self._scrubs.get(opened)
        return scrub is not None and scrub.ended_unix_s is None

    def _begin(self, opened: OpenStore, work: Work) -> None:
        self._scrubs[opened] = Scrub(started_unix_s=self._clock(), planned_count=len(work))
        logger.info("scrub_began store=%s checkpoints=%d", opened.store.store_id, len(work))

    async def _read(
        self, opened: OpenStore, work: Work, pace: ScrubPace, course: "Course | None" = None
    ) -> None:
        """Read one checkpoint after the other; what is damaged is offered no more, and said."""
        scrub, self._paces[opened] = self._scrubs[opened], pace
        try:
            for run, info in work:
                read_unix_s = self._node.verifier.newest_read_unix_s(run, info.checkpoint)
                if course is not None and course.counts(read_unix_s):
                    scrub = scrub.read(f"{run.name}@{info.checkpoint}", info.size_bytes, is_intact=True)
                else:
                    scrub = await self._read_one(opened, run, info, scrub, pace)
                self._scrubs[opened] = scrub
                pace.passed()
                if course is not None:
                    await course.passed(run, info)
        finally:
            del self._paces[opened]
            scrub = self._scrubs[opened] = scrub.ended(self._clock())
        self._show_end(self._clock())
        self._node.reporter.scrubbed(
            opened.store.store_id,
            count=scrub.checkpoint_count,
            size_bytes=scrub.size_bytes,
            damaged=scrub.damaged,
        )
        logger.info(
            "scrub_ended store=%s checkpoints=%d size_bytes=%d damaged=%s",
            opened.store.store_id,
            scrub.checkpoint_count,
            scrub.size_bytes,
            list(scrub.damaged),
        )

    async def _read_one(
        self, opened: OpenStore, run: RunStore, info: CheckpointInfo, scrub: Scrub, pace: ScrubPace
    ) -> Scrub:
        """Return the scrub with this checkpoint read; unchanged where retention has removed it since."""
        verifier, metrics = self._node.verifier, self._node.metrics

        def moved(device_id: str, size_bytes: int, took_s: float) -> None:
            metrics.readings.scrubbed_bytes.inc(size_bytes)
            pace.moved(device_id, size_bytes, took_s)

        try:
            verdict = await verifier.verify_beside(
                run,
                info.checkpoint,
                moved=moved,
                patience_s=lambda device_id, size: pace.patience_s(device_id, size, self._clock()),
            )
        except NotFoundError:
            return scrub
        if verdict.is_intact:
            verifier.was_read(run, info.checkpoint)
        else:
            verifier.record_damage(opened, verdict)
        size_bytes = sum(segment.size_bytes for segment in verdict.segments)
        return scrub.read(verdict.summary.title, size_bytes, is_intact=verdict.is_intact)

    def _spawn(self, opened: OpenStore, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._node.spawn(work, "scrubbing")
        self._tasks[task] = opened
        task.add_done_callback(self._tasks.pop)
        return task


class Course:
    """The scheduled scrub of one store: how far it is, and how far the devices know that it is."""

    def __init__(self, opened: OpenStore, mark: ScrubMark, *, clock: Callable[[], float]) -> None:
        self._opened, self._clock = opened, clock
        self.mark = mark
        self._kept_unix_s = clock()
        self._since_unix_s = math.inf

    def counts(self, read_unix_s: float | None) -> bool:
        """Tell whether a checkpoint that was read at that moment need not be read again."""
        return read_unix_s is not None and read_unix_s >= self._since_unix_s

    def begin(self, since_unix_s: float) -> None:
        """Go on where the last one was cut off, or begin anew when it had ended; `since_unix_s`: what was read after it
        counts.
        """
        self._since_unix_s = since_unix_s
        if self.mark.ended_unix_s is not None:
            self.mark = ScrubMark(store_id=self._opened.store.store_id, started_unix_s=self._clock())

    def rest(self, work: Work) -> Work:
        """Return what is still to be read, in order."""
        places = {_place(run, info).order: (run, info) for run, info in work}
        return [
            (run, info)
            for _, (run, info) in sorted(places.items(), key=lambda each: each[0])
            if not is_behind(self.mark, _place(run, info))
        ]

    async def passed(self, run: RunStore, info: CheckpointInfo) -> None:
        """A checkpoint was read."""
        count = self.mark.checkpoint_count + 1
        self.mark = replace(self.mark, checkpoint_count=count, place=_place(run, info))
        if not 0 <= self._clock() - self._kept_unix_s < KEEP_PLACE_S:
            await self.keep()

    async def end(self) -> None:
        """All were read."""
        self.mark = replace(self.mark, ended_unix_s=self._clock())
        await self.keep()

    async def keep(self) -> None:
        """Return when the devices know how far it is."""
        self._kept_unix_s = self._clock()
        await in_thread(write_scrub_mark, self._opened.store, self.mark)


def _place(run: RunStore, info: CheckpointInfo) -> ScrubPlace:
    return ScrubPlace(owner_uid=run.owner_uid, run_id=run.run_id, checkpoint=info.checkpoint)


def _pace_of(work: Work, due_unix_s: float | None) -> ScrubPace:
    return ScrubPace([bytes_by_device(run, info) for run, info in work], due_unix_s)


def _unspoilt(run: RunStore) -> list[CheckpointInfo]:
    """Return the checkpoints of which nothing is known to be damaged, the newest first, also those that could not be
    read the last time.
    """
    return [
        info
        for info in run.checkpoints()
        if info.state is not CheckpointState.DAMAGED or info.unread_state is not None
    ]
