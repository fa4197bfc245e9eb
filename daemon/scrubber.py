"""Reads all committed bytes of a store from time to time, beside everything else, and says what is damaged."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..checkpoint.catalogue import CheckpointInfo, CheckpointState
from ..checkpoint.run_store import RunStore
from ..checkpoint.scrub_mark import read_scrub_mark, write_scrub_mark
from ..checkpoint.store_format import ScrubMark, ScrubPlace
from ..core.errors import NotFoundError, RunBusyError
from .blocking import in_thread
from .scrub_plan import Scrub, is_behind, is_due, period_begin_unix_s, scrub_period
from .stores import OpenStore
from .views import ScrubStarted, ScrubView

if TYPE_CHECKING:
    from .node import Node

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
        self._scrubs: dict[OpenStore, Scrub] = {}
        """Of each store the one that goes on, else the last one of this process."""
        self._last_unix_s = 0.0

    def watch(self, opened: OpenStore) -> None:
        """Scrub a store by the schedule from now on."""
        if self._node.config.scrub.every_s is not None:
            self._spawn(opened, self._keep_schedule(opened, self._node.config.scrub.every_s))

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

    def view(self, opened: OpenStore) -> ScrubView:
        """Return what is known of a store's scrubs."""
        every_s, store_id = self._node.config.scrub.every_s, opened.store.store_id
        next_unix_s = None
        if every_s is not None:
            period = scrub_period(self._clock(), every_s, store_id)
            next_unix_s = period_begin_unix_s(period + 1, every_s, store_id)
        return ScrubView(newest=self._scrubs.get(opened), next_unix_s=next_unix_s)

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
                self._spawn(opened, self._read(opened, work, self._begin(opened, work)))
            checkpoint_count += len(work)
            size_bytes += sum(info.size_bytes for _, info in work)
        return ScrubStarted(checkpoint_count=checkpoint_count, size_bytes=size_bytes)

    async def _keep_schedule(self, opened: OpenStore, every_s: float) -> None:
        store_id = opened.store.store_id
        course = Course(opened, await in_thread(read_scrub_mark, opened.store), clock=self._clock)
        if course.mark is not None:
            self._show_end(course.mark.ended_unix_s)
        await asyncio.sleep(self._node.config.verify.after_s)  # a restart may restore first
        while True:
            now_unix_s = self._clock()
            if is_due(course.mark, now_unix_s, every_s, store_id) and not self._goes_on(opened):
                await self._go_on(opened, course)
            else:
                period = scrub_period(now_unix_s, every_s, store_id)
                next_unix_s = period_begin_unix_s(period + 1, every_s, store_id)
                await asyncio.sleep(min(max(next_unix_s - now_unix_s, 0.01), LOOK_AT_CLOCK_S))

    async def _go_on(self, opened: OpenStore, course: "Course") -> None:
        """Read what the scrub that the schedule asks for has not read yet."""
        course.begin()
        work = course.rest([(run, info) for run in opened.store.runs() for info in _unspoilt(run)])
        try:
            await self._read(opened, work, self._begin(opened, work), course)
        except asyncio.CancelledError:
            await course.keep()
            raise
        await course.end()

    def _show_end(self, ended_unix_s: float | None) -> None:
        self._last_unix_s = max(self._last_unix_s, ended_unix_s or 0.0)
        self._node.metrics.scrub_last_s.set(self._last_unix_s)

    def _goes_on(self, opened: OpenStore) -> bool:
        scrub = self._scrubs.get(opened)
        return scrub is not None and scrub.ended_unix_s is None

    def _begin(self, opened: OpenStore, work: Work) -> Scrub:
        scrub = Scrub(started_unix_s=self._clock(), planned_count=len(work))
        self._scrubs[opened] = scrub
        logger.info("scrub_began store=%s checkpoints=%d", opened.store.store_id, len(work))
        return scrub

    async def _read(
        self, opened: OpenStore, work: Work, scrub: Scrub, course: "Course | None" = None
    ) -> None:
        """Read one checkpoint after the other; what is damaged is offered no more, and said."""
        metrics = self._node.metrics
        try:
            for run, info in work:
                try:
                    verdict = await self._node.verifier.verify_beside(
                        run, info.checkpoint, moved=metrics.scrubbed_bytes.inc
                    )
                except NotFoundError:
                    continue  # retention has removed it since
                size_bytes = sum(segment.size_bytes for segment in verdict.segments)
                scrub = scrub.read(verdict.summary.title, size_bytes, is_intact=verdict.is_intact)
                self._scrubs[opened] = scrub
                metrics.scrub_damaged_total.inc(sum(bool(segment.problem) for segment in verdict.segments))
                if not verdict.is_intact:
                    self._node.verifier.record_damage(opened, verdict)
                if course is not None:
                    await course.passed(run, info)
        finally:
            scrub = self._scrubs[opened] = scrub.ended(self._clock())
        self._show_end(self._clock())
        logger.info(
            "scrub_ended store=%s checkpoints=%d size_bytes=%d damaged=%s",
            opened.store.store_id,
            scrub.checkpoint_count,
            scrub.size_bytes,
            list(scrub.damaged),
        )

    def _spawn(self, opened: OpenStore, work: Coroutine[None, None, None]) -> None:
        task = self._node.spawn(work, "scrubbing")
        self._tasks[task] = opened
        task.add_done_callback(self._tasks.pop)


class Course:
    """The scheduled scrub of one store: how far it is, and how far the devices know that it is."""

    def __init__(self, opened: OpenStore, mark: ScrubMark | None, *, clock: Callable[[], float]) -> None:
        self._opened, self._clock = opened, clock
        self.mark = mark
        self._kept_unix_s = clock()

    def begin(self) -> None:
        """Go on where the last one was cut off, or begin anew when it had ended."""
        if self.mark is None or self.mark.ended_unix_s is not None:
            self.mark = ScrubMark(store_id=self._opened.store.store_id, started_unix_s=self._clock())

    def rest(self, work: Work) -> Work:
        """Return what is still to be read, in order."""
        assert self.mark is not None
        places = {_place(run, info).order: (run, info) for run, info in work}
        return [
            (run, info)
            for _, (run, info) in sorted(places.items(), key=lambda each: each[0])
            if not is_behind(self.mark, _place(run, info))
        ]

    async def passed(self, run: RunStore, info: CheckpointInfo) -> None:
        """A checkpoint was read."""
        assert self.mark is not None
        count = self.mark.checkpoint_count + 1
        self.mark = replace(self.mark, checkpoint_count=count, place=_place(run, info))
        if not 0 <= self._clock() - self._kept_unix_s < KEEP_PLACE_S:
            await self.keep()

    async def end(self) -> None:
        """All were read."""
        assert self.mark is not None
        self.mark = replace(self.mark, ended_unix_s=self._clock())
        await self.keep()

    async def keep(self) -> None:
        """Return when the devices know how far it is."""
        assert self.mark is not None
        self._kept_unix_s = self._clock()
        await in_thread(write_scrub_mark, self._opened.store, self.mark)


def _place(run: RunStore, info: CheckpointInfo) -> ScrubPlace:
    return ScrubPlace(owner_uid=run.owner_uid, run_id=run.run_id, checkpoint=info.checkpoint)


def _unspoilt(run: RunStore) -> list[CheckpointInfo]:
    """Return the checkpoints of which nothing is known to be damaged, the newest first."""
    return [info for info in run.checkpoints() if info.state is not CheckpointState.DAMAGED]
