"""The resumable loader: a drop-in for torch.utils.data.DataLoader over map-style datasets.

What differs from torch's, and why:

* The order is a pure function of (seed, epoch): `shuffle=True` needs no generator, and resuming costs nothing.
* The ranks share one stream: no DistributedSampler, no padding with duplicates, any number of ranks after a resume.
* iter() goes on where the loop stands, (epoch, cursor), as state_dict() says it. After `break` the next loop gets the
  rest of the epoch (said once, by a warning); `reset()` starts the epoch over, `set_epoch()` another one. So every
  sample that was handed out is handed out once, and `next(iter(loader))` to look at a batch takes it from the epoch:
  follow it by `reset()`. A new iter() makes older iterators of the loader unusable.
* A batch counts as handed out when the loop receives it; prefetched ones do not.
* Nothing is drawn from global generators, and random augmentation depends on (seed, epoch, sample) only
  (sample_seed.py; `augment_seed=False` switches that off).
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
from .batch_maker import BatchMaker, MapDataset
from .epoch_iterator import Callback, EpochIterator
from .hash_format import SEED_MAX
from .ledger import Ledger
from .order_format import OrderKind, OrderSpec
from .position import Position
from .sample_seed import worker_seed
from .sampler import EpochPlan, OrderSampler, tickets
from .split_plan import Split, Uneven
from .state_format import LoaderState, parse_state, short_fingerprint
from .workers.batches import Batches, PinnedBatches, PoolBatches, TrainerBatches, pinner_for
from .workers.cargo import WorkerJob
from .workers.pool import PoolSpec, QuarantinedSample, WorkerPool

T_co = TypeVar("T_co", covariant=True)

_iterated: "weakref.WeakSet[DataLoader[Any]]" = weakref.WeakSet()


class DataLoader(TorchDataLoader[T_co]):
    """Batches of a map-style dataset, resumable at any batch, at any number of ranks and workers.

    The arguments are torch's, in torch's order, and then:

    Args:
        seed: decides the order and all augmentation, the same on every rank; if None, the initial seed of
            `generator`, else 0. (`generator` is used for nothing else.)
        uneven: "weight", "drop" or "error": what to do when the end of an epoch cannot be shared evenly between
            ranks (split_plan.py). With "weight" multiply the loss by `loader.weight`, so that DDP's mean is exact.
        rank, world_size: both or neither; by default asked of torch.distributed at each iter().
        augment_seed: seed the global generators before each sample.

    Raises:
        UsageError: an IterableDataset, a sampler or batch_sampler of one's own, `in_order=False`, or a bad value.
    """

    def __init__(  # noqa: PLR0913, PLR0917  torch's own signature, so that it is a drop-in
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
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
        _refuse_other_tiers(dataset, sampler, batch_sampler, in_order)
        self._uneven = _parse_uneven(uneven)
        self._fixed_rank = _parse_rank(rank, world_size)
        self._sample_count = len(cast(MapDataset, dataset))
        kind = OrderKind.PERMUTED if shuffle else OrderKind.SEQUENTIAL
        self._position = Position(OrderSpec(kind=kind, seed=_parse_seed(seed, generator)))
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
            sampler=OrderSampler(self._position, self._sample_count),
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
        ).to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next iter() go on from a state; `{}` changes nothing. The state's seed replaces the loader's.

        Raises:
            LoaderStateError: not a state, another dataset, another kind of order, or iteration has begun.
        """
        if state_dict == {}:
            return
        state = parse_state(state_dict)
        ours = (self._dataset_fingerprint(), self._sample_count)
        if (state.fingerprint, state.sample_count) != ours:
            raise LoaderStateError(
                f"the state belongs to dataset {state.fingerprint!r} with {state.sample_count} samples, "
                f"this loader has {ours[0]!r} with {ours[1]}",
                hint="give the dataset that the checkpoint was made with, or start without the loader's state",
            )
        if state.order.kind is not self._position.order.kind:
            raise LoaderStateError(
                f"the state has order {state.order.kind.value!r}, this loader {self._position.order.kind.value!r}",
                hint="construct the loader with the same shuffle= as before",
            )
        self._position.load(state)

    def check_unmoved(self) -> None:
        """Return if load_state_dict may still be called; LoaderStateError once iteration has begun."""
        self._position.check_unmoved()

    # -- iteration -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank."""
        return self._split().step_count()

    def __iter__(self) -> EpochIterator:  # pyright: ignore[reportIncompatibleMethodOverride]  torch names a private class
        """Return an iterator over the rest of the present epoch; workers start here, as in torch."""
        position, split = self._position, self._split()
        _iterated.add(self)
        self._check_before_iterating(split)
        token = position.begin()
        plan = EpochPlan(order=position.order, epoch=position.epoch, cursor=position.cursor, split=split)
        made: Batches | None = None
        try:
            if split.part(plan.cursor) is not None:
                made = self._batches(plan)
        except BaseException:
            position.release(token)
            raise
        return EpochIterator(position, token, split, made, self._first_batch_callbacks)

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
        if self._position.is_resumed_by_iter and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"iter() goes on with epoch {self.epoch} at sample {self._position.cursor}, where the loop before "
                "it was left; call reset() to start the epoch over",
                stacklevel=3,
            )

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
            is_batched=self.batch_size is not None,
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


def fingerprint_of(dataset: object) -> str:
    """Return what tells this dataset from others in a state: `dataset.fingerprint()` where there is one.

    Else the name of its class, which with the number of samples is all that is cheap and the same at each start:
    samples may be augmented at random or slow to read. Give a dataset a `fingerprint()` that follows its contents.
    """
    own = getattr(dataset, "fingerprint", None)
    value = cast(object, own() if callable(own) else own)
    if value is None:
        return short_fingerprint(type(dataset).__qualname__)
    if isinstance(value, bytes):
        value = value.hex()
    if not isinstance(value, str):
        raise UsageError(
            f"{type(dataset).__name__}.fingerprint() returned {type(value).__name__}",
            hint="return str or bytes",
        )
    return short_fingerprint(value)


def _refuse_other_tiers(dataset: object, sampler: object, batch_sampler: object, in_order: bool) -> None:
    hint = "use torch.utils.data.DataLoader for this one; its position is then not part of checkpoints"
    if isinstance(dataset, cast(type, IterableDataset)):
        raise UsageError(f"{type(dataset).__name__} is an IterableDataset: not in this version", hint=hint)
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None:
            raise UsageError(
                f"{name}={type(value).__name__}: samplers of one's own are not in this version",
                hint=f"leave it out to get everstep's order and its split between ranks; else {hint}",
            )
    if not in_order:
        raise UsageError("in_order=False cannot be resumed exactly", hint="leave it out")
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"{type(dataset).__name__} has no __getitem__ or no __len__", hint="give a map-style dataset"
        )


def _parse_uneven(uneven: str) -> Uneven:
    try:
        return Uneven(uneven)
    except ValueError as exc:
        raise UsageError(f"uneven is 'weight', 'drop' or 'error', got {uneven!r}") from exc


def _parse_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UsageError(
            f"rank={rank}, world_size={world_size}", hint="give both with 0 <= rank < world_size, or none"
        )
    return rank, world_size


def _parse_seed(seed: int | None, generator: torch.Generator | None) -> int:
    value = seed if seed is not None else 0 if generator is None else generator.initial_seed()
    if not 0 <= value <= SEED_MAX:
        raise UsageError(f"seed is a whole number from 0 to 2^64 - 1, got {value}")
    return value
