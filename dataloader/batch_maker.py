"""What travels to a worker process: a ticket says which samples make a batch, a maker turns it into one.

The maker reads the samples, seeds them, collates them with the user's function and returns the batch together with
the ids that it really read.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from torch.utils.data import Subset, get_worker_info

from ..core.errors import UsageError
from .announcing import announcer
from .order_plan import Ids
from .sample_seed import AugmentSeed, batch_seed, preserved, sample_seed, seed_generators
from .stream_plan import Standing, StreamTicket
from .workers.phase import Phase


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

    @property
    def worker(self) -> int | None:
        """Who alone can make it: anybody can."""
        return None


AnyTicket = Ticket | StreamTicket


class MadeBatch(NamedTuple):
    """A prepared batch: `ids` as read, `data` as the user's collate_fn returned it.

    `left_out` are ids of the ticket that are quarantined and not in it. Where that is all of them, `ids` and `data`
    are of another sample, a stand-in. A stream's batch has no ids and says where the stream stands behind it.
    """

    cursor: int
    ids: Ids
    data: object
    left_out: tuple[int, ...] = ()
    is_stand_in: bool = False
    standing: Standing | None = None


NAMED_MAX = 8
"""Samples that the note to an error of collation names."""


class Maker(Protocol):
    """What makes batches of tickets, in a worker or in the trainer."""

    dataset: Any
    collate: Callable[..., object]
    is_sent_as_collated: bool
    """Whether what `collate` returns leaves the worker as it is, or is copied into what does."""

    def report_to(self, note: Callable[[int], None]) -> None:
        """Call `note` with the place of each sample before it is read, or with a `Phase`."""
        ...

    def make(self, ticket: AnyTicket, *, is_solo: bool = False) -> MadeBatch:
        """Return the batch of one ticket."""
        ...


def note_nothing(_place: int) -> None:
    """Where nobody asks."""


class BatchMaker:
    """Turns tickets into batches: `maker.make(ticket)`, in a worker or in the trainer."""

    is_sent_as_collated = True

    def __init__(
        self,
        dataset: MapDataset,
        collate: Callable[..., object],
        *,
        is_batched: bool,
        augment_seed: AugmentSeed,
    ) -> None:
        """Where `is_batched` is false (batch_size=None), `collate` gets the one sample, else a list."""
        self.dataset = dataset
        self.collate = collate
        self._note = note_nothing
        self._is_batched = is_batched
        self._augment_seed = augment_seed is not False
        self._is_seeded_each = augment_seed is True
        self._read_all = _batched_getter(dataset, is_seeded_each=self._is_seeded_each)
        self._announce = announcer(dataset)

    def report_to(self, note: Callable[[int], None]) -> None:
        """Call `note` with the place in its ticket of each sample before it is read, or with a `Phase`."""
        self._note = note

    def make(self, ticket: AnyTicket, *, is_solo: bool = False) -> MadeBatch:
        """Return the batch of one ticket. In the training process the global generators are left as they were.

        With `is_solo` a dataset that reads many samples in one call is asked for one at a time, which it is anyway
        where each sample has a seed of its own.
        """
        assert isinstance(ticket, Ticket), ticket
        is_guest = self._augment_seed and get_worker_info() is None
        with preserved() if is_guest else nullcontext():
            if self._read_all is None:
                samples = self._read_each(ticket)
            else:
                is_each = is_solo or self._is_seeded_each
                samples = self._read_together(
                    ticket, [[each] for each in ticket.ids] if is_each else [ticket.ids]
                )
            self._note(Phase.COLLATE)
            if self._augment_seed:
                seed_generators(batch_seed(ticket.seed, ticket.epoch, ticket.ids[0]))
            try:
                data = self.collate(samples if self._is_batched else samples[0])
            except Exception as exc:
                exc.add_note(
                    f"while the batch of {_listed(ticket.ids)} of {type(self.dataset).__name__} was collated"
                )
                raise
        return MadeBatch(ticket.cursor, np.array(ticket.ids[: len(samples)], dtype=np.int64), data)

    def _read_each(self, ticket: Ticket) -> list[object]:
        samples: list[object] = []
        if self._announce is not None:
            self._announce(ticket.ids)
        for place, sample_id in enumerate(ticket.ids):
            self._note(place)
            if self._augment_seed:
                seed_generators(sample_seed(ticket.seed, ticket.epoch, sample_id))
            try:
                samples.append(self.dataset[sample_id])
            except Exception as exc:
                exc.add_note(f"while sample {sample_id} of {type(self.dataset).__name__} was read")
                raise
        return samples

    def _read_together(self, ticket: Ticket, calls: list[list[int]]) -> list[object]:
        """Read the ids of each call at once; one call is one id, or the whole ticket."""
        assert self._read_all is not None
        samples: list[object] = []
        for place, ids in enumerate(calls):
            self._note(place if len(calls) == len(ticket.ids) else Phase.READ_ALL)
            if self._is_seeded_each or (self._augment_seed and place == 0):
                seed_generators(sample_seed(ticket.seed, ticket.epoch, ids[0]))
            read = list(self._read_all(ids))
            if len(read) != len(ids):
                raise UsageError(
                    f"{type(self.dataset).__name__}.__getitems__ was asked for {len(ids)} samples and returned "
                    f"{len(read)}",
                    hint="return one sample per id, in the same order",
                )
            samples += read
        return samples


def _listed(ids: list[int]) -> str:
    """Return `samples 3, 1, 4 …`: the first of them."""
    more = " …" if len(ids) > NAMED_MAX else ""
    return f"samples {', '.join(map(str, ids[:NAMED_MAX]))}{more}"


def _batched_getter(
    dataset: MapDataset, *, is_seeded_each: bool
) -> Callable[[list[int]], list[object]] | None:
    """Return the dataset's own `__getitems__`, if it is to be used.

    torch calls it whenever there is one. Subset always has one, though mostly with a plain dataset under it: nothing is
    gained by a call for each sample there. A dataset that wants to be told what is read next (`will_read`) needs none.
    """
    if announcer(dataset) is not None:
        return None
    getter = cast("Callable[[list[int]], list[object]] | None", getattr(dataset, "__getitems__", None))
    if is_seeded_each and isinstance(dataset, Subset):
        inner = cast(MapDataset, cast("Subset[object]", dataset).dataset)
        return getter if _batched_getter(inner, is_seeded_each=True) is not None else None
    return getter
