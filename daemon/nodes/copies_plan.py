"""How much of a cache may hold copies of what other nodes own. Pure.

Nothing in a cache is ever replaced, so a copy that came too early would keep out a sample that this node owns, which
then nobody has in memory. Copies get what the owned samples will not need: their number is known but for chance (a
binomial's deviation), their mean size from those that are there.
"""

import math
from dataclasses import dataclass
from typing import Final

SIZE_MARGIN: Final = 1.05
"""The mean size of the samples that are there may be off by so much."""
DEVIATIONS: Final = 4.0
EVIDENCE_COUNT: Final = 100
"""Of fewer owned samples nothing is inferred, unless they are all."""


@dataclass(slots=True, kw_only=True)
class Holdings:
    """What a cache holds, in bytes of records."""

    owned_count: int = 0
    owned_bytes: int = 0
    copy_count: int = 0
    copy_bytes: int = 0

    def add(self, size_bytes: int, *, is_owned: bool) -> None:
        """Count one more record."""
        if is_owned:
            self.owned_count += 1
            self.owned_bytes += size_bytes
        else:
            self.copy_count += 1
            self.copy_bytes += size_bytes


def reserved_bytes(held: Holdings, *, sample_count: int, member_count: int) -> float:
    """Return how many bytes the owned samples may need in all; infinite while nobody can know."""
    expected = sample_count / member_count
    count = min(float(sample_count), expected + DEVIATIONS * math.sqrt(expected))
    if held.owned_count < min(EVIDENCE_COUNT, expected):
        return math.inf
    mean_bytes = held.owned_bytes / held.owned_count if held.owned_count else 0.0
    return max(float(held.owned_bytes), mean_bytes * count * SIZE_MARGIN)


def copy_room_bytes(held: Holdings, *, capacity_bytes: int, sample_count: int, member_count: int) -> int:
    """Return how many bytes more of copies may be taken in."""
    if member_count < 1:
        return 0
    reserved = reserved_bytes(held, sample_count=sample_count, member_count=member_count)
    if reserved > capacity_bytes:
        return 0
    return max(0, capacity_bytes - math.ceil(reserved) - held.copy_bytes)
