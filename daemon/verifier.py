"""Reading whole checkpoints: when a person asks, and, soon after its store was opened, the newest of each run."""

import asyncio
import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from ..checkpoint.engine import Engine, Transfer, TransferDone
from ..checkpoint.run_store import RunStore
from ..core.errors import NotFoundError
from ..core.ids import CheckpointId
from . import node_views, store_views
from .blocking import in_thread
from .stores import OpenStore
from .views import Verdict

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

REST = 9.0
"""In the background a device rests nine times as long as it was read: a tenth of its time, the rest is for runs."""


class Verifier:
    """Verifies through the devices' queues, beside their other transfers. Owned by the event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._tasks: dict[OpenStore, asyncio.Task[None]] = {}
        self._reading: Counter[OpenStore] = Counter()
        self._found: dict[OpenStore, list[Verdict]] = {}

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

    def stop(self) -> None:
        """End what goes on in the background, after the chunks that are being read."""
        for task in self._tasks.values():
            task.cancel()

    async def verify(self, run: RunStore, checkpoint: CheckpointId) -> Verdict:
        """Return what every byte is worth, for somebody who asked; see `_verify`."""
        opened = self._opened(run)
        self._reading[opened] += 1
        try:
            return await self._verify(opened, run, checkpoint)
        finally:
            self._reading[opened] -= 1

    def _opened(self, run: RunStore) -> OpenStore:
        opened = next((each for each in self._node.stores.stores if each.store is run.store), None)
        if opened is None:
            raise NotFoundError(f"the store of run {run.name!r} has been closed")
        return opened

    async def _verify(
        self, opened: OpenStore, run: RunStore, checkpoint: CheckpointId, *, rest: float = 0.0
    ) -> Verdict:
        """Return what every byte is worth; a cancelled call ends after the chunks that are being read.

        `rest`: how many times as long as a device was read it is left to others.

        Raises:
            NotFoundError: there is no such checkpoint (any more).
        """
        stop = threading.Event()
        engines = {key: Restrained(queue, stop, rest) for key, queue in opened.queues.items()}
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

    async def _check_newest(self, opened: OpenStore) -> None:
        await asyncio.sleep(self._node.config.verify.after_s)
        for run in opened.store.runs():
            for checkpoint in run.offered():
                try:
                    verdict = await self._verify(opened, run, checkpoint, rest=REST)
                except NotFoundError:
                    continue  # retention has removed it since
                self._record(opened, verdict)
                if verdict.is_intact:
                    break

    def _record(self, opened: OpenStore, verdict: Verdict) -> None:
        self._found[opened].append(verdict)
        result = "intact" if verdict.is_intact else "damaged"
        self._node.metrics.verified_total.labels(result).inc()
        logger.log(
            logging.INFO if verdict.is_intact else logging.ERROR,
            "newest_verified run=%s checkpoint=%s result=%s seconds=%.3f problems=%s",
            verdict.summary.run_id,
            verdict.summary.checkpoint,
            result,
            verdict.elapsed_s,
            [*verdict.problems, *(segment.problem for segment in verdict.segments if segment.problem)],
        )


class StoppedError(Exception):
    """Nobody waits for this verification any more. No EverstepError: those count as damage of what is read."""


class Restrained:
    """An engine that rests after each transfer, and moves nothing more once `stop` is set."""

    def __init__(self, engine: Engine, stop: threading.Event, rest: float = 0.0) -> None:
        self._engine, self._stop, self._rest = engine, stop, rest

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._engine.name

    def run(self, transfer: Transfer) -> TransferDone:
        """Move, or raise when stopped."""
        if self._stop.is_set():
            raise StoppedError
        began_s = time.monotonic()
        done = self._engine.run(transfer)
        if self._rest:
            self._stop.wait(self._rest * (time.monotonic() - began_s))
        return done

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena."""
        self._engine.forget(arena_fd)

    def close(self) -> None:
        """Leave the engine behind to its owner."""
