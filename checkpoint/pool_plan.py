"""Which files of deleted checkpoints wait to be written again, and which of them a new segment gets. Pure."""

from collections.abc import Sequence
from itertools import accumulate

FITTING_SHARE = 8
"""A file may be larger or smaller than the new segment by one part in so many: what it lacks is allocated anew, and
what it has too much is freed, both while the checkpoint is written."""


def best_fit(sizes_bytes: Sequence[int], wanted_bytes: int) -> int | None:
    """Return the index of the file nearest in size, of equal ones the first; None: none is near enough."""
    index = min(range(len(sizes_bytes)), key=lambda each: abs(sizes_bytes[each] - wanted_bytes), default=None)
    if index is None or abs(sizes_bytes[index] - wanted_bytes) * FITTING_SHARE > wanted_bytes:
        return None
    return index


def surplus_count(sizes_bytes: Sequence[int], bound_bytes: int) -> int:
    """Return how many files, from the first on, have to go so that the others together are within the bound."""
    return count_reaching(sizes_bytes, sum(sizes_bytes) - bound_bytes)


def count_reaching(sizes_bytes: Sequence[int], needed_bytes: int) -> int:
    """Return how many files, from the first on, have so many bytes together; all of them where that is not enough."""
    if needed_bytes <= 0:
        return 0
    sums = accumulate(sizes_bytes)
    return next((count for count, size in enumerate(sums, 1) if size >= needed_bytes), len(sizes_bytes))
