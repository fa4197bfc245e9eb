"""Makes and closes arenas under one bound on their memory; what takes time is done beside the event loop.

An arena counts until its memory is given back, not until it is forgotten: engines let go of it after the transfers
before it, and the kernel takes 0.16 s to free a GiB (2 cores, tmpfs pages of 4 KiB).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace

from ..core.errors import MemoryRefusedError
from .admission_plan import PAGE_BYTES, Grant, Room, Wish, grant, room_left
from .arena import Arena, make_arena
from .blocking import in_thread
from .config import GIB, MemorySection
from .control.metrics import Metrics
from .fd_store.fd_store import FdStore
from .node_memory import read_memory_bounds

CLOSING_S, CLOSING_S_PER_GIB = 15.0, 1.0
"""How long memory that is given back is waited for, for each arena and GiB that are closing.

Engines let go of it between two transfers, and a device that hangs may never do.
"""

Spawn = Callable[[Coroutine[None, None, None], str], "asyncio.Task[None]"]
Forget = Callable[[int], Awaitable[None]]
"""Lets the engines unmap the arena of this descriptor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """An arena of slots that is to be allocated, and counts from now on."""

    number: int
    granted: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Memory that was admitted for something else than an arena of slots, and counts from now on."""

    number: int
    size_bytes: int
    reason: str
    """Why it is less than what was asked for, and what to do; empty: it is not."""


async def _no_relief(_: int) -> None:
    """There is nothing that could go."""


class ArenaBook:
    """Owned by the event loop."""

    def __init__(self, memory: MemorySection, metrics: Metrics, spawn: Spawn, fd_store: FdStore) -> None:
        self.bounds, self.fd_store = memory, fd_store
        self._metrics, self._spawn = metrics, spawn
        self._size_bytes = 0
        self._made_count = 0
        self._untouched_bytes: dict[int, int] = {}
        """Of arenas being made, by number: admitted, and not yet missing in what the node has left."""
        self._closing: dict[asyncio.Task[None], float] = {}
        """What gives memory back, and until when that counts as on its way."""
        self._closing_bytes = 0
        self.admitting = asyncio.Lock()
        """Held from what is given up for an arena until that is admitted: the room is no other arena's."""
        self.relieve: Callable[[int], Awaitable[None]] = _no_relief
        """Gives up what nobody uses, so that this many bytes become free if they can."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all arenas: those in use, being made, and being closed."""
        return self._size_bytes

    async def make(self, wish: Wish, *, layout_digest: str, sharers: int = 1) -> Arena:
        """Admit an arena and allocate it."""
        async with self.admitting:
            admitted = await self.admit(wish, sharers=sharers)
        return await self.allocate(admitted, layout_digest=layout_digest)

    async def admit(self, wish: Wish, *, sharers: int = 1) -> Admitted:
        """Return what is to be allocated, with fewer slots where not all fit. To be called while `admitting` is held.

        `sharers`: so many, the asker among them, are going to ask for the like.

        Raises:
            MemoryRefusedError: the configured bound, the node or a cgroup has no room for one slot.
        """
        needed_bytes = wish.size_bytes * sharers
        if (await self.room()).size_bytes < needed_bytes:
            await self._closed_in_time()
        room = await self._room_for(needed_bytes)
        granted = grant(wish, room, sharers=sharers)  # no wait from here until it counts
        self._made_count += 1
        self._add(granted.size_bytes)
        self._untouched_bytes[self._made_count] = granted.size_bytes
        return Admitted(number=self._made_count, granted=granted)

    async def allocate(self, admitted: Admitted, *, layout_digest: str) -> Arena:
        """Return a new arena with a number that no other had; see `make_arena`. Where it raises, it counts no more.

        To be called without a wait after `admit`: nothing else gives back what was admitted.
        """
        number, granted = admitted.number, admitted.granted

        def touched(size_bytes: int) -> None:
            self._untouched_bytes[number] = granted.size_bytes - size_bytes

        try:
            arena = await make_arena(
                number,
                granted,
                layout_digest=layout_digest,
                reserve_bytes=self.bounds.reserve_bytes,
                on_touched=touched,
            )
        except BaseException:
            self._add(-granted.size_bytes)
            raise
        finally:
            del self._untouched_bytes[number]
        self._metrics.memory.allocated(arena.size_bytes, arena.allocation_s)
        return arena

    def adopt(self, size_bytes: int) -> int:
        """Count an arena that a daemon before this one has made, room or not; return its number."""
        self._made_count += 1
        self._add(size_bytes)
        return self._made_count

    async def has_room(self, wish: Wish, *, sharers: int = 1) -> bool:
        """Tell whether all that is wished for would be granted now to so many."""
        needed_bytes = wish.size_bytes * sharers
        return needed_bytes <= (await self._room_for(needed_bytes)).size_bytes

    async def would_grant(self, wish: Wish, *, sharers: int, freed_bytes: int) -> bool:
        """Tell whether anything would be granted, slots or a ring, once so many bytes more are free."""
        room = await self.room()
        try:
            grant(wish, replace(room, size_bytes=room.size_bytes + freed_bytes), sharers=sharers)
        except MemoryRefusedError:
            return False
        return True

    async def claim(self, size_bytes: int) -> Claim:
        """Admit `size_bytes` more, or whole pages of as many as there is room for, perhaps none.

        They count as promised until `settle`, and count until `give_back`.
        """
        room = await self._room_for(size_bytes)
        fitting_bytes = max(0, room.size_bytes // PAGE_BYTES * PAGE_BYTES)
        granted_bytes = size_bytes if size_bytes <= room.size_bytes else fitting_bytes
        self._made_count += 1
        self._add(granted_bytes)
        self._untouched_bytes[self._made_count] = granted_bytes
        reason = "" if granted_bytes == size_bytes else f"{room.why}: {room.hint}"
        return Claim(number=self._made_count, size_bytes=granted_bytes, reason=reason)

    def settle(self, claim: Claim) -> None:
        """What was claimed is touched, or given back: it is missing in what the node has left, or never will be."""
        del self._untouched_bytes[claim.number]

    def give_back(self, size_bytes: int) -> None:
        """Count so many bytes of claims no more."""
        self._add(-size_bytes)

    async def _room_for(self, size_bytes: int) -> Room:
        """Return the room there is, after giving up what nobody uses where it is less than so many bytes."""
        room = await self.room()
        if room.size_bytes >= size_bytes:
            return room
        await self.relieve(size_bytes - room.size_bytes)
        return await self.room()

    async def room(self) -> Room:
        """Return what there is room for now."""
        bounds = await read_memory_bounds()
        return room_left(
            self.bounds.arena_max_bytes - self._size_bytes,
            bounds,
            reserve_bytes=self.bounds.reserve_bytes,
            promised_bytes=sum(self._untouched_bytes.values()),
        )

    def close(self, arena: Arena, forget: Forget) -> "asyncio.Task[None]":
        """Give an arena back that nobody may use any more; done when its memory is free."""
        task = self._spawn(self._close(arena, forget), "closing an arena")
        self._closing_bytes += arena.size_bytes
        within_s = CLOSING_S * (1 + len(self._closing)) + CLOSING_S_PER_GIB * self._closing_bytes / GIB
        self._closing[task] = time.monotonic() + within_s

        def closed(_: "asyncio.Task[None]") -> None:
            del self._closing[task]
            self._closing_bytes -= arena.size_bytes

        task.add_done_callback(closed)
        return task

    @property
    def is_closing(self) -> bool:
        """Tell whether memory of arenas is being freed, and nothing seems to keep it from that."""
        return any(time.monotonic() < until_s for until_s in self._closing.values())

    async def _closed_in_time(self) -> None:
        """Return when what is being closed is closed, or is late."""
        now_s = time.monotonic()
        coming = {task: until_s - now_s for task, until_s in self._closing.items() if until_s > now_s}
        if coming:
            await asyncio.wait(coming, timeout=max(coming.values()))

    async def all_closed(self) -> None:
        """Return when the memory of every arena given back so far is free, and no engine has it mapped."""
        if self._closing:
            await asyncio.wait(self._closing)

    async def _close(self, arena: Arena, forget: Forget) -> None:
        await forget(arena.fd)
        if arena.stored is not None:
            await self.fd_store.remove(arena.stored)
        await in_thread(arena.close)
        self._add(-arena.size_bytes)

    def _add(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        self._metrics.arena_bytes.set(self._size_bytes)
