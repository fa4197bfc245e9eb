"""Several files as one sequence of samples: which file holds which, and which paths a user's text names."""

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ...core.errors import CorruptDataError, UsageError

EXPANDED_MAX = 1_000_000
LENGTH_MAX = (1 << 63) - 1
"""What len() can return."""
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")


class ShardTable:
    """Number of the first sample of each shard; 8 bytes for each."""

    def __init__(self, counts: Iterable[int]) -> None:
        """`counts` are the samples of each shard, in order; some may be 0.

        CorruptDataError where one is negative, or their sum beyond what a length can be.
        """
        self._starts = array("Q", [0])
        for number, count in enumerate(counts):
            end = self._starts[-1] + count
            if count < 0 or end > LENGTH_MAX:
                raise CorruptDataError(
                    f"shard or block {number} has {count} samples, so it says: {end} in all"
                )
            self._starts.append(end)

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return self._starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return (shard, number within it) of a sample that exists."""
        assert 0 <= index < len(self)
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def count(self, shard: int) -> int:
        """Return the number of samples of one shard."""
        return self._starts[shard + 1] - self._starts[shard]

    def counts(self) -> list[int]:
        """Return the number of samples of each shard."""
        return [self._starts[i + 1] - self._starts[i] for i in range(len(self._starts) - 1)]


def expand_braces(text: str) -> list[str]:
    """Return `x-{000..002}.tar` and `{a,b}` written out, as shells do; UsageError beyond a million."""
    found = _BRACES.search(text)
    if found is None:
        return [text]
    before, after = text[: found.start()], text[found.end() :]
    expanded: list[str] = []
    for choice in _choices(found.group(1), text):
        expanded += expand_braces(before + choice + after)
        if len(expanded) > EXPANDED_MAX:
            raise UsageError(f"{text!r} stands for more than {EXPANDED_MAX} paths")
    return expanded


def _choices(inside: str, text: str) -> Sequence[str]:
    bounds = _RANGE.fullmatch(inside)
    if bounds is None:
        if "," not in inside:
            raise UsageError(
                f"{{{inside}}} in {text!r} is neither a range nor a choice",
                hint="write {000..999} or {a,b}, or give a list of paths",
            )
        return inside.split(",")
    first, last = int(bounds[1]), int(bounds[2])
    if last < first or last - first >= EXPANDED_MAX:
        raise UsageError(f"{{{inside}}} in {text!r} is an empty range, or too long a one")
    width = len(bounds[1]) if bounds[1].startswith("0") else 0
    return [str(number).zfill(width) for number in range(first, last + 1)]
