"""One cache: an arena, its readers with their budgets, and the memory that it may have."""

import asyncio
import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ...core.sizes import size_text
from ...proto import frames
from ..blocking import in_thread
from ..control.views import CacheView
from ..nodes.copies_plan import Holdings, copy_room_bytes
from ..nodes.dataset import DatasetKey
from .arena import CacheArena, CopyResult, Item
from .memory import CacheMemory
from .staging import Bytes

if TYPE_CHECKING:
    from ..session import Session

Key = tuple[int, frames.CacheContent, str]
"""Whose it is, what its bytes are, and the fingerprint of the dataset."""

_COUNT_MAX = (1 << 62) - 1
"""Readers may say what they like: the sum must still fit into a message."""


class Cache:
    """Owned by the event loop."""

    def __init__(self, number: int, key: Key, arena: CacheArena, memory: CacheMemory) -> None:
        self.number, self.key, self.arena = number, key, arena
        self._memory = memory
        self._budgets: dict[Session, int] = {}
        self.idle_since_s = 0.0
        """When its last reader left; meaningless while it has one."""
        self.reason = ""
        self.held = Holdings()
        """What of it this node owns; all, unless other nodes share it."""
        self._hit_count = self._miss_count = 0
        self._growing = asyncio.Lock()
        self._is_copying = False
        self._pin_count = 0

    @property
    def client_count(self) -> int:
        """Return how many processes read it."""
        return len(self._budgets)

    @property
    def dataset(self) -> DatasetKey:
        """Return what other nodes know it by."""
        uid, content, fingerprint = self.key
        count = self.arena.space.sample_count
        return DatasetKey(uid=uid, content=content, fingerprint=fingerprint, sample_count=count)

    @property
    def clients(self) -> "list[Session]":
        """Return who reads it."""
        return list(self._budgets)

    @property
    def is_pinned(self) -> bool:
        """Tell whether its memory is being read for another node."""
        return self._pin_count > 0

    @contextlib.contextmanager
    def pinned(self) -> Generator[None]:
        """Keep it from being dropped."""
        self._pin_count += 1
        try:
            yield
        finally:
            self._pin_count -= 1

    def copy_room_bytes(self, member_count: int) -> int:
        """Return how many bytes of what other nodes own may be taken in, without keeping out what this one owns."""
        space = self.arena.space
        return copy_room_bytes(
            self.held,
            capacity_bytes=space.capacity_bytes,
            sample_count=space.sample_count,
            member_count=member_count,
        )

    def add_client(self, session: "Session", budget_bytes: int) -> None:
        """Count one more reader; the largest budget is the one that counts."""
        self._budgets[session] = budget_bytes
        self._set_limit()

    def remove_client(self, session: "Session", now_s: float) -> None:
        """A reader left; what is there stays, and so does the budget when it was the last."""
        del self._budgets[session]
        self.idle_since_s = now_s
        self._set_limit()

    def add_use(self, use: frames.CacheUse) -> None:
        """Add what a reader has read since it told it last."""
        self._hit_count = min(self._hit_count + use.hit_count, _COUNT_MAX)
        self._miss_count = min(self._miss_count + use.miss_count, _COUNT_MAX)

    def _set_limit(self) -> None:
        if self._budgets and not self._is_copying:
            space = self.arena.space
            limit_bytes = min(max(self._budgets.values()), self.arena.file_bytes)
            space.limit_bytes = max(limit_bytes, space.used_bytes)
            if space.allocated_bytes >= space.limit_bytes:
                space.is_short, self.reason = False, ""
            self.arena.show()

    async def copy(self, staging: Bytes, items: Sequence[Item]) -> CopyResult:
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
        uid = self.key[0]
        claim = await self._memory.claim(uid, wanted_bytes)
        try:
            if claim.size_bytes:
                await in_thread(self.arena.allocate, space.allocated_bytes + claim.size_bytes)
        except OSError as error:
            self._memory.give_back(uid, claim.size_bytes)
            space.is_short, self.reason = True, f"the kernel gives no more memory: {error.strerror or error}"
            return
        except BaseException:
            self._memory.give_back(uid, claim.size_bytes)
            raise
        finally:
            self._memory.settle(claim)
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
        room = await self._memory.room(self.key[0])
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
            hit_count=self._hit_count,
            miss_count=self._miss_count,
        )

    async def close(self) -> None:
        """Give the memory back, which counts until the kernel has it."""
        try:
            await in_thread(self.arena.close)
        finally:
            self._memory.give_back(self.key[0], self.arena.space.allocated_bytes)
