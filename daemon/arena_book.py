"""Makes and closes arenas under one bound on their memory; what takes time is done beside the event loop.

An arena counts until its memory is given back, not until it is forgotten: engines let go of it after the transfers
before it, and the kernel takes 0.16 s to free a GiB (2 cores, tmpfs pages of 4 KiB).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from .admission_plan import Room, Wish, grant, room_left
from .arena import Arena, make_arena
from .blocking import in_thread
from .config import MemorySection
from .metrics import Metrics
from .node_memory import read_memory_bounds

CLOSING_DEADLINE_S = 5.0
"""How long a new arena waits for room that is being given back: a device that hangs may never give it back."""

Spawn = Callable[[Coroutine[None, None, None], str], "asyncio.Task[None]"]
Forget = Callable[[int], Awaitable[None]]
"""Lets the engines unmap the arena of this descriptor."""


class ArenaBook:
    """Owned by the event loop."""

    def __init__(self, memory: MemorySection, metrics: Metrics, spawn: Spawn) -> None:
        self._memory, self._metrics, self._spawn = memory, metrics, spawn
        self._size_bytes = 0
        self._made_count = 0
        self._untouched_bytes: dict[int, int] = {}
        """Of arenas being made, by number: admitted, and not yet missing in what the node has left."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def size_bytes(self) -> int:
        """Bytes of all arenas: those in use, being made, and being closed."""
        return self._size_bytes

    async def make(self, wish: Wish, *, layout_digest: str, sharers: int = 1) -> Arena:
        """Return a new arena with a number that no other had, with fewer slots where not all fit; see `make_arena`.

        `sharers`: so many, the asker among them, are going to ask for the like.

        Raises:
            MemoryRefusedError: the configured bound, the node or a cgroup has no room for one slot.
        """
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSING_DEADLINE_S)
        room = await self._room()
        granted = grant(wish, room, sharers=sharers)  # no wait from here until it counts
        self._made_count += 1
        number = self._made_count
        self._add(granted.size_bytes)
        self._untouched_bytes[number] = granted.size_bytes

        def touched(size_bytes: int) -> None:
            self._untouched_bytes[number] = granted.size_bytes - size_bytes

        try:
            return await make_arena(
                number,
                granted,
                layout_digest=layout_digest,
                reserve_bytes=self._memory.reserve_bytes,
                on_touched=touched,
            )
        except BaseException:
            self._add(-granted.size_bytes)
            raise
        finally:
            del self._untouched_bytes[number]

    async def has_room(self, wish: Wish) -> bool:
        """Tell whether all that is wished for would be granted now."""
        return wish.size_bytes <= (await self._room()).size_bytes

    async def _room(self) -> Room:
        bounds = await read_memory_bounds()
        return room_left(
            self._memory.arena_max_bytes - self._size_bytes,
            bounds,
            reserve_bytes=self._memory.reserve_bytes,
            promised_bytes=sum(self._untouched_bytes.values()),
        )

    def close(self, arena: Arena, forget: Forget) -> "asyncio.Task[None]":
        """Give an arena back that nobody may use any more; done when its memory is free."""
        task = self._spawn(self._close(arena, forget), "closing an arena")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def all_closed(self) -> None:
        """Return when the memory of every arena given back so far is free, and no engine has it mapped."""
        if self._closing:
            await asyncio.wait(self._closing)

    async def _close(self, arena: Arena, forget: Forget) -> None:
        await forget(arena.fd)
        await in_thread(arena.close)
        self._add(-arena.size_bytes)

    def _add(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        self._metrics.arena_bytes.set(self._size_bytes)
