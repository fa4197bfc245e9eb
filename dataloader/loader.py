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
themselves, ranks are fixed, and there is nothing to compare the ledger with.
"""

import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from ..core.errors import LoaderStateError, UsageError
from .arguments import BlockShuffle, fingerprint_of, parse_order, parse_rank, parse_seed, parse_uneven
from .batch_maker import BatchMaker, MapDataset
from .empty_rest import EmptyRest
from .epoch_iterator import Callback, EpochIterator
from .ledger import Ledger
from .order_format import OrderKind, OrderSpec
from .position import Position
from .sample_seed import worker_seed
from .sampler import EpochPlan, OrderSampler, tickets
from .split_plan import Split, Uneven
from .state_format import LoaderState, check_fit, parse_state
from .stream import (
    StreamBatch,
    StreamIterator,
    StreamMaker,
    StreamPlan,
    StreamPosition,
    StreamWorkerInit,
    unchanged_stream,
)
from .user_sampler import DrawnSplit, UserSampler
from .workers.batches import Batches, PinnedBatches, PoolBatches, TrainerBatches, pinner_for
from .workers.cargo import WorkerJob
from .workers.pool import PoolSpec, QuarantinedSample, WorkerPool

T_co = TypeVar("T_co", covariant=True)

_iterated: "weakref.WeakSet[DataLoader[Any]]" = weakref.WeakSet()


class DataLoader(TorchDataLoader[T_co]):
    """Batches of a map-style dataset, resumable at any batch, at any number of ranks and workers.

    A `sampler` or `batch_sampler` of one's own, or an IterableDataset, is resumed by what it says of itself, at the
    same number of ranks (an IterableDataset: and of workers). The arguments are torch's, in torch's order, and then:

    Args:
        shuffle: True: a keyed permutation of all samples. A `BlockShuffle`, or "blocks": blocks of samples, then the
            samples of some neighbouring blocks, for data that is read fast only in blocks.
        seed: decides the order and all augmentation, the same on every rank; if None, the initial seed of
            `generator`, else 0. (`generator` is used for nothing else.)
        uneven: "weight", "drop" or "error": what to do when the end of an epoch cannot be shared evenly between
            ranks (split_plan.py). With "weight" multiply the loss by `loader.weight`, so that DDP's mean is exact.
        rank, world_size: both or neither; by default asked of torch.distributed at each iter().
        augment_seed: seed the global generators before each sample.

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
        augment_seed: bool = True,
    ) -> None:
        kind = _tier(dataset, sampler, batch_sampler)
        _check_arguments(dataset, kind, in_order)
        self._uneven = parse_uneven(uneven)
        self._fixed_rank = parse_rank(rank, world_size)
        self._sample_count = 0 if kind is OrderKind.STREAM else _length(dataset, kind)
        used_seed = parse_seed(seed, generator)
        self._position = Position(
            OrderSpec(kind=kind, seed=used_seed)
            if kind is not None
            else parse_order(dataset, self._sample_count, shuffle, used_seed)
        )
        self._has_batch_sampler = batch_sampler is not None
        self._user_sampler: UserSampler | None = None
        self._stream: StreamPosition | None = None
        if kind is OrderKind.SAMPLER:
            self._user_sampler = UserSampler(sampler, batch_sampler, batch_size, drop_last)
        elif kind is OrderKind.STREAM:
            self._stream = StreamPosition(dataset, num_workers)
        else:
            sampler = OrderSampler(self._position, self._sample_count)
        self._fingerprint: str | None = None
        self._first_batch_callbacks: list[Callback] = []
        self._pool: WorkerPool | None = None
        self._kept: Batches | None = None
        self._quarantined: list[QuarantinedSample] = []
        self._has_warned = False
        self.augment_seed = augment_seed
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
        return tuple(self._quarantined)

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
        """Call `callback` whenever the first batch after an iter() is about to be handed out; return its remover.

        It is the last thing that runs before the loop's body: the place to put RNG states back.
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
            source = self._user_sampler.source(position.epoch, position.cursor)
            return {**source, "world_size": self.world_size}
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
        state = parse_state(state_dict)
        check_fit(
            state,
            LoaderState(
                fingerprint=self._dataset_fingerprint(),
                sample_count=self._sample_count,
                order=self._position.order,
            ),
        )
        self._position.check_unmoved()
        self._load_source(state)
        self._position.load(state)
        self._position.steps = self._split() if state.order.kind.is_numbered else None

    def _load_source(self, state: LoaderState) -> None:
        if self._user_sampler is not None and state.source is not None:
            if state.source.get("world_size") != self.world_size:
                raise LoaderStateError(
                    f"the state is of {state.source.get('world_size')!r} ranks, here are {self.world_size}: a "
                    "sampler of one's own splits the data itself",
                    hint="resume with as many ranks, or leave the sampler out to get everstep's order",
                )
            self._user_sampler.load(state.epoch, state.cursor, state.source)
        if self._stream is not None and state.source is not None:
            if state.cursor:
                self._stream.load(state.epoch, state.source, *self._rank_and_size())
            else:
                self._stream.restart(state.epoch)

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

    def __iter__(self) -> EpochIterator | EmptyRest | StreamIterator:  # pyright: ignore[reportIncompatibleMethodOverride]  torch names a private class
        """Return an iterator over the rest of the present epoch; workers start here, as in torch."""
        _iterated.add(self)
        if self._position.is_resumed_by_iter:
            self._position.finish_if_over()
        if self._stream is not None:
            return self._iterate_stream(self._stream)
        position = self._position
        split = self._begin_split()
        token = position.begin()
        position.steps = split
        plan = EpochPlan(order=position.order, epoch=position.epoch, cursor=position.cursor, split=split)
        made: Batches | None = None
        try:
            if split.part(plan.cursor) is not None:
                made = self._batches(plan)
        except BaseException:
            position.release(token)
            raise
        rest = EpochIterator(position, token, cast(Split, split), made, self._first_batch_callbacks)
        return rest if split.part(plan.cursor) is not None else EmptyRest(self, rest)

    def _begin_split(self) -> Split | DrawnSplit:
        position = self._position
        self._warn_of_the_rest()
        if self._user_sampler is not None:
            return self._user_sampler.begin(
                position.epoch, position.cursor, seed=position.order.seed, rank=self.rank
            )
        split = self._split()
        self._check_before_iterating(split)
        return split

    def _iterate_stream(self, stream: StreamPosition) -> StreamIterator:
        position = self._position
        self._source()
        if position.cursor and not stream.is_resumable:
            position.reset()
            stream.restart(position.epoch)
            self._warn_once(
                f"{type(self.dataset).__name__} does not say where it stands: iter() begins its epoch anew"
            )
        elif position.cursor == 0:
            stream.restart(position.epoch)
        else:
            self._warn_of_the_rest()
        token = position.begin()
        try:
            made = iter(self._torch_stream(stream))
        except BaseException:
            position.release(token)
            raise
        return StreamIterator(position, token, stream, made, self._first_batch_callbacks)

    def _torch_stream(self, stream: StreamPosition) -> TorchDataLoader[StreamBatch]:
        """Return torch's loader that makes the batches of the user's stream from where it stands."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        plan = StreamPlan(
            seed=self.seed,
            epoch=self.epoch,
            rank=self.rank,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            augment_seed=self.augment_seed,
            first_worker=stream.next_worker,
            shards=tuple(stream.shards),
        )
        base_seed = torch.Generator().manual_seed(worker_seed(plan.seed, plan.epoch, plan.rank))
        make = cast(Callable[..., TorchDataLoader[StreamBatch]], TorchDataLoader)
        return make(  # workers begin anew at each epoch: they hold the place that they begin at
            StreamMaker(self.dataset, cast(Callable[..., object], self.collate_fn), plan),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=unchanged_stream,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=StreamWorkerInit(self.worker_init_fn),
            multiprocessing_context=cast(object, self.multiprocessing_context),  # pyright: ignore[reportUnknownMemberType]
            generator=base_seed,
            prefetch_factor=self.prefetch_factor,
            pin_memory_device=self.pin_memory_device,
        )

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
                hint="choose uneven='weight' or 'drop', or a dataset and batch size that divide",
            )

    def _warn_of_the_rest(self) -> None:
        if self._position.is_resumed_by_iter:
            self._warn_once(
                f"iter() goes on with epoch {self.epoch} at sample {self._position.cursor}, where the loop before "
                "it was left; call reset() to start the epoch over"
            )

    def _warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=5)

    def _batches(self, plan: EpochPlan) -> Batches:
        """Return what prepares the plan's batches: the trainer itself, or workers, kept where they are persistent."""
        pinner = pinner_for(self.pin_memory, self.pin_memory_device)
        if self.num_workers == 0:
            if self.timeout:
                raise UsageError(
                    f"timeout={self.timeout} needs num_workers > 0", hint="nobody could interrupt it"
                )
            return TrainerBatches(self._maker(), tickets(plan), pinner)
        if self._kept is not None:
            self._kept.close()  # of an iterator that somebody still holds
        pool = self._pool
        if pool is None or not pool.is_open:
            pool = WorkerPool(self._pool_spec(plan), self._quarantined)
        of_pool = PoolBatches(pool, tickets(plan), is_kept=self.persistent_workers)
        batches = of_pool if pinner is None else PinnedBatches(of_pool, pinner)
        if self.persistent_workers:
            self._pool, self._kept = pool, batches
        return batches

    def _maker(self) -> BatchMaker:
        return BatchMaker(
            cast(MapDataset, self.dataset),
            cast(Callable[..., object], self.collate_fn),
            is_batched=self.batch_size is not None or self._has_batch_sampler,
            augment_seed=self.augment_seed,
        )

    def _pool_spec(self, plan: EpochPlan) -> PoolSpec:
        if not self.prefetch_factor:
            raise UsageError(
                f"prefetch_factor={self.prefetch_factor}", hint="give 1 or more, or leave it out"
            )
        context = cast("BaseContext | None", self.multiprocessing_context)  # pyright: ignore[reportUnknownMemberType]
        generator = torch.Generator().manual_seed(worker_seed(plan.order.seed, plan.epoch, plan.split.rank))
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        maker, init, count = (
            self._maker(),
            self.worker_init_fn,
            self.num_workers,
        )  # and not self: that were a cycle
        return PoolSpec(
            context=context or multiprocessing.get_context(),
            worker_count=count,
            prefetch=self.prefetch_factor,
            timeout_s=self.timeout,
            is_fixed=not self.augment_seed,
            job=lambda worker: WorkerJob(maker, init, worker, count, base_seed),
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
        if self._fixed_rank is not None:
            return self._fixed_rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
            warnings.warn(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} but torch.distributed is not initialized: this rank gets "
                "all the data; initialize it before the first batch, or pass rank= and world_size=",
                stacklevel=3,
            )
        return 0, 1

    def _dataset_fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self.dataset)
        return self._fingerprint


def iterated_loaders() -> list[DataLoader[Any]]:
    """Return the loaders of this process that live and were ever iterated."""
    return list(_iterated)


def _tier(dataset: object, sampler: object, batch_sampler: object) -> OrderKind | None:
    """Return who else decides the order, or None where we do; torch's own checks refuse what excludes each other."""
    if isinstance(dataset, cast(type, IterableDataset)):
        return OrderKind.STREAM
    return None if sampler is None and batch_sampler is None else OrderKind.SAMPLER


def _check_arguments(dataset: object, kind: OrderKind | None, in_order: bool) -> None:
    if not in_order:
        raise UsageError("in_order=False cannot be resumed exactly", hint="leave it out")
    if kind is None and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"{type(dataset).__name__} has no __getitem__ or no __len__", hint="give a map-style dataset"
        )


def _length(dataset: object, kind: OrderKind | None) -> int:
    if kind is not None and not hasattr(dataset, "__len__"):
        return 0
    return len(cast(MapDataset, dataset))
