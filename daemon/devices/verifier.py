"""Reading whole checkpoints: when a person asks; and the newest of each run, soon after its store was opened and later
within an hour of its commit.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...checkpoint.catalogue import CheckpointInfo, CheckpointState
from ...checkpoint.engine import Engine, Transfer, TransferDone
from ...checkpoint.run_store import RunStore
from ...core.errors import NotFoundError
from ...core.ids import CheckpointId
from ..blocking import in_thread
from ..control import node_views, store_views
from ..control.views import Verdict
from .scrub_plan import GIVE_WAY_S_MAX, NEWEST_WITHIN_S, ScrubPace, is_newest_due, rest_s
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

LOOK_FOR_NEW_S = 60.0
"""How often at least it is asked whether a newest checkpoint is to be read."""

_GIVE_WAY_STEP_S = 0.05


class Verifier:
    """Verifies through the devices' queues, beside their other transfers. Owned by the event loop."""

    def __init__(self, node: "Node", *, clock: Callable[[], float] = time.time) -> None:
        self._node, self._clock = node, clock
        self._tasks: dict[OpenStore, asyncio.Task[None]] = {}
        """Those that read what was newest at the opening."""
        self._followers: dict[OpenStore, asyncio.Task[None]] = {}
        """Those that read what is the newest later."""
        self._began: dict[RunStore, float] = {}
        """When the newest of a run was last begun to be read, of the wall clock."""
        self._reading: Counter[OpenStore] = Counter()
        self._found: dict[OpenStore, list[Verdict]] = {}
        self._newest_read: dict[tuple[RunStore, CheckpointId], float] = {}
        """When a checkpoint was found intact as the newest of its run, of the wall clock."""
        self._beside = asyncio.Semaphore(1)  # each takes 16 MiB per device

    def found(self, opened: OpenStore) -> tuple[Verdict, ...]:
        """Return what reading the newest checkpoints of a store has shown so far."""
        return tuple(self._found.get(opened, ()))

    def watch(self, opened: OpenStore) -> None:
        """Verify the newest checkpoint of each run of a store in a while (a restart may restore first), and what is the
        newest from then on within an hour.
        """
        self._found[opened] = []
        self._tasks[opened] = self._node.spawn(self._check_newest(opened), "verifying the newest checkpoints")
        self._followers[opened] = self._node.spawn(self._follow(opened), "verifying new checkpoints")

    def is_reading(self, opened: OpenStore) -> bool:
        """Tell whether somebody who asked for it has a checkpoint of this store read."""
        return self._reading[opened] > 0

    async def forget(self, opened: OpenStore) -> None:
        """Return when nothing reads a store in the background any more: it is about to be closed."""
        tasks = [self._tasks.pop(opened), self._followers.pop(opened)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del self._found[opened]
        for run in [run for run in self._began if run.store is opened.store]:
            del self._began[run]
        for key in [key for key in self._newest_read if key[0].store is opened.store]:
            del self._newest_read[key]

    async def newest_are_read(self, opened: OpenStore) -> None:
        """Return when the newest checkpoints of a store that is watched have been read."""
        if opened in self._tasks:
            await asyncio.wait([self._tasks[opened]])

    def newest_read_unix_s(self, run: RunStore, checkpoint: CheckpointId) -> float | None:
        """Return when a checkpoint was found intact as the newest one; None where it was not."""
        return self._newest_read.get((run, checkpoint))

    def stop(self) -> None:
        """End what goes on in the background, after the chunks that are being read."""
        for task in (*self._tasks.values(), *self._followers.values()):
            task.cancel()

    async def verify_beside(
        self,
        run: RunStore,
        checkpoint: CheckpointId,
        *,
        moved: "Moved" = lambda _device, _size, _took_s: None,
        patience_s: "Patience" = lambda _device, _size: GIVE_WAY_S_MAX,
    ) -> Verdict:
        """Return what `verify` does, read in the background: a share of each device's speed, and one at a time.

        `moved` and `patience_s`: see Background.
        """
        opened = self._opened(run)
        background = Background(
            share=self._node.config.scrub.bandwidth_share,
            is_needed=lambda: opened.is_needed,
            moved=moved,
            patience_s=patience_s,
        )
        async with self._beside:
            return await self.verify(run, checkpoint, background=background)

    def record_damage(self, opened: OpenStore, verdict: Verdict) -> None:
        """Remember and log a damaged checkpoint."""
        self._record(opened, verdict, "scrubbed")

    def was_read(self, run: RunStore, checkpoint: CheckpointId) -> None:
        """Somebody else has read a checkpoint and found it intact: it need not be read as the newest one."""
        self._newest_read[run, checkpoint] = self._clock()

    async def verify(
        self, run: RunStore, checkpoint: CheckpointId, *, background: "Background | None" = None
    ) -> Verdict:
        """Return what every byte is worth; a cancelled call ends after the chunks that are being read.

        Raises:
            NotFoundError: there is no such checkpoint (any more).
        """
        opened = self._opened(run)
        if background is not None:
            return await self._verify(opened, run, checkpoint, background)
        self._reading[opened] += 1
        try:
            return await self._verify(opened, run, checkpoint, None)
        finally:
            self._reading[opened] -= 1

    async def _verify(
        self, opened: OpenStore, run: RunStore, checkpoint: CheckpointId, background: "Background | None"
    ) -> Verdict:
        stop = threading.Event()
        engines = {
            key: Restrained(key, queue.beside, stop, background) for key, queue in opened.queues.items()
        }
        memory = node_views.in_memory(self._node, run)
        work = asyncio.ensure_future(
            in_thread(store_views.verify, run, checkpoint, engines=engines, in_memory=memory)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            work.exception()  # seen: StoppedError, or whatever came first
            raise

    def _opened(self, run: RunStore) -> OpenStore:
        opened = next((each for each in self._node.stores.stores if each.store is run.store), None)
        if opened is None:
            raise NotFoundError(f"the store of run {run.name!r} has been closed")
        return opened

    async def _check_newest(self, opened: OpenStore) -> None:
        await asyncio.sleep(self._node.config.verify.after_s)
        for run in opened.store.runs():
            self._began[run] = self._clock()
            for checkpoint in run.offered():
                if await self._read(opened, run, checkpoint):
                    break

    async def _follow(self, opened: OpenStore) -> None:
        """Read what becomes the newest complete checkpoint of a run."""
        await self.newest_are_read(opened)
        while True:
            now_unix_s = self._clock()
            for run in opened.store.runs():
                self._forget_removed(run)
                if is_newest_due(self._began.get(run), now_unix_s) and self._newest_unread(run) is not None:
                    self._began[run] = self._clock()
                    await self._read_until_intact(opened, run)
            await asyncio.sleep(LOOK_FOR_NEW_S)

    async def _read_until_intact(self, opened: OpenStore, run: RunStore) -> None:
        """Read the newest one, and those before it as long as it is damaged; what was read before counts."""
        tried = set[CheckpointId]()
        while (info := self._newest_unread(run, tried)) is not None:
            tried.add(info.checkpoint)
            pace = ScrubPace([bytes_by_device(run, info)], info.created_unix_s + NEWEST_WITHIN_S)
            if not await self._read(opened, run, info.checkpoint, pace) and self._newest_unread(run) == info:
                return  # it could not be read, and is offered all the same

    def _newest_unread(self, run: RunStore, tried: Collection[CheckpointId] = ()) -> CheckpointInfo | None:
        """Return the newest complete checkpoint but those `tried`, unless it or a newer one was found intact by now.

        One that could not be read the last time may be well now.
        """
        for info in run.checkpoints():
            is_complete = CheckpointState.COMPLETE in {info.state, info.unread_state}
            if not is_complete or info.is_set_aside:
                continue
            if (run, info.checkpoint) in self._newest_read:
                return None
            if info.checkpoint not in tried:
                return info
        return None

    def _forget_removed(self, run: RunStore) -> None:
        there = {info.checkpoint for info in run.checkpoints()}
        for key in [key for key in self._newest_read if key[0] is run and key[1] not in there]:
            del self._newest_read[key]

    async def _read(
        self, opened: OpenStore, run: RunStore, checkpoint: CheckpointId, pace: ScrubPace | None = None
    ) -> bool:
        """Read a checkpoint in the background and say what it is worth; False where it is not intact, or gone."""
        try:
            if pace is None:
                verdict = await self.verify_beside(run, checkpoint)
            else:
                verdict = await self.verify_beside(
                    run,
                    checkpoint,
                    moved=pace.moved,
                    patience_s=lambda device_id, size: pace.patience_s(device_id, size, self._clock()),
                )
        except NotFoundError:
            return False  # retention has removed it since
        self._record(opened, verdict, "newest_verified")
        if verdict.is_intact:
            self._newest_read[run, checkpoint] = self._clock()
        return verdict.is_intact

    def _record(self, opened: OpenStore, verdict: Verdict, event: str) -> None:
        if verdict.is_intact:  # it stands for those of its run that were the newest before
            self._found[opened] = [
                each
                for each in self._found[opened]
                if not each.is_intact or each.summary.run_id != verdict.summary.run_id
            ]
        self._found[opened].append(verdict)
        self._node.metrics.readings.damaged_total.inc(sum(bool(each.problem) for each in verdict.segments))
        result = "intact" if verdict.is_intact else "damaged"
        self._node.metrics.readings.verified_total.labels(result).inc()
        if not verdict.is_intact:
            self._node.reporter.damaged(verdict)
        logger.log(
            logging.INFO if verdict.is_intact else logging.ERROR,
            "%s run=%s checkpoint=%s result=%s seconds=%.3f problems=%s",
            event,
            verdict.summary.run_id,
            verdict.summary.checkpoint,
            result,
            verdict.elapsed_s,
            [*verdict.problems, *(segment.problem for segment in verdict.segments if segment.problem)],
        )


def bytes_by_device(run: RunStore, info: CheckpointInfo) -> Mapping[str, int]:
    """Return the bytes of a checkpoint on each device, as far as it is still there."""
    found = Counter[str]()
    for rank in info.ranks:
        with contextlib.suppress(NotFoundError):
            found.update(run.shard(info.checkpoint, rank).device_bytes)
    return found


class StoppedError(Exception):
    """Nobody waits for this verification any more. No EverstepError: those count as damage of what is read."""


Moved = Callable[[str, int, float], None]
"""Hears of each transfer: device, bytes, and how long it took with the rest after it. In that device's thread."""
Patience = Callable[[str, int], float]
"""Says how long a transfer of a device, of so many bytes, waits at most. In that device's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """How a checkpoint is read beside other work."""

    share: float
    """Of each device's speed, measured transfer by transfer."""
    is_needed: Callable[[], bool]
    """Whether a persist or a restore is under way: then a transfer waits."""
    moved: Moved
    patience_s: Patience


class Restrained:
    """An engine that moves nothing more once `stop` is set; in the background it gives way and rests, too."""

    def __init__(
        self, device_id: str, engine: Engine, stop: threading.Event, background: Background | None = None
    ) -> None:
        self._device_id, self._engine, self._stop, self._background = device_id, engine, stop, background

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._engine.name

    def run(self, transfer: Transfer) -> TransferDone:
        """Move, or raise when stopped."""
        background = self._background
        if background is not None:
            self._give_way(background, transfer.length_bytes)
        if self._stop.is_set():
            raise StoppedError
        began_s = time.monotonic()
        done = self._engine.run(transfer)
        if background is not None:
            rest = rest_s(done.busy_s, background.share)
            background.moved(self._device_id, done.bytes_moved, time.monotonic() - began_s + rest)
            self._stop.wait(rest)
        return done

    def _give_way(self, background: Background, size_bytes: int) -> None:
        deadline_s = time.monotonic() + background.patience_s(self._device_id, size_bytes)
        while background.is_needed() and time.monotonic() < deadline_s:
            if self._stop.wait(_GIVE_WAY_STEP_S):
                return

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena."""
        self._engine.forget(arena_fd)

    def close(self) -> None:
        """Leave the engine behind to its owner."""
