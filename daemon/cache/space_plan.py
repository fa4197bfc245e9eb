"""How much of a cache's budget is used, and which caches make room for another. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ...core.sizes import size_text
from ...dataloader.cache.arena_format import base_bytes, record_bytes
from ..admission_plan import Room


class Refusal(Enum):
    """Why a sample is not admitted."""

    FULL = "full"
    OVERSIZED = "oversized"
    """It would not fit in an empty cache either."""
    MEMORY = "memory"
    """The budget has room, the node has none."""
    CORRUPT = "corrupt"
    """Its bytes are not those that the digest was taken of."""
    DIFFERS = "differs"
    """It is there with other bytes."""


@dataclass(slots=True, kw_only=True)
class Space:
    """The bytes of one arena, filled from the begin and never taken back: admitted until full."""

    sample_count: int
    limit_bytes: int
    """The budget that counts."""
    used_bytes: int = 0
    allocated_bytes: int = 0
    """Pages that are there, from the begin."""
    is_short: bool = False
    """The node had no memory for more when it was asked last."""

    def __post_init__(self) -> None:
        self.used_bytes = self.used_bytes or self.base_bytes

    @property
    def base_bytes(self) -> int:
        """Bytes of header and index."""
        return base_bytes(self.sample_count)

    @property
    def capacity_bytes(self) -> int:
        """Bytes for records in all."""
        return max(0, self.limit_bytes - self.base_bytes)

    @property
    def end_bytes(self) -> int:
        """Where records must end: at the budget, and where the memory is short, at what there is of it."""
        return min(self.limit_bytes, self.allocated_bytes) if self.is_short else self.limit_bytes

    @property
    def free_bytes(self) -> int:
        """Return the largest record that may be admitted now."""
        return max(0, self.end_bytes - self.used_bytes)

    def refusal(self, length: int) -> Refusal | None:
        """Return why a sample of so many bytes cannot be admitted; None: it can."""
        needed_bytes = record_bytes(length)
        if needed_bytes > self.capacity_bytes:
            return Refusal.OVERSIZED
        if self.used_bytes + needed_bytes > self.limit_bytes:
            return Refusal.FULL
        return Refusal.MEMORY if needed_bytes > self.free_bytes else None

    def is_allocated_for(self, length: int) -> bool:
        """Tell whether the pages of a sample of so many bytes are there."""
        return self.used_bytes + record_bytes(length) <= self.allocated_bytes

    def admit(self, length: int) -> int:
        """Take the place of a record and return its offset; its pages must be there."""
        assert self.refusal(length) is None
        assert self.is_allocated_for(length)
        place = self.used_bytes
        self.used_bytes += record_bytes(length)
        assert self.used_bytes <= min(self.limit_bytes, self.allocated_bytes)
        return place

    def next_step_bytes(self, step_bytes: int, length: int = 0) -> int:
        """Return how many bytes to allocate next, ahead of need or for a sample of so many bytes; 0: enough."""
        missing_bytes = self.limit_bytes - self.allocated_bytes
        ahead_bytes = self.allocated_bytes - self.used_bytes
        lacking_bytes = record_bytes(length) - ahead_bytes
        if missing_bytes <= 0 or (lacking_bytes <= 0 and ahead_bytes >= step_bytes // 2):
            return 0
        return min(max(step_bytes, lacking_bytes), missing_bytes)


def bounded_room(
    uid: int, *, user_bytes: int, user_max_bytes: int, all_bytes: int, all_max_bytes: int
) -> Room:
    """Return what the bounds on one user's caches, and on those of all, leave for one more; never below 0."""
    of_user = Room(
        size_bytes=max(0, user_max_bytes - user_bytes),
        why=f"the caches of user {uid} have {size_text(user_bytes)} of {size_text(user_max_bytes)}",
        hint="drop some (everstep cache list), lower budget=, or have memory.cache_user_max_bytes raised",
    )
    of_all = Room(
        size_bytes=max(0, all_max_bytes - all_bytes),
        why=f"the caches of all users have {size_text(all_bytes)} of {size_text(all_max_bytes)}",
        hint="lower budget=, or have memory.cache_max_bytes raised",
    )
    return min(of_user, of_all, key=lambda room: room.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCache:
    """A cache that nobody reads now."""

    number: int
    idle_since_s: float
    size_bytes: int


def caches_to_drop(idle: Iterable[IdleCache], needed_bytes: int) -> list[int]:
    """Return the numbers of the caches to drop whole, oldest first, so that so many bytes become free, or all."""
    chosen: list[int] = []
    freed_bytes = 0
    for cache in sorted(idle, key=lambda each: (each.idle_since_s, each.number)):
        if freed_bytes >= needed_bytes:
            break
        chosen.append(cache.number)
        freed_bytes += cache.size_bytes
    return chosen
