"""Reading whole checkpoints: when a person asks, and, soon after its store was opened, the newest of each run."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...checkpoint.engine import Engine, Transfer, TransferDone
from ...checkpoint.run_store import RunStore
from ...core.errors import NotFoundError
from ...core.ids import CheckpointId
from ..blocking import in_thread
from ..control import node_views, store_views
from ..control.views import Verdict
from .scrub_plan import GIVE_WAY_S_MAX, rest_s
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

_GIVE_WAY_STEP_S = 0.05


class Verifier:
    """Verifies through the devices' queues, beside their other transfers. Owned by the event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._tasks: dict[OpenStore, asyncio.Task[None]] = {}
        self._reading: Counter[OpenStore] = Counter()
        self._found: dict[OpenStore, list[Verdict]] = {}
        self._newest_read: dict[tuple[RunStore, CheckpointId], float] = {}
        """When the newest checkpoint of a run was found intact after the opening of its store, of the wall clock."""
        self._beside = asyncio.Semaphore(1)  # each takes 16 MiB per device

    def found(self, opened: OpenStore) -> tuple[Verdict, ...]:
        """Return what reading the newest checkpoints of a store has shown so far."""
        return tuple(self._found.get(opened, ()))

    def watch(self, opened: OpenStore) -> None:
        """Verify the newest checkpoint of each run of a store in a while; a restart may restore first."""
        self._found[opened] = []
        self._tasks[opened] = self._node.spawn(self._check_newest(opened), "verifying the newest checkpoints")

    def is_reading(self, opened: OpenStore) -> bool:
        """Tell whether somebody who asked for it has a checkpoint of this store read."""
        return self._reading[opened] > 0

    async def forget(self, opened: OpenStore) -> None:
        """Return when nothing reads a store in the background any more: it is about to be closed."""
        task = self._tasks.pop(opened)
        task.cancel()
        await asyncio.wait([task])
        del self._found[opened]
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
        for task in self._tasks.values():
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
            for checkpoint in run.offered():
                try:
                    verdict = await self.verify_beside(run, checkpoint)
                except NotFoundError:
                    continue  # retention has removed it since
                self._record(opened, verdict, "newest_verified")
                if verdict.is_intact:
                    self._newest_read[run, checkpoint] = time.time()
                    break

    def _record(self, opened: OpenStore, verdict: Verdict, event: str) -> None:
        self._found[opened].append(verdict)
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
