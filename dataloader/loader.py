"""The resumable loader: a drop-in for torch.utils.data.DataLoader.

What differs from torch's, and why:

* The order is a pure function of (seed, epoch): `shuffle=True` needs no generator, and resuming costs nothing.
* The ranks share one stream: no DistributedSampler, no padding with duplicates, any number of ranks after a resume.
* iter() goes on where the loop stands, (epoch, cursor), as state_dict() says it. After `break` the next loop gets the
  rest of the epoch (said once, by a warning), or the next epoch if nothing is left; `reset()` starts the epoch over,
  `set_epoch()` another one. So every sample that was handed out is handed out once, and `next(iter(loader))` to look
  at a batch takes it from the epoch: follow it by `reset()`. A new iter() makes older iterators of the loader unusable.
* A batch counts as handed out when the loop receives it; prefetched ones do not.
* Nothing is drawn from global generators, and random augmentation depends on (seed, epoch, sample) only
  (sample_seed.py; `augment_seed=False` switches that off).

Three tiers, by who decides the order. All of the above holds of map-style data in our order. With a `sampler` or
`batch_sampler` of one's own (user_sampler.py) and with an IterableDataset (stream.py) the state is what these say of
themselves, ranks are fixed, and there is nothing to compare the ledger with. The workers are those of our own pool in
all three (workers/): torch's are never started.
"""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from ..core.errors import UsageError
from .arguments import (
    BlockShuffle,
    check_arguments,
    count_of,
    fingerprint_of,
    order_of,
    parse_rank,
    parse_seed,
    parse_uneven,
    rank_and_size,
    shuffled_datapipe,
    tier_of,
)
from .batch_maker import BatchMaker, MapDataset
from .batch_supply import BatchSupply, Work, WorkerArguments
from .empty_rest import EmptyRest, PassedOver, StreamRest
from .epoch_iterator import Callback, EpochIterator
from .ledger import Ledger
from .moves import Moves
from .order_format import OrderKind
from .position import Position
from .sample_seed import AugmentSeed, parse_augment_seed, worker_seed
from .sampler import EpochPlan, OrderSampler, tickets
from .split_plan import Split, Uneven
from .state_format import LoaderState, check_fit, parse_state
from .stream import Stream, StreamIterator
from .user_sampler import DrawnSplit, UserSampler
from .workers.batches import Batches
from .workers.pool import QuarantinedSample

if TYPE_CHECKING:
    from .shared.shared_loader import SharedLoader

T_co = TypeVar("T_co", covariant=True)

PREFETCH_DEFAULT = 2
"""Batches for each worker that are made in advance, as in torch."""

_iterated: "weakref.WeakSet[DataLoader[Any] | SharedLoader[Any]]" = weakref.WeakSet()


class DataLoader(TorchDataLoader[T_co]):
    """Batches of a map-style dataset, resumable at any batch, at any number of ranks and workers.

    A `sampler` or `batch_sampler` of one's own, or an IterableDataset, is resumed by what it says of itself, at the
    same number of ranks. Batches are what torch's loader makes of the same samples
    (`default_collate` or `collate_fn`): tensors with `batch_size` as first dimension, fewer in a last batch.

        loader = everstep.DataLoader(dataset, batch_size=64, shuffle=True, seed=0, num_workers=8)
        state = loader.state_dict()  # a few hundred bytes of plain JSON types, the same on every rank
        loader.load_state_dict(state)  # in a new loader, before its first iter(): goes on at that batch

    The arguments are torch's, in torch's order, and then:

    Args:
        shuffle: True: a keyed permutation of all samples. A `BlockShuffle`, or "blocks": blocks of samples, then the
            samples of some neighbouring blocks, for data that is read fast only in blocks.
        seed: decides the order and all augmentation, the same on every rank; if None, the initial seed of
            `generator`, else 0. (`generator` is used for nothing else.)
        uneven: "weight", "step", "drop" or "error": what to do when the end of an epoch cannot be shared evenly
            between ranks (split_plan.py). With the first two multiply the loss by `loader.weight`, so that DDP's mean
            is exact.
        rank, world_size: both or neither; by default asked of torch.distributed at each iter().
        augment_seed: seed the global generators (random, numpy, torch) before each sample, by (seed, epoch, sample);
            a dataset with `__getitems__` is asked for one sample at a time then. "batch": for whole batches, under
            one seed, so that what is random in them depends on batch size, ranks and resumes. False: seed nothing.

    Raises:
        UsageError: `in_order=False`, arguments that exclude each other, or a bad value.
    """

    def __init__(  # noqa: PLR0913, PLR0917  torch's own signature, so that it is a drop-in
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | str | BlockShuffle | None = None,
        sampler: object = None,
        batch_sampler: object = None,
        num_workers: int = 0,
        collate_fn: Callable[..., object] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        uneven: str = "weight",
        rank: int | None = None,
        world_size: int | None = None,
        augment_seed: AugmentSeed = True,
    ) -> None:
        kind = tier_of(dataset, sampler, batch_sampler)
        check_arguments(dataset, kind, in_order)
        self._uneven, self._fixed_rank = parse_uneven(uneven), parse_rank(rank, world_size)
        self.augment_seed: AugmentSeed = parse_augment_seed(augment_seed)

        # Who decides the order, and where the loop stands in it.
        dataset = cast("Dataset[T_co]", shuffled_datapipe(dataset, shuffle))
        self._sample_count = count_of(dataset, kind)
        order = order_of(dataset, kind, self._sample_count, shuffle, parse_seed(seed, generator))
        self._position = Position(order)
        self._stream = Stream(dataset, num_workers) if kind is OrderKind.STREAM else None
        self._user_sampler = (
            UserSampler(sampler, batch_sampler, batch_size, drop_last) if kind is OrderKind.SAMPLER else None
        )
        if kind is None:
            sampler = OrderSampler(self._position, self._sample_count)

        # What one iterator leaves to the next.
        self._fingerprint: str | None = None
        self._first_batch_callbacks: list[Callback] = []
        self._supply = BatchSupply()
        self._has_warned = False
        super().__init__(  # pyright: ignore[reportUnknownMemberType]  torch leaves type arguments out
            dataset,
            batch_size=batch_size,
            shuffle=None if kind is None else cast(Any, shuffle),
            sampler=cast(Any, sampler),
            batch_sampler=cast(Any, batch_sampler),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    # -- where the loop stands -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that the running or the next loop belongs to."""
        return self._position.epoch

    @property
    def seed(self) -> int:
        """The seed of order and augmentation; that of the state after load_state_dict."""
        return self._position.order.seed

    @property
    def uneven(self) -> str:
        """What happens to an end of an epoch that cannot be shared evenly."""
        return self._uneven.value

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the batch last handed out: 1.0 except at an uneven end, 0.0 for padding."""
        return self._position.weight

    @property
    def span(self) -> tuple[int, int]:
        """The positions [start, stop) of the epoch that the last step took, over all ranks: what `skip` is given."""
        return self._position.span

    @property
    def holes(self) -> list[tuple[int, int]]:
        """The positions [start, stop) of the present epoch that are skipped, as the loaded state says."""
        return list(self._position.holes.spans)

    @property
    def rank(self) -> int:
        """This rank, as given or as torch.distributed says now."""
        return self._rank_and_size()[0]

    @property
    def world_size(self) -> int:
        """The number of ranks, as given or as torch.distributed says now."""
        return self._rank_and_size()[1]

    @property
    def ledger(self) -> Ledger:
        """What this rank handed out, by epoch. Set it to the checkpoint's ledger after load_state_dict."""
        return self._position.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._position.ledger = ledger

    @property
    def quarantined(self) -> tuple[QuarantinedSample, ...]:
        """The samples that are left out of their batches, because two workers died while they read them."""
        return tuple(self._supply.quarantined)

    @property
    def in_loop(self) -> tuple[int, int] | None:
        """Which iterator has handed out batches and goes on, and how far it is in its epoch; None between loops."""
        return self._position.in_loop

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of another epoch. Naming the present epoch changes nothing, also in its middle."""
        self._position.set_epoch(epoch)

    def reset(self) -> None:
        """Start the present epoch over; what was handed out of it stays in the ledger, since it may have trained."""
        self._position.reset()

    def add_first_batch_callback(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` whenever the first batch after an iter() is asked for; return its remover.

        Where the trainer makes its batches itself, it does so behind that: the place to put RNG states back.
        """
        self._first_batch_callbacks.append(callback)
        return lambda: self._first_batch_callbacks.remove(callback)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the state after the last batch handed out: plain JSON types, fresh, equal on every rank."""
        position = self._position
        return LoaderState(
            fingerprint=self._dataset_fingerprint(),
            sample_count=self._sample_count,
            order=position.order,
            epoch=position.epoch,
            cursor=position.cursor,
            holes=position.holes,
            source=self._source(),
        ).to_dict()

    def _source(self) -> dict[str, object] | None:
        """Return what a user's own sampler or stream says of itself."""
        position = self._position
        if self._user_sampler is not None:
            return self._user_sampler.said(position.epoch, position.cursor, self.world_size)
        if self._stream is not None:
            if not self._stream.is_in(position.epoch):
                self._stream.restart(position.epoch)
            return self._stream.source(*self._rank_and_size())
        return None

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next iter() go on from a state; `{}` changes nothing. The state's seed replaces the loader's.

        Raises:
            LoaderStateError: not a state, another dataset, another kind of order or other blocks, a sampler's or a
                stream's state at another number of ranks, or iteration has begun.
        """
        if state_dict == {}:
            return
        self.check_state(state_dict)
        state = parse_state(state_dict)
        self._position.check_unmoved()
        self._load_source(state)
        self._position.load(state)
        self._position.steps = self._split() if state.order.kind.is_numbered else None

    def _load_source(self, state: LoaderState) -> None:
        if self._user_sampler is not None and state.source is not None:
            self._user_sampler.load(state.epoch, state.cursor, state.source)
        if self._stream is not None and state.source is not None:
            if state.cursor:
                self._stream.load(state.epoch, state.source)
            else:
                self._stream.restart(state.epoch)

    def check_state(self, state_dict: object) -> None:
        """Return if a state is of this dataset and order; LoaderStateError names the difference. Changes nothing."""
        here = LoaderState(
            fingerprint=self._dataset_fingerprint(),
            sample_count=self._sample_count,
            order=self._position.order,
        )
        state = parse_state(state_dict)
        check_fit(state, here)
        if self._user_sampler is not None and state.source is not None:
            self._user_sampler.check(state.source, self.world_size)
        if self._stream is not None and state.source is not None and state.cursor:
            self._stream.check(state.source, *self._rank_and_size())

    @property
    def is_resumable(self) -> bool:
        """Whether the middle of the present epoch can be found again, as far as its stream has shown."""
        return self._stream is None or self._stream.is_resumable

    @property
    def is_at_begin(self) -> bool:
        """Whether nothing of the present epoch was handed out."""
        return self._position.cursor == 0

    def pass_end(self) -> None:
        """Have the next iter() go on with the next epoch where nothing is left of this one.

        It does so by itself after a loop, not after load_state_dict(): there the rest of the epoch, though it is empty,
        may be what the script goes on with.
        """
        self._position.pass_end()

    def pass_over(self) -> None:
        """Have the next iter() end at once, and the one behind it be of the present epoch, of which nothing is gone.

        A script that goes on in a loop behind the one over this loader comes by it first.
        """
        self._position.is_passed_over = True

    @property
    def place(self) -> tuple[int, int]:
        """The present epoch, and how many of its samples were handed out over all ranks, holes included."""
        return self._position.epoch, self._position.cursor

    @property
    def moves(self) -> Moves:
        """When it moved last."""
        return self._position.moves

    def check_unmoved(self) -> None:
        """Return if load_state_dict may still be called; LoaderStateError once iteration has begun."""
        self._position.check_unmoved()

    # -- iteration -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank; less those of its holes.

        TypeError where a sampler or stream of one's own has no length.
        """
        if self._user_sampler is not None:
            return self._user_sampler.batch_count()
        if self._stream is not None:
            return super().__len__()
        return self._split().step_count()

    def __iter__(self) -> EpochIterator | EmptyRest | PassedOver | StreamIterator | StreamRest:  # pyright: ignore[reportIncompatibleMethodOverride]  torch names a private class
        """Return an iterator over the rest of the present epoch; workers start here, as in torch."""
        note_iterated(self)
        position = self._position
        if position.is_passed_over:
            position.is_passed_over = False
            return PassedOver(position.moves)
        passes_end = position.is_resumed_by_iter
        if passes_end:
            position.finish_if_over()
        if self._stream is not None:
            return self._iterate_stream(self._stream)
        split = self._begin_split()
        if passes_end and split.part(position.cursor) is None:  # a restored sampler of the user's
            position.steps = split
            position.finish_if_over()
            split = self._begin_split()
        self._warn_of_the_rest(position.cursor)
        token = position.begin()
        position.steps = split
        plan = EpochPlan(order=position.order, epoch=position.epoch, cursor=position.cursor, split=split)
        made: Batches | None = None
        try:
            if split.part(plan.cursor) is not None:
                maker = self._maker()
                is_drawn_here = self._user_sampler is not None
                work = Work(tickets=tickets(plan), maker=lambda _worker: maker, is_drawn_here=is_drawn_here)
                made = self._batches(work)
        except BaseException:
            position.release(token)
            raise
        rest = EpochIterator(position, token, cast(Split, split), made, self._first_batch_callbacks)
        if split.part(plan.cursor) is not None:
            return rest
        position.pass_end()
        return EmptyRest(self, rest)

    def _begin_split(self) -> Split | DrawnSplit:
        position = self._position
        if self._user_sampler is not None:
            return self._user_sampler.begin(
                position.epoch, position.cursor, seed=position.order.seed, rank=self.rank
            )
        split = self._split()
        self._check_before_iterating(split)
        return split

    def _iterate_stream(self, stream: Stream) -> StreamIterator | StreamRest:
        position = self._position
        may_be_over = position.cursor > 0 and position.is_resumed_by_iter
        self._source()
        if position.cursor and not stream.is_resumable:
            position.reset()
            stream.restart(position.epoch)
            self._warn_once(
                f"{type(self.dataset).__name__} does not say where it stands: iter() begins its epoch anew"
            )
        elif position.cursor == 0:
            stream.restart(position.epoch)
        token = position.begin()
        try:
            work = stream.work(
                cast(Callable[..., object], self.collate_fn),
                seed=self.seed,
                ranks=self._rank_and_size(),
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                augment_seed=self.augment_seed is not False,
            )
            made = self._batches(work, worker_count=stream.worker_count)
        except BaseException:
            position.release(token)
            raise
        rest = StreamIterator(position, token, stream, made, self._first_batch_callbacks)
        if may_be_over and position.cursor:
            return StreamRest(self, rest, partial(self._warn_of_the_rest, position.cursor))
        position.pass_end()
        return rest

    def _check_before_iterating(self, split: Split) -> None:
        count = len(cast(MapDataset, self.dataset))
        if count != self._sample_count:
            raise UsageError(
                f"the dataset had {self._sample_count} samples when the loader was made and has {count} now",
                hint="make a new loader for a dataset of another length",
            )
        rest = split.uneven_rest(self._position.cursor)
        if self._uneven is Uneven.ERROR and rest:
            raise UsageError(
                f"epoch {self.epoch} ends with {rest} samples for {split.world_size} ranks, and uneven='error'",
                hint="choose uneven='weight', 'step' or 'drop', or a dataset and batch size that divide",
            )

    def _warn_of_the_rest(self, cursor: int) -> None:
        if cursor and self._position.is_resumed_by_iter:
            self._warn_once(
                f"iter() goes on with epoch {self.epoch} at sample {cursor}, where the loop before "
                "it was left; call reset() to start the epoch over"
            )

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=4)

    def _batches(self, work: Work, *, worker_count: int | None = None) -> Batches:
        """Return what makes the batches; a stream may have to go on with as many workers as its epoch began with."""
        count = self.num_workers if worker_count is None else worker_count
        arguments = WorkerArguments(
            worker_count=count,
            context=cast("BaseContext | None", self.multiprocessing_context),  # pyright: ignore[reportUnknownMemberType]
            prefetch=self.prefetch_factor if self.num_workers else PREFETCH_DEFAULT,
            timeout_s=self.timeout,
            init=self.worker_init_fn,
            seed=worker_seed(self.seed, self.epoch, self.rank),
            is_fixed=self.augment_seed is False,
            is_persistent=self.persistent_workers and count == self.num_workers,
            pins=self.pin_memory,
            pin_device=self.pin_memory_device,
        )
        return self._supply.batches(work, arguments)

    def _maker(self) -> BatchMaker:
        return BatchMaker(
            cast(MapDataset, self.dataset),
            cast(Callable[..., object], self.collate_fn),
            is_batched=cast(object, self.batch_sampler) is not None,  # pyright: ignore[reportUnknownMemberType]
            augment_seed=self.augment_seed,
        )

    def _split(self) -> Split:
        rank, world_size = self._rank_and_size()
        return Split(
            sample_count=self._sample_count,
            batch_size=1 if self.batch_size is None else self.batch_size,
            rank=rank,
            world_size=world_size,
            uneven=self._uneven,
            drop_last=self.drop_last,
            holes=self._position.holes,
        )

    def _rank_and_size(self) -> tuple[int, int]:
        return self._fixed_rank or rank_and_size()

    def _dataset_fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self.dataset)
        return self._fingerprint


def iterated_loaders() -> "list[DataLoader[Any] | SharedLoader[Any]]":
    """Return the loaders of this process that live and were ever iterated."""
    return list(_iterated)


def note_iterated(loader: "DataLoader[Any] | SharedLoader[Any]") -> None:
    """Have a loader among them."""
    _iterated.add(loader)
