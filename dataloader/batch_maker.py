"""What travels to a worker process: a ticket says which samples make a batch, a maker turns it into one.

torch's own loader runs underneath. Its batch sampler yields tickets instead of lists of ids, its dataset is a
`BatchMaker`, and its collate function does nothing: the maker reads the samples, seeds them, collates them with the
user's function and returns the batch together with the ids that it really read.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, Protocol, cast

import numpy as np
from torch.utils.data import Subset, get_worker_info

from ..core.errors import UsageError
from .order_plan import Ids
from .sample_seed import batch_seed, preserved, sample_seed, seed_generators


class MapDataset(Protocol):
    """A dataset with random access, as torch means it."""

    def __getitem__(self, index: int, /) -> object:
        """Return one sample."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...


class Ticket(NamedTuple):
    """One rank's part of one step, as it goes to whoever prepares it; never without an id."""

    seed: int
    epoch: int
    cursor: int
    ids: list[int]


class MadeBatch(NamedTuple):
    """A prepared batch: `ids` as read, `data` as the user's collate_fn returned it.

    A named tuple, because torch's pinning thread reaches the tensors inside one; an array of ids costs it nothing.
    """

    cursor: int
    ids: Ids
    data: object


class BatchMaker:
    """The dataset that torch's loader sees: `maker.__getitems__(ticket)` makes a whole batch."""

    def __init__(
        self, dataset: MapDataset, collate: Callable[..., object], *, is_batched: bool, augment_seed: bool
    ) -> None:
        """Where `is_batched` is false (batch_size=None), `collate` gets the one sample, else a list."""
        self.dataset = dataset
        self._collate = collate
        self._is_batched = is_batched
        self._augment_seed = augment_seed
        self._read_all = _batched_getter(dataset, augment_seed)

    def __getitems__(self, ticket: Ticket) -> MadeBatch:
        """Return the batch of one ticket. In the training process the global generators are left as they were."""
        is_guest = self._augment_seed and get_worker_info() is None
        with preserved() if is_guest else nullcontext():
            samples = self._read_each(ticket) if self._read_all is None else self._read_together(ticket)
            if self._augment_seed:
                seed_generators(batch_seed(ticket.seed, ticket.epoch, ticket.ids[0]))
            data = self._collate(samples if self._is_batched else samples[0])
        return MadeBatch(ticket.cursor, np.array(ticket.ids[: len(samples)], dtype=np.int64), data)

    def _read_each(self, ticket: Ticket) -> list[object]:
        samples: list[object] = []
        for sample_id in ticket.ids:
            if self._augment_seed:
                seed_generators(sample_seed(ticket.seed, ticket.epoch, sample_id))
            samples.append(self.dataset[sample_id])
        return samples

    def _read_together(self, ticket: Ticket) -> list[object]:
        assert self._read_all is not None
        if self._augment_seed:
            seed_generators(sample_seed(ticket.seed, ticket.epoch, ticket.ids[0]))
        samples = list(self._read_all(ticket.ids))
        if len(samples) != len(ticket.ids):
            raise UsageError(
                f"{type(self.dataset).__name__}.__getitems__ was asked for {len(ticket.ids)} samples and returned "
                f"{len(samples)}",
                hint="return one sample per id, in the same order",
            )
        return samples


class WorkerInit:
    """torch's worker_init_fn: makes get_worker_info().dataset the user's own, then calls the user's function."""

    def __init__(self, user_function: Callable[[int], None] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker_id: int) -> None:
        """Run once in each worker process, before any batch."""
        info = get_worker_info()
        assert info is not None
        maker = cast(object, info.dataset)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(maker, BatchMaker):
            # The info is read-only for users; torch itself keeps its own reference to the maker.
            object.__setattr__(info, "dataset", maker.dataset)
        if self._user_function is not None:
            self._user_function(worker_id)


def unchanged(made: MadeBatch) -> MadeBatch:
    """Return the batch as it is: torch's collate function, with nothing left to collate."""
    return made


def _batched_getter(dataset: MapDataset, augment_seed: bool) -> Callable[[list[int]], list[object]] | None:
    """Return the dataset's own `__getitems__` where calling it is worth more than a seed for each sample.

    torch calls it whenever there is one. Subset always has one, though mostly with a plain dataset under it: there
    each sample keeps its own seed. A truly batched dataset is seeded once per batch, by its first id.
    """
    getter = cast("Callable[[list[int]], list[object]] | None", getattr(dataset, "__getitems__", None))
    if augment_seed and isinstance(dataset, Subset):
        inner = cast(MapDataset, cast("Subset[object]", dataset).dataset)
        return getter if _batched_getter(inner, augment_seed) is not None else None
    return getter
