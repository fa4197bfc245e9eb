"""One cache: an arena, its readers with their budgets, and the memory that it may have."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.sizes import size_text
from ...proto import frames
from ..arena_book import ArenaBook
from ..blocking import in_thread
from ..views import CacheView
from .arena import CacheArena, CopyResult, Item
from .staging import Staging

if TYPE_CHECKING:
    from ..session import Session

Key = tuple[int, frames.CacheContent, str]
"""Whose it is, what its bytes are, and the fingerprint of the dataset."""


class Cache:
    """Owned by the event loop."""

    def __init__(self, number: int, key: Key, arena: CacheArena, arenas: ArenaBook) -> None:
        self.number, self.key, self.arena = number, key, arena
        self._arenas = arenas
        self._budgets: dict[Session, int] = {}
        self.idle_since_s = 0.0
        """When its last reader left; meaningless while it has one."""
        self.reason = ""
        self._growing = asyncio.Lock()
        self._is_copying = False

    @property
    def client_count(self) -> int:
        """Return how many processes read it."""
        return len(self._budgets)

    def add_client(self, session: "Session", budget_bytes: int) -> None:
        """Count one more reader; the largest budget is the one that counts."""
        self._budgets[session] = budget_bytes
        self._set_limit()

    def remove_client(self, session: "Session", now_s: float) -> None:
        """A reader left; what is there stays, and so does the budget when it was the last."""
        del self._budgets[session]
        self.idle_since_s = now_s
        self._set_limit()

    def _set_limit(self) -> None:
        if self._budgets and not self._is_copying:
            space = self.arena.space
            limit_bytes = min(max(self._budgets.values()), self.arena.file_bytes)
            space.limit_bytes = max(limit_bytes, space.used_bytes)
            self.arena.show()

    async def copy(self, staging: Staging, items: Sequence[Item]) -> CopyResult:
        """Copy samples in a thread (`CacheArena.copy`); the budget stands still meanwhile."""
        self._is_copying = True
        try:
            return await in_thread(self.arena.copy, staging, items)
        finally:
            self._is_copying = False
            self._set_limit()

    async def grow(self, step_bytes: int, length: int = 0) -> None:
        """Have the next pages (`Space.next_step_bytes`), or as many as the node has memory for: then it is short."""
        async with self._growing:
            wanted_bytes = self.arena.space.next_step_bytes(step_bytes, length)
            if wanted_bytes:
                await self._take(wanted_bytes)

    async def take_index(self) -> None:
        """Have the pages of header and index, like `grow`."""
        async with self._growing:
            await self._take(self.arena.space.base_bytes)

    async def _take(self, wanted_bytes: int) -> None:
        space = self.arena.space
        claim = await self._arenas.claim(wanted_bytes)
        try:
            if claim.size_bytes:
                await in_thread(self.arena.allocate, space.allocated_bytes + claim.size_bytes)
        except OSError as error:
            self._arenas.give_back(claim.size_bytes)
            space.is_short, self.reason = True, f"the kernel gives no more memory: {error.strerror or error}"
            return
        except BaseException:
            self._arenas.give_back(claim.size_bytes)
            raise
        finally:
            self._arenas.settle(claim)
        space.allocated_bytes += claim.size_bytes
        space.is_short = claim.size_bytes < wanted_bytes
        self.reason = claim.reason if space.is_short else ""

    async def why_less(self, asked_bytes: int) -> str:
        """Return why a reader that asked for so much may get less, or another amount; empty: it gets it."""
        space = self.arena.space
        if self.reason:
            return f"it has {size_text(space.allocated_bytes)}: {self.reason}"
        if space.limit_bytes > asked_bytes:
            return f"another process of this dataset asked for a budget of {size_text(space.limit_bytes)}"
        if space.limit_bytes < asked_bytes:
            return f"the node has {size_text(self.arena.file_bytes)} of memory"
        room = await self._arenas.room()
        if room.size_bytes < space.limit_bytes - space.allocated_bytes:
            return f"{room.why}: {room.hint}"
        return ""

    def state(self, now_s: float) -> CacheView:
        """Return what operators see."""
        uid, content, fingerprint = self.key
        space = self.arena.space
        return CacheView(
            number=self.number,
            uid=uid,
            fingerprint=fingerprint,
            content=content.value,
            sample_count=space.sample_count,
            published_count=self.arena.published_count,
            used_bytes=space.used_bytes,
            allocated_bytes=space.allocated_bytes,
            budget_bytes=space.limit_bytes,
            client_count=self.client_count,
            idle_s=0.0 if self._budgets else now_s - self.idle_since_s,
            reason=self.reason,
        )

    def close(self) -> None:
        """Give the memory back; for a thread."""
        size_bytes = self.arena.space.allocated_bytes
        self.arena.close()
        self._arenas.give_back(size_bytes)
