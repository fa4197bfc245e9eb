"""Several datasets as one, in fixed proportions, each through its own epochs exactly once."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index as whole_number
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch.utils.data import Dataset

from ..core.errors import UsageError
from .announcing import announcer
from .arguments import BlockShuffle, fingerprint_of, parse_order, parse_seed
from .hash_format import derive_keys
from .mixture_plan import Draw, Schedule, whole_weights
from .order_format import TABLE_COUNT_MAX, OrderKind, OrderSpec, permutation
from .order_plan import order

if TYPE_CHECKING:
    from collections.abc import Callable

    from .batch_maker import MapDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where a sample of a mixture comes from."""

    name: str
    epoch: int
    """How often its dataset was gone through before."""
    index: int
    """Its number in that dataset."""


class Mixture(Dataset[object]):
    """A map-style dataset whose sample i is the i-th of an endless mixture; give it to `everstep.DataLoader`.

        mixed = Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        loader = everstep.DataLoader(mixed, batch_size=64)  # no shuffle=: the mixture shuffles

    Samples are those of the datasets as they are: to be collated into one batch they must be alike.

    After any number of samples each dataset has given its exact share, rounded up or down (mixture_plan.py). Each
    dataset has a stream of its own: all its samples once in a keyed order, then all of them once in another. Where an
    epoch of the mixture ends, the next one goes on in each of these streams, so that nothing is favoured for standing
    at the begin of its dataset. The state is the loader's, as small as ever; `locate` says whose sample an id is.

    Args:
        datasets: map-style datasets by name; their order counts.
        weights: by name, or in the order of the datasets; None: by their sizes.
        epoch: how many samples make an epoch; "first": as many as there are before a dataset has to begin anew; "all":
            until each is through at least once.
        shuffle: True, False, "blocks" or a `BlockShuffle`, for each of the datasets.
        seed: decides the orders of the datasets.

    Raises:
        UsageError: no or empty datasets, names that differ between datasets and weights, a weight that is not above 0.
    """

    order_kind: ClassVar[OrderKind] = OrderKind.CONTINUED
    """Tells a loader to number the samples of all epochs through."""

    def __init__(
        self,
        datasets: "Mapping[str, MapDataset]",
        weights: Mapping[str, float] | Sequence[float] | None = None,
        *,
        epoch: int | str = "first",
        shuffle: "bool | str | BlockShuffle" = True,
        seed: int = 0,
    ) -> None:
        if not isinstance(datasets, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  users have no checker
            raise UsageError(
                f"the datasets of a mixture have names, got a {type(datasets).__name__}",
                hint='Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})',
            )
        self.datasets = dict(datasets)
        self._names = tuple(self.datasets)
        self._sizes = tuple(len(each) for each in self.datasets.values())
        for name, size in zip(self._names, self._sizes, strict=True):
            if size == 0:
                raise UsageError(f"dataset {name!r} of the mixture is empty", hint="leave it out")
        self._schedule = Schedule(whole_weights(_listed(self._names, self._sizes, weights)))
        self._specs = [
            parse_order(each, size, shuffle, derive_keys(f"mixture-{name}", parse_seed(seed, None), 0, 1)[0])
            for (name, each), size in zip(self.datasets.items(), self._sizes, strict=True)
        ]
        self._length = _epoch_length(epoch, self._schedule, self._sizes)
        self._seed = seed
        self._orders: dict[tuple[int, int], Callable[[int], int]] = {}

    @property
    def proportions(self) -> dict[str, Fraction]:
        """The exact share of each dataset."""
        shares = (Fraction(weight, self._schedule.period) for weight in self._schedule.weights)
        return dict(zip(self._names, shares, strict=True))

    def locate(self, sample_id: int) -> Located:
        """Return whose sample an id is: the ids of the mixture go on over its epochs."""
        if sample_id < 0:
            raise IndexError(f"samples of a mixture are numbered from 0, got {sample_id}")
        draw = self._schedule.at(sample_id)
        epoch, position = divmod(draw.count, self._sizes[draw.dataset_index])
        index = self._order(draw.dataset_index, epoch)(position)
        return Located(name=self._names[draw.dataset_index], epoch=epoch, index=index)

    def counts_before(self, sample_id: int) -> dict[str, int]:
        """Return how many samples each dataset has given before this one; a state stands at epoch * len + cursor."""
        return dict(zip(self._names, self._schedule.counts_before(sample_id), strict=True))

    def fingerprint(self) -> str:
        """Return what tells this mixture from others: its datasets, their orders and shares, and what an epoch is."""
        parts = [
            f"{name!r} {fingerprint_of(each)!r} {size} {weight} {spec!r}"
            for (name, each), size, weight, spec in zip(
                self.datasets.items(), self._sizes, self._schedule.weights, self._specs, strict=True
            )
        ]
        text = "\n".join(["everstep-mixture-1", str(self._length), *parts])
        return "mixture-" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self._length

    def __getitem__(self, sample_id: int) -> object:
        """Return the sample with this number, of whatever epoch."""
        located = self.locate(whole_number(sample_id))
        return self.datasets[located.name][located.index]

    @property
    def will_read(self) -> "Callable[[Sequence[int]], object] | None":
        """Tells each dataset that wants to hear what is read next of it (a cache over nodes); None where none wants."""
        return self._announce if any(map(announcer, self.datasets.values())) else None

    def _announce(self, sample_ids: Sequence[int]) -> None:
        wanted: dict[str, list[int]] = {}
        for sample_id in sample_ids:
            located = self.locate(whole_number(sample_id))
            wanted.setdefault(located.name, []).append(located.index)
        for name, indices in wanted.items():
            told = announcer(self.datasets[name])
            if told is not None:
                told(indices)

    def __getstate__(self) -> dict[str, object]:
        """Return what goes to a worker: the orders are computed there."""
        return {**self.__dict__, "_orders": {}}

    def _order(self, dataset_index: int, epoch: int) -> "Callable[[int], int]":
        """Return position -> index for one epoch of one dataset; those in use are kept."""
        found = self._orders.get((dataset_index, epoch))
        if found is None:
            if len(self._orders) >= 3 * len(self._names):
                self._orders.clear()
            found = _index_at(self._specs[dataset_index], epoch, self._sizes[dataset_index])
            self._orders[dataset_index, epoch] = found
        return found


def _index_at(spec: OrderSpec, epoch: int, n: int) -> "Callable[[int], int]":
    if spec.kind is OrderKind.PERMUTED and n > TABLE_COUNT_MAX:
        return permutation(spec.seed, epoch, n)  # for one number at a time faster than arrays
    arrays = order(spec, epoch, n)
    return lambda position: int(arrays.at(np.array([position]))[0])


def _listed(
    names: Sequence[str], sizes: Sequence[int], weights: Mapping[str, float] | Sequence[float] | None
) -> Sequence[float]:
    if weights is None:
        return sizes
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise UsageError(
                f"weights are for {sorted(weights)}, the datasets are {sorted(names)}",
                hint="give each dataset one weight",
            )
        return [weights[name] for name in names]
    if len(weights) != len(names):
        raise UsageError(f"{len(weights)} weights for {len(names)} datasets", hint="give each one weight")
    return weights


def _epoch_length(epoch: int | str, schedule: Schedule, sizes: Sequence[int]) -> int:
    if epoch == "first":
        return min(schedule.position_of(Draw(index, size)) for index, size in enumerate(sizes))
    if epoch == "all":
        return max(schedule.position_of(Draw(index, size - 1)) + 1 for index, size in enumerate(sizes))
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 1:
        raise UsageError(f"epoch is a number of samples, 'first' or 'all', got {epoch!r}")
    return epoch
