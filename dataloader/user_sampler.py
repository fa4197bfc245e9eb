"""A user's own `sampler` or `batch_sampler` (tier 2): it decides the order, we know where it stands.

What is prefetched has been drawn from the sampler before the loop gets it, so the sampler itself is always ahead. Each
batch therefore keeps what the sampler said of itself when it was drawn, and the state after a batch is that one.

* A sampler, or its iterator, with `state_dict` and `load_state_dict` is asked after each batch and put back with that.
* Any other is begun again with the generator it had (`sampler.generator`, if any) and what was handed out is drawn and
  thrown away: indices only, no data. Where those are others than before the state is refused. The global generators
  that it may draw from are private ones, a function of (seed, epoch): the trainer's are left alone and need not be
  saved.

Its `set_epoch` is called at each epoch. It splits the data between ranks itself (`DistributedSampler`), hence the
number of ranks is fixed, `cursor` counts the samples of one rank, and nothing proves that they are the whole dataset.
"""

import base64
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import islice
from operator import index as whole_number
from typing import Protocol, cast, runtime_checkable

import torch
import xxhash
from torch.utils.data import BatchSampler

from ..core.errors import LoaderStateError, UsageError
from .batch_maker import Ticket
from .sample_seed import PrivateGenerators, sampler_seed
from .split_plan import Part

Source = dict[str, object]


@runtime_checkable
class Stateful(Protocol):
    """What knows where it stands."""

    def state_dict(self) -> dict[str, object]:
        """Return where it stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        """Go on from there."""
        ...


class UserSampler:
    """Draws batches of ids from the user's object, epoch by epoch, and says where each batch stands."""

    def __init__(
        self, sampler: object, batch_sampler: object, batch_size: int | None, drop_last: bool
    ) -> None:
        """Take one of both; `batch_size` None beside a sampler means samples without batches."""
        self._size: int | None = 1 if batch_size is None else batch_size
        self._drop_last = drop_last
        self._target = sampler
        if type(batch_sampler) is BatchSampler:  # its sampler is what has a state
            self._target, self._size = batch_sampler.sampler, batch_sampler.batch_size
            self._drop_last = batch_sampler.drop_last
        elif batch_sampler is not None:
            self._target, self._size = batch_sampler, None
        self._running: DrawnSplit | None = None
        self._loaded: tuple[int, int, Source] | None = None

    def batch_count(self) -> int:
        """Return the number of batches of an epoch; TypeError where the sampler has no length, as in torch."""
        count = len(cast("list[object]", self._target))
        if self._size is None:
            return count
        return count // self._size if self._drop_last else -(-count // self._size)

    def batches_left(self, cursor: int, batches: int) -> int:
        """Return the number of batches behind so many samples, in so many batches; TypeError as `batch_count`."""
        if self._size is None:
            return max(0, self.batch_count() - batches)
        left = max(0, len(cast("list[object]", self._target)) - cursor)
        return left // self._size if self._drop_last else -(-left // self._size)

    def source(self, epoch: int, cursor: int) -> Source:
        """Return what a state says of the sampler after `cursor` samples of an epoch."""
        if self._running is not None and self._running.epoch == epoch:
            return deepcopy(self._running.source(cursor))
        if self._loaded is not None and self._loaded[:2] == (epoch, cursor):
            return deepcopy(self._loaded[2])
        own = self._target.state_dict() if isinstance(self._target, Stateful) else None
        generator = self._generator_state()
        return deepcopy({"batches": 0, "own": own, "generator": generator, "is_over": False})

    def said(self, epoch: int, cursor: int, world_size: int) -> dict[str, object]:
        """Return `source` for a state, which is of so many ranks."""
        return {**self.source(epoch, cursor), "world_size": world_size}

    def load(self, epoch: int, cursor: int, source: Mapping[str, object]) -> None:
        """Take over what a state `said`, once it was checked."""
        self._running = None
        self._loaded = (epoch, cursor, deepcopy(dict(source)))

    @staticmethod
    def check(source: Mapping[str, object], world_size: int) -> None:
        """Return if a state `said` it of as many ranks; LoaderStateError otherwise."""
        if source.get("world_size") != world_size:
            raise LoaderStateError(
                f"the state is of {source.get('world_size')!r} ranks, here are {world_size}: a sampler of one's own "
                "splits the data itself",
                hint="resume with as many ranks, or leave the sampler out to get everstep's order",
            )
        if not {"batches", "own", "generator", "is_over"} <= set(source) or not isinstance(
            source["batches"], int
        ):
            raise LoaderStateError(
                f"source of the state has the keys {sorted(source)[:10]}, expected batches, own, generator and is_over",
                hint="give the dict that state_dict() of this loader returned, unchanged",
            )

    def begin(self, epoch: int, cursor: int, *, seed: int, rank: int) -> "DrawnSplit":
        """Return the batches from here to the end of the epoch."""
        begin = self.source(epoch, cursor)
        is_running = self._running is not None and self._running.epoch == epoch
        generator = self._generator()
        if generator is not None and isinstance(begin["generator"], str):
            generator.set_state(_generator_bytes(begin["generator"]))
        set_epoch = getattr(self._target, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        private = PrivateGenerators(sampler_seed(seed, epoch))
        own = begin["own"] if is_running or self._loaded is not None else None
        split = self._drawn(private, own, (epoch, rank))
        split.begin_at(cursor, begin)
        if own is not None and cursor == 0 and split.part(0) is None:
            split = self._drawn(private, None, (epoch, rank))  # the state was that of an end: begin again
            split.begin_at(cursor, begin)
        self._running, self._loaded = split, None
        return split

    def _drawn(self, private: PrivateGenerators, own: object, epoch_rank: tuple[int, int]) -> "DrawnSplit":
        is_target_stateful = isinstance(self._target, Stateful)
        with private.in_use():
            if own is not None and is_target_stateful:
                cast(Stateful, self._target).load_state_dict(cast("dict[str, object]", deepcopy(own)))
            drawn = iter(cast(Iterable[object], self._target))
            if own is not None and not is_target_stateful:
                _stateful(drawn).load_state_dict(cast("dict[str, object]", deepcopy(own)))
        owner = self._target if is_target_stateful else drawn
        return DrawnSplit(
            _Batches(drawn, self._size, self._drop_last),
            private,
            epoch_rank,
            owner=owner if isinstance(owner, Stateful) else None,
            batches_left=self.batches_left if hasattr(self._target, "__len__") else None,
        )

    def _generator(self) -> torch.Generator | None:
        for holder in (self._target, getattr(self._target, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                return generator
        return None

    def _generator_state(self) -> str | None:
        generator = self._generator()
        if generator is None:
            return None
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


class DrawnSplit:
    """The rest of an epoch as a user's sampler has it for one rank: what `split_plan.Split` is for our orders."""

    def __init__(
        self,
        batches: "_Batches",
        private: PrivateGenerators,
        epoch_rank: tuple[int, int],
        *,
        owner: Stateful | None,
        batches_left: Callable[[int, int], int] | None,
    ) -> None:
        self.epoch, self.rank = epoch_rank
        self._batches = batches
        self._private = private
        self._owner = owner
        self._batches_left = batches_left
        self._drawn = xxhash.xxh3_64()
        self._sources: dict[int, Source] = {}
        self._parts: dict[int, tuple[Part, list[int]]] = {}
        self._begin: tuple[int, Source] = (0, {})
        self._end = 0
        self._is_over = False

    @property
    def sample_count(self) -> int:
        """How many samples were drawn up to now: at its end, those of the epoch."""
        return self._end

    def begin_at(self, cursor: int, source: Source) -> None:
        """Stand after `cursor` samples: without a state of the sampler's own, by drawing them again, without data."""
        if source["own"] is None:
            with self._private.in_use():
                skipped = self._batches.skip(cursor, cast(int, source["batches"]))
            if len(skipped) != cursor:
                raise LoaderStateError(
                    f"the sampler draws {len(skipped)} samples now, {cursor} of this epoch were handed out before",
                    hint="give the sampler that the state was made with, or one with state_dict and load_state_dict",
                )
            self._drawn.update(_bytes(skipped))
            if cursor and source.get("drawn", self._drawn.hexdigest()) != self._drawn.hexdigest():
                raise LoaderStateError(
                    f"the sampler draws other samples now than the {cursor} of this epoch that were handed out before",
                    hint="keep its torch.Generator as its attribute `generator`, which is saved, or give it state_dict "
                    "and load_state_dict; reset() begins the epoch anew",
                )
        self._end = cursor
        self._is_over = source["own"] is not None and source["is_over"] is True
        self._begin = cursor, source
        self._sources = {cursor: source}

    def source(self, cursor: int) -> Source:
        """Return what a state says of the sampler after `cursor` samples."""
        if cursor in self._sources:
            return self._sources[cursor]
        begin, source = self._begin
        if cursor == begin:
            return source
        if cursor == 0 and source["own"] is None:
            return {**source, "batches": 0, "drawn": ""}
        raise LoaderStateError(
            f"where the sampler stood at sample {cursor} of epoch {self.epoch} is not known any more",
            hint="load a state to go back",
        )

    def part(self, cursor: int) -> Part | None:
        """Return the batch at `cursor`, drawn now if it was not before; None at the end of the epoch."""
        for old in [each for each in self._parts if each < cursor]:
            del self._parts[old]
            self._sources.pop(old, None)
        if cursor not in self._parts and cursor == self._end and not self._is_over:
            self._draw_part()
        found = self._parts.get(cursor)
        return None if found is None else found[0]

    def step_count(self, cursor: int = 0) -> int:
        """Return how many batches are left, as far as the sampler's length says."""
        if self._batches_left is None:
            raise TypeError("the sampler has no length")
        return self._batches_left(cursor, cast(int, self.source(cursor)["batches"]))

    def tickets(self, seed: int, cursor: int) -> Iterator[Ticket]:
        """Yield a ticket per batch."""
        while cursor in self._parts or (cursor == self._end and not self._is_over):
            if cursor not in self._parts and not self._draw_part():
                return
            part, ids = self._parts[cursor]
            yield Ticket(seed, self.epoch, cursor, ids)
            cursor = part.next_cursor

    def _draw_part(self) -> bool:
        ids = self._draw()
        if ids is None:
            self._is_over = True
            return False
        self._drawn.update(_bytes(ids))
        before, cursor = self._sources[self._end], self._end
        self._end += len(ids)
        own = None if self._owner is None else deepcopy(self._owner.state_dict())
        batches = cast(int, before["batches"]) + 1
        self._sources[self._end] = {
            "batches": batches,
            "own": own,
            "generator": before["generator"],
            "is_over": self._batches.is_over,
            "drawn": self._drawn.hexdigest() if own is None else "",
        }
        part = Part(
            cursor=cursor,
            next_cursor=self._end,
            start=cursor,
            stop=self._end,
            weight=1.0,
            is_padding=False,
        )
        self._parts[cursor] = part, ids
        return True

    def _draw(self) -> list[int] | None:
        with self._private.in_use():
            try:
                return next(self._batches)
            except StopIteration:
                return None


class _Batches:
    """The ids of each batch; what is drawn are batches already where `size` is None."""

    def __init__(self, drawn: Iterator[object], size: int | None, drop_last: bool) -> None:
        self._drawn, self._size, self._drop_last = drawn, size, drop_last
        self.is_over = False
        """The sampler said so: then its state may already be that of its next epoch."""

    def skip(self, cursor: int, batches: int) -> list[int]:
        """Draw what so many samples, in so many batches, were before; fewer where there are no more."""
        if self._size is not None:  # perhaps in batches of another size
            return [_id(each) for each in islice(self._drawn, cursor)]
        return [
            each for batch in islice(self._drawn, batches) for each in map(_id, cast(Iterable[object], batch))
        ]

    def __next__(self) -> list[int]:
        if self._size is None:
            ids = [_id(each) for each in cast(Iterable[object], next(self._drawn))]
            if not ids:
                raise UsageError("the batch_sampler yielded a batch without an index", hint="leave it out")
            return ids
        ids = [_id(each) for each in islice(self._drawn, self._size)]
        self.is_over = len(ids) < self._size
        if not ids or (self._drop_last and self.is_over):
            raise StopIteration
        return ids


def _id(value: object) -> int:
    try:
        return whole_number(cast(int, value))
    except TypeError as exc:
        raise UsageError(
            f"the sampler yielded {type(value).__name__}; everstep counts samples by number",
            hint="yield whole numbers, and keep the table from numbers to keys in the dataset",
        ) from exc


def _bytes(ids: list[int]) -> bytes:
    return array("q", ids).tobytes()


def _stateful(drawn: object) -> Stateful:
    if not isinstance(drawn, Stateful):
        raise LoaderStateError(
            f"the state holds a position of the sampler, but {type(drawn).__name__} has no load_state_dict",
            hint="give the sampler that the state was made with",
        )
    return drawn


def _generator_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
