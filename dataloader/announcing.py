"""Who wants to be told which samples are read next, and through which datasets the word goes.

A cache over several nodes fetches together what it hears of together, so a dataset that stands between it and the
loader must not keep the word to itself. Ours have a `will_read` of their own; torch's Subset is seen through here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from torch.utils.data import Subset

Announcer = Callable[[Sequence[int]], object]


def announcer(dataset: object) -> Announcer | None:
    """Return what takes the ids that are about to be read; None where the dataset and what it reads want none."""
    told: object = getattr(dataset, "will_read", None)
    if callable(told):
        return cast(Announcer, told)
    if not isinstance(dataset, Subset):
        return None
    subset = cast("Subset[object]", dataset)
    inner = announcer(subset.dataset)
    return None if inner is None else _OfSubset(inner, subset.indices)


@dataclass(frozen=True, slots=True)
class _OfSubset:
    """Hands ids on as those of the dataset that a Subset is of. Travels to workers, however started."""

    inner: Announcer
    indices: Sequence[int]

    def __call__(self, ids: Sequence[int]) -> None:
        self.inner([self.indices[each] for each in ids])
