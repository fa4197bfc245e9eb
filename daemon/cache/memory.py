"""What all caches, and those of one user, may take of the node's memory; within that the arenas' own rules hold."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..admission_plan import PAGE_BYTES, Room
from ..arena_book import ArenaBook, Claim
from .space_plan import bounded_room


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheClaim:
    """Memory that one user's cache was given; it counts until `give_back`."""

    uid: int
    size_bytes: int
    reason: str
    """Why it is less than what was asked for, and what to do; empty: it is not."""
    claim: Claim | None


async def _no_relief(_bytes: int, _uid: int | None) -> None:
    """There is nothing that could go."""


class CacheMemory:
    """Owned by the event loop."""

    def __init__(self, arenas: ArenaBook) -> None:
        self._arenas = arenas
        self._used_bytes: Counter[int] = Counter()
        """By uid."""
        self.relieve: Callable[[int, int | None], Awaitable[None]] = _no_relief
        """Drops caches that nobody reads, of one user or of all (None), until so many bytes are free."""

    @property
    def largest_user_bytes(self) -> int:
        """Bytes of the user who has most."""
        return max(self._used_bytes.values(), default=0)

    def bounded(self, uid: int) -> Room:
        """Return what the configuration leaves to a user's caches."""
        return bounded_room(
            uid,
            user_bytes=self._used_bytes[uid],
            user_max_bytes=self._arenas.bounds.cache_user_max_bytes,
            all_bytes=self._used_bytes.total(),
            all_max_bytes=self._arenas.bounds.cache_max_bytes,
        )

    async def room(self, uid: int) -> Room:
        """Return what there is for a user's caches, by the bound that leaves least."""
        return min(self.bounded(uid), await self._arenas.room(), key=lambda room: room.size_bytes)

    async def claim(self, uid: int, size_bytes: int) -> CacheClaim:
        """Admit so many bytes more, or whole pages of as many as there is room for, perhaps none."""
        await self._relieve(uid, size_bytes)
        room = self.bounded(uid)  # no wait from here until it counts
        fitting_bytes = max(0, room.size_bytes // PAGE_BYTES * PAGE_BYTES)
        asked_bytes = size_bytes if size_bytes <= room.size_bytes else fitting_bytes
        reason = "" if asked_bytes == size_bytes else f"{room.why}: {room.hint}"
        if not asked_bytes:
            return CacheClaim(uid=uid, size_bytes=0, reason=reason, claim=None)
        self._used_bytes[uid] += asked_bytes
        try:
            claim = await self._arenas.claim(asked_bytes)
        except BaseException:
            self._used_bytes[uid] -= asked_bytes
            raise
        self._used_bytes[uid] -= asked_bytes - claim.size_bytes
        return CacheClaim(uid=uid, size_bytes=claim.size_bytes, reason=claim.reason or reason, claim=claim)

    async def _relieve(self, uid: int, size_bytes: int) -> None:
        """Where a configured bound is in the way, give up what nobody reads: the user's own, or anybody's."""
        bounds = self._arenas.bounds
        lacking_bytes = self._used_bytes[uid] + size_bytes - bounds.cache_user_max_bytes
        if lacking_bytes > 0:
            await self.relieve(lacking_bytes, uid)
        size_bytes = min(size_bytes, bounds.cache_user_max_bytes - self._used_bytes[uid])
        lacking_bytes = self._used_bytes.total() + size_bytes - bounds.cache_max_bytes
        if lacking_bytes > 0:
            await self.relieve(lacking_bytes, None)

    def settle(self, claim: CacheClaim) -> None:
        """Its pages are there, or were given back."""
        if claim.claim is not None:
            self._arenas.settle(claim.claim)

    def give_back(self, uid: int, size_bytes: int) -> None:
        """Count so many bytes of a user no more."""
        self._arenas.give_back(size_bytes)
        self._used_bytes[uid] -= size_bytes
        if not self._used_bytes[uid]:
            del self._used_bytes[uid]
