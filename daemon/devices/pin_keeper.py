"""Takes pins away when their time is over: at once while the daemon runs, and after its start what ended meanwhile."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from ...checkpoint.pins import next_expiry_unix_s, remove_expired
from ...checkpoint.run_store import RunStore
from ...core.errors import StorageError
from ..blocking import in_thread

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
"""At least: the clock may be set, and a device come back."""


class PinKeeper:
    """Owned by the event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """A store was opened: its pins end in time from now on."""
        if self._task is None:
            self._task = self._node.spawn(self._keep(), "ending pins")
        self._changed.set()

    def changed(self) -> None:
        """Somebody pinned a checkpoint."""
        self._changed.set()

    def stop(self) -> None:
        """End what goes on in the background."""
        if self._task is not None:
            self._task.cancel()

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            due = [run for run in self._runs() if (next_expiry_unix_s(run) or time.time() + 1) <= time.time()]
            failed_count = sum([not await self._try_end(run) for run in due])
            ends_unix_s = [each for run in self._runs() if (each := next_expiry_unix_s(run)) is not None]
            wait_s = min(min(ends_unix_s, default=time.time() + LOOK_EVERY_S) - time.time(), LOOK_EVERY_S)
            try:
                async with asyncio.timeout(
                    LOOK_EVERY_S if failed_count else max(wait_s, 1.0 if due else 0.01)
                ):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _runs(self) -> list[RunStore]:
        return [run for opened in self._node.stores.stores for run in opened.store.runs()]

    async def _try_end(self, run: RunStore) -> bool:
        """End the pins of a run whose time is over; return whether none of them is left."""
        async with self._node.opening():  # so that the store is not closed meanwhile
            if run not in self._runs():
                return True
            try:
                ended = await in_thread(remove_expired, run, time.time())
            except StorageError as error:
                logger.warning("pins_not_ended run=%s reason=%s", run.run_id, error)
                return False
        for pin in ended:
            logger.info("pin_ended run=%s label=%r", run.run_id, pin.label)
        return True
