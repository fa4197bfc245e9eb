"""What reads a stream, in a worker or in the trainer: turns the tickets of one share into batches.

It stays at one place of one stream: a ticket goes on behind the one before, unless it says where to open the stream.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterDataPipe, get_worker_info, graph_settings

from ..core.errors import LoaderStateError
from .batch_maker import AnyTicket, MadeBatch, note_nothing
from .sample_seed import pipe_seed, preserved, seed_generators, stream_seed
from .stream_plan import Shard, Standing, StreamTicket
from .user_sampler import Stateful
from .workers.phase import Phase

_END = object()
_NO_IDS = np.empty(0, dtype=np.int64)


class StreamMaker:
    """Makes the batches of the user's stream: `maker.make(ticket)`."""

    is_sent_as_collated = True

    def __init__(
        self,
        dataset: object,
        collate: Callable[..., object],
        *,
        batch_size: int | None,
        drop_last: bool,
        augment_seed: bool,
        opening: StreamTicket,
        pristine: "Pristine",
    ) -> None:
        """Begin at `opening` where the first ticket does not say: in the place of a worker that died."""
        self.dataset = dataset
        self.collate = collate
        self._note = note_nothing
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._augment_seed = augment_seed
        self._opening = opening
        self._shard: Shard = {}
        self._stream: Iterator[object] | None = None
        self._owner: Stateful | None = None
        self._pristine = pristine

    def report_to(self, note: Callable[[int], None]) -> None:
        """Call `note` with the number in its share of each sample before it is read, or with a `Phase`."""
        self._note = note

    def make(self, ticket: AnyTicket, *, is_solo: bool = False) -> MadeBatch:
        """Return the next batch of a share, or one without samples at its end.

        In the training process the global generators are left as they were.
        """
        assert isinstance(ticket, StreamTicket), ticket
        assert not is_solo, "samples of a stream are read one by one"
        is_guest = self._augment_seed and get_worker_info() is None
        with preserved() if is_guest else nullcontext():
            self._open_as_told(ticket)
            samples = self._read(ticket)
            size = self._batch_size
            if not samples or (self._drop_last and size is not None and len(samples) < size):
                self._shard = {**self._shard, "is_over": True}
                return _made(ticket, 0, None, self._shard)
            self._note(Phase.COLLATE)
            data = self.collate(samples[0] if size is None else samples)
        self._shard = {
            "own": None if self._owner is None else deepcopy(self._owner.state_dict()),
            "seen": cast(int, self._shard["seen"]) + len(samples),
            "is_over": self._stream is None,  # then the dataset may already say where its next epoch begins
        }
        return _made(ticket, len(samples), data, self._shard)

    def _open_as_told(self, ticket: StreamTicket) -> None:
        if ticket.begin is None and self._shard:
            return
        opening = ticket if ticket.begin is not None else self._opening
        assert opening.begin is not None, opening
        assert opening.share == ticket.share, (opening, ticket)
        self._shard = deepcopy(opening.begin)
        self._note(cast(int, self._shard["seen"]))
        self._stream = self._owner = None
        if not self._shard["is_over"]:
            self._open(cast("dict[str, object] | None", self._shard["own"]), ticket)

    def _open(self, own: dict[str, object] | None, ticket: StreamTicket) -> None:
        """Open the stream where `own` says; the dataset says where it stands, or else its iterator."""
        dataset = self.dataset
        self._pristine.before_opening(is_begun_anew=own is None)
        for name, values in (("set_epoch", (ticket.epoch,)), ("set_ranks", (ticket.rank, ticket.world_size))):
            setter = getattr(dataset, name, None)
            if callable(setter):
                setter(*values)
        _take_share(dataset, ticket)
        if own is not None and isinstance(dataset, Stateful):
            dataset.load_state_dict(own)
        stream = iter(cast("list[object]", dataset))
        owner = dataset if isinstance(dataset, Stateful) else stream if isinstance(stream, Stateful) else None
        if own is not None and not isinstance(dataset, Stateful):
            if owner is None:
                raise LoaderStateError(
                    f"the state holds a position of the stream, but {type(dataset).__name__} has no load_state_dict",
                    hint="give the dataset that the state was made with",
                )
            owner.load_state_dict(own)
        self._stream, self._owner = stream, owner

    def _read(self, ticket: StreamTicket) -> list[object]:
        """Return the samples of a batch, fewer at the end of the stream."""
        samples: list[object] = []
        seen = cast(int, self._shard["seen"])
        while self._stream is not None and len(samples) < (self._batch_size or 1):
            self._note(seen + len(samples))
            if self._augment_seed:
                share = ticket.rank * ticket.share_count + ticket.share
                seed_generators(stream_seed(ticket.seed, ticket.epoch, share, seen + len(samples)))
            sample = next(self._stream, _END)
            if sample is _END:
                self._stream = None
                self._pristine.has_ended()
            else:
                samples.append(sample)
        return samples


class Pristine:
    """A dataset as it was before it was read: to begin anew with one that was left in the middle."""

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self._was_opened = self._is_in_the_middle = False
        self._own: dict[str, object] | None = None
        self._is_known = False

    def before_opening(self, *, is_begun_anew: bool) -> None:
        """Put the dataset back to its begin, if it is to begin anew and was left in the middle."""
        dataset = self._dataset
        if not self._was_opened and isinstance(dataset, Stateful):
            try:
                self._own, self._is_known = deepcopy(dataset.state_dict()), True
            except Exception:  # noqa: BLE001  some have a state only while they are iterated: iter() begins anew
                self._is_known = False
        elif is_begun_anew and self._is_in_the_middle and self._is_known:
            cast(Stateful, dataset).load_state_dict(deepcopy(cast("dict[str, object]", self._own)))
        self._was_opened = self._is_in_the_middle = True

    def has_ended(self) -> None:
        """Note that the dataset was read to its end."""
        self._is_in_the_middle = False


def _take_share(dataset: object, ticket: StreamTicket) -> None:
    """Have the `sharding_filter` of a datapipe take this share, of one shuffled order for all shares; as torch does."""
    if not isinstance(dataset, IterDataPipe):
        return
    graph = cast(Any, graph_settings)  # torch leaves type arguments out
    graph.apply_random_seed(dataset, torch.Generator().manual_seed(pipe_seed(ticket.seed, ticket.epoch)))
    share_count = ticket.world_size * ticket.share_count
    graph.apply_sharding(dataset, share_count, ticket.share * ticket.world_size + ticket.rank)


def _made(ticket: StreamTicket, sample_count: int, data: object, shard: Shard) -> MadeBatch:
    return MadeBatch(0, _NO_IDS, data, standing=Standing(ticket.share, sample_count, dict(shard)))
