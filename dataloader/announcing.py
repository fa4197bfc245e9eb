"""Who wants to be told which samples are read next, and through which datasets the word goes.

A cache over several nodes fetches together what it hears of together, so a dataset that stands between it and the
loader must not keep the word to itself. Ours have a `will_read` of their own; torch's Subset and ConcatDataset are seen
through here.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch.utils.data import ConcatDataset, Subset

Announcer = Callable[[Sequence[int]], object]


def announcer(dataset: object) -> Announcer | None:
    """Return what takes the ids that are about to be read; None where the dataset and what it reads want none."""
    told: object = getattr(dataset, "will_read", None)
    if callable(told):
        return cast(Announcer, told)
    if isinstance(dataset, Subset):
        subset = cast("Subset[object]", dataset)
        inner = announcer(subset.dataset)
        return None if inner is None else _OfSubset(inner, subset.indices)
    if isinstance(dataset, ConcatDataset):
        concat = cast("ConcatDataset[object]", dataset)
        parts = tuple(map(announcer, concat.datasets))
        return _OfConcat(parts, concat.cumulative_sizes) if any(parts) else None
    return None


@dataclass(frozen=True, slots=True)
class _OfSubset:
    """Hands ids on as those of the dataset that a Subset is of. Travels to workers, however started."""

    inner: Announcer
    indices: Sequence[int]

    def __call__(self, ids: Sequence[int]) -> None:
        self.inner([self.indices[each] for each in ids])


@dataclass(frozen=True, slots=True)
class _OfConcat:
    """Hands ids on to the datasets that a ConcatDataset joins, as their own; travels like the other."""

    parts: Sequence[Announcer | None]
    ends: Sequence[int]
    """Of each part: the number of samples up to its last one."""

    def __call__(self, ids: Sequence[int]) -> None:
        wanted: dict[int, list[int]] = {}
        for each in ids:
            from_start = each if each >= 0 else self.ends[-1] + each
            part = bisect_right(self.ends, from_start)
            wanted.setdefault(part, []).append(from_start - (self.ends[part - 1] if part else 0))
        for part, indices in wanted.items():
            told = self.parts[part]
            if told is not None:
                told(indices)
