"""What is complete on all ranks becomes known durably, and what is outdated by that is collected.

One at a time for each run; what is told meanwhile waits for the next one, all of it together. A drive that is slower
at collecting than at writing would otherwise be ever further behind, with more checkpoints on it than were asked for.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from ...checkpoint.collect import collect_garbage
from ...core.errors import EverstepError
from ...core.ids import CheckpointId
from ..blocking import in_thread
from ..registry import RunRecord

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)


class Completer:
    """Owned by the event loop."""

    def __init__(self, node: "Node", notify: Callable[[], Awaitable[None]]) -> None:
        """`notify` is called when a run has nothing to do any more."""
        self._node, self._notify = node, notify
        self._waiting: dict[RunRecord, set[CheckpointId] | None] = {}
        """What was told to be complete and nobody has begun with, of the runs that are worked on; an empty set asks
        for a collection only, None for nothing."""

    @property
    def is_busy(self) -> bool:
        """Tell whether anything is not recorded and collected yet."""
        return bool(self._waiting)

    def is_busy_with(self, run: RunRecord) -> bool:
        """Tell whether anything of a run is not recorded and collected yet."""
        return run in self._waiting

    def complete(self, run: RunRecord, checkpoint: CheckpointId) -> None:
        """All ranks have committed `checkpoint`: remember it durably, then collect what is outdated."""
        self._ask(run, {checkpoint})

    def collect(self, run: RunRecord) -> None:
        """Something may go: look for it."""
        self._ask(run, set())

    async def collected(self, run: RunRecord) -> None:
        """Return when what is outdated is gone; StorageError where a device failed.

        Of an adopted run nothing goes before a trainer has come with its rules: what they keep could not come back.
        """
        if run.is_adopted:
            return
        async with run.collecting:
            report = await in_thread(collect_garbage, run.store, keep=self._node.keep_of(run))
        self._node.metrics.persists.deleted_total.inc(len(report.removed))

    def _ask(self, run: RunRecord, complete: set[CheckpointId]) -> None:
        is_idle = run not in self._waiting
        self._waiting[run] = (self._waiting.get(run) or set()) | complete
        if is_idle:
            self._node.spawn(self._work_off(run), f"completing checkpoints of run {run.run_id}")

    async def _work_off(self, run: RunRecord) -> None:
        try:
            while (complete := self._waiting[run]) is not None:
                self._waiting[run] = None
                await self._carry_out(run, sorted(complete))
        finally:
            del self._waiting[run]
            await self._notify()

    async def _carry_out(self, run: RunRecord, complete: Sequence[CheckpointId]) -> None:
        try:
            if not complete or await self._record(run, complete):
                await self.collected(run)
        except EverstepError as error:
            logger.error("not_collected run=%s reason=%s", run.run_id, error)
        except Exception as error:  # noqa: BLE001 - logged and counted; what waits comes next all the same
            self._node.bug(f"completing {complete[-1]}" if complete else "collecting", error)

    async def _record(self, run: RunRecord, complete: Sequence[CheckpointId]) -> bool:
        """Tell whether it is durable that these are complete."""
        try:
            await in_thread(run.store.set_complete_floor, *complete)
        except EverstepError as error:
            logger.error(
                "complete_not_recorded run=%s checkpoint=%s reason=%s", run.run_id, complete[-1], error
            )
            return False
        finally:
            for each in complete:  # which they are, recorded or not; before any of them may go
                self._node.reporter.completed(run, each)
        return True
