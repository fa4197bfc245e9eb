"""When a daemon may end, and when the memory of a crashed trainer is given back: two clocks, each for its own."""

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
        self._named_at_s: float | None = None
        """When somebody was told last where other nodes reach this one."""

    @property
    def idle(self) -> bool:
        """Tell whether nobody is or is being attached, nothing is being written, nothing is kept for a restart.

        Caches do not count: their readers find another daemon.
        """
        if self._node.shares.has_jobs:
            return False
        return not self._node.is_opening and not any(
            rank.lease or rank.persisting or rank.kept_until_s is not None
            for rank in self._node.registry.ranks()
        )

    @property
    def _is_unused(self) -> bool:
        """Tell whether nobody needs it: neither a trainer nor whoever reads a cache."""
        return self.idle and not self._node.caches.has_clients

    @property
    def is_ending(self) -> bool:
        """Tell whether the daemon has been told to end, or has reason to."""
        return self._ended.is_set()

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
        """Somebody came, left or was settled: look again, now and when the next thing is due."""
        attached = sum(rank.lease is not None for rank in self._node.registry.ranks())
        self._node.metrics.attached.set(attached)
        self._seen_trainer |= attached > 0
        if self._timer is not None:
            self._timer.cancel()
        delay_s = self._delay_s()
        loop = asyncio.get_running_loop()
        self._timer = None if delay_s is None else loop.call_later(delay_s, self._due)

    def expect_reader(self) -> None:
        """Somebody was told where other nodes reach this one, tells them, and comes back to read with them."""
        self._named_at_s = asyncio.get_running_loop().time()
        self.changed()

    def _delay_s(self) -> float | None:
        """Return in how many seconds a rank's memory is given back or an idle private daemon ends, if any does."""
        ends_s = [
            end_s
            for rank in self._node.registry.ranks()
            if (end_s := rank.given_back_at_s) is not None and not rank.persisting
        ]
        if ends_s:
            return max(0.0, min(ends_s) - asyncio.get_running_loop().time())
        if not (self._node.private and self._is_unused):
            return None
        grace_s = CLEAN_GRACE_S if self._seen_trainer or self._node.caches.has_been_used else START_GRACE_S
        return max(grace_s, self._readers_wait_s())

    def _readers_wait_s(self) -> float:
        """Return for how many seconds more a private daemon waits for readers.

        Those of its caches left, and the next job is to find them; or they were told of its address and begin later.
        """
        since_s = [each for each in (self._node.caches.left_s(), self._named_at_s) if each is not None]
        if not since_s:
            return 0.0
        return max(since_s) + self._node.config.daemon.linger_s - asyncio.get_running_loop().time()

    def _due(self) -> None:
        self._timer = None
        if self._node.private and self._is_unused and self._readers_wait_s() <= 0:
            self.end("nobody is attached and nothing is kept for a restart")
        else:
            self._give_memory_back()
            self.changed()

    def _give_memory_back(self) -> None:
        """Drop the snapshots of every rank whose trainer did not come back in time, whoever else is attached."""
        now_s = asyncio.get_running_loop().time()
        for rank in self._node.registry.ranks():
            if (end_s := rank.given_back_at_s) is not None and end_s <= now_s and not rank.persisting:
                logger.info("memory_given_back run=%s rank=%d", rank.run.run_id, rank.rank)
                rank.kept_until_s = None
                self._node.arena_desk.drop_memory(rank)
