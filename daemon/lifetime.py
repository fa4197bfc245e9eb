"""When a daemon may end, and when the memory of a crashed trainer is given back."""

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

START_GRACE_S = 30.0
"""A private daemon that nobody attaches to within this was started for nothing."""

CLEAN_GRACE_S = 0.5
"""After the last clean close: room for the next run of a script that attaches one after the other."""


class Lifetime:
    """Decides on the event loop; `wait` returns the reason when the daemon should end."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._ended = asyncio.Event()
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        self._seen_trainer = False

    @property
    def idle(self) -> bool:
        """Tell whether nobody is attached, nothing waits to be written, no snapshots are held for a restart."""
        return not any(rank.lessee or rank.persisting or rank.lost for rank in self._node.registry.ranks())

    async def wait(self) -> str:
        """Return why the daemon should end."""
        await self._ended.wait()
        return self._reason

    def end(self, reason: str) -> None:
        """Ask the daemon to end; the first reason stands."""
        if not self._ended.is_set():
            self._reason = reason
            self._ended.set()

    def changed(self) -> None:
        """Somebody came, left or was settled: look again, now and after the time that applies."""
        ranks = self._node.registry.ranks()
        attached = sum(rank.lessee is not None for rank in ranks)
        self._node.metrics.attached.set(attached)
        self._seen_trainer |= attached > 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if attached or any(rank.persisting for rank in ranks):
            return
        self._timer = asyncio.get_running_loop().call_later(self._delay_s(), self._over)

    def _delay_s(self) -> float:
        if any(rank.lost for rank in self._node.registry.ranks()):
            return self._node.config.daemon.linger_s
        return CLEAN_GRACE_S if self._seen_trainer else START_GRACE_S

    def _over(self) -> None:
        """Nobody came back: a private daemon ends, a node's gives the memory back."""
        self._timer = None
        for rank in self._node.registry.ranks():
            if rank.lost:
                rank.lost = False
                self._node.drop_memory(rank)
        if self._node.private:
            self.end("nobody is attached and everything is committed")
