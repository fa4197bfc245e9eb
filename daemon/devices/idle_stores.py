"""Closes what a private daemon holds open for runs that have ended, while it serves others.

Each store takes descriptors and threads of each of its devices, and its locks keep other daemons out. A node's daemon
has one store, which stays open.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from ..blocking import in_thread
from .store_use import refusal_to_close
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""Nobody has used a store for so long, or for `daemon.linger_s` where that is shorter."""
LOOKS_PER_GRACE = 4


class IdleStores:
    """Owned by the event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._since_s: dict[OpenStore, float] = {}
        """When each store was seen first without anybody who uses it, and has been at each look since."""
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """A store was opened: it is closed when nobody has used it for a while."""
        if self._task is None and self._node.private:
            self._task = self._node.spawn(self._keep_looking(), "closing idle stores")

    def stop(self) -> None:
        """Close nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_looking(self) -> None:
        while True:
            grace_s = max(1.0, min(GRACE_S, self._node.config.daemon.linger_s))
            await asyncio.sleep(grace_s / LOOKS_PER_GRACE)
            self._look(grace_s, asyncio.get_running_loop().time())

    def _look(self, grace_s: float, now_s: float) -> None:
        stores = self._node.stores
        idle = [opened for opened in stores.stores if self._is_idle(opened)]
        self._since_s = {opened: self._since_s.get(opened, now_s) for opened in idle}
        if self._node.is_opening or stores.is_in_hand:
            return
        for opened in [each for each, since_s in self._since_s.items() if now_s - since_s >= grace_s]:
            del self._since_s[opened]
            stores.withdraw(opened, self._node.spawn(self._close(opened), "closing a store"))

    def _is_idle(self, opened: OpenStore) -> bool:
        node = self._node
        if opened.store.has_late:
            return False  # whoever opens it again would find the device locked
        if refusal_to_close(node, opened) or node.scrubber.is_asked_for(opened):
            return False
        runs = [run for run in node.registry.runs.values() if run.opened is opened]
        return not any(node.persister.is_completing(run) for run in runs)

    async def _close(self, opened: OpenStore) -> None:
        await self._node.forget_store(opened)
        await in_thread(opened.close)
        logger.info("store_closed paths=%s", opened.describe())
