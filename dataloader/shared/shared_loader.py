"""A loader whose batches are prepared once for several jobs of one node: a hyper-parameter search over one dataset.

It hands out what a `DataLoader` with the same arguments and one rank hands out, in the same order, whether others take
part or not. Without a daemon, or away from the others, it prepares for itself.
"""

import logging
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, Generic, TypeVar, cast

from torch.utils import data as torch_data

from ...core.analysed import is_analysed
from ...core.errors import LoaderStateError, UsageError
from ...proto.share_frames import ShareKey
from ..batch_maker import MadeBatch, MapDataset
from ..empty_rest import PassedOver
from ..ledger import Ledger
from ..loader import fingerprint_of, note_iterated
from ..moves import Moves
from ..order_format import OrderKind, OrderSpec
from ..sample_seed import AugmentSeed, parse_augment_seed
from ..state_format import LoaderState, check_fit
from ..workers.batches import pinner_for
from ..workers.pool import QuarantinedSample
from .assembly import WorkerTerms, make_feed
from .batch_bytes import EncodingMaker
from .feed import Feed
from .joining import FIRST_BATCH, Joining
from .share_arguments import (
    GroupTerms,
    check_data,
    check_order,
    check_ranks,
    check_workers,
    parse_budget,
    parse_context,
)
from .walk_iterator import Callback, WalkIterator
from .walk_plan import BatchCut, BatchIds, Walk
from .walk_state_format import WalkState, parse_walk_state, rotation_of

logger = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)


class SharedLoader(Generic[T_co]):
    """Batches of a map-style dataset, each prepared once for all jobs of a group; resumable at any batch.

    The jobs are processes of one user on one node, started at any time; each gets every batch of every epoch once, in
    the same order. Batches are trees of tensors, numbers, strings and bytes (dict, list, tuple, named tuple), the same
    that a `DataLoader` with these arguments gives: first dimension `batch_size`, fewer at the end of an epoch.

        loader = SharedLoader(dataset, batch_size=256, shuffle=True, num_workers=4, group="hp-search")
        for epoch in range(10):
            for batch in loader:
                ...

    Args:
        dataset, batch_size, shuffle, num_workers, collate_fn, pin_memory, drop_last, timeout, worker_init_fn,
            multiprocessing_context, prefetch_factor, seed, augment_seed: as for `everstep.DataLoader`; what decides
            the batches must be the same in all jobs of a group.
        group: name of the group; a user's own.
        join: what a job does that comes late in an epoch. "private": it prepares what it missed, and everything until
            it meets the others, for itself. "rotate": it begins where the others are and takes what it missed last.
        jobs: so many jobs are expected: nothing is prepared before they are there, but for `gather_s` seconds at most.
        gather_s: seconds; see `jobs`.
        budget: bytes, or a text like "1GiB": memory for prepared batches that not every job has taken.
        lease_s: seconds that this job may take for one batch, before another prepares it instead.

    Raises:
        UsageError: a bad argument. iter() raises it where this job's batches are others than the group's, and where
            torch.distributed says that the job has several ranks.
    """

    def __init__(  # noqa: PLR0913  what a DataLoader takes
        self,
        dataset: object,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        group: str,
        num_workers: int = 0,
        collate_fn: Callable[..., object] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        seed: int = 0,
        augment_seed: AugmentSeed = True,
        join: str = "private",
        jobs: int = 1,
        gather_s: float = 60.0,
        budget: int | str = 1 << 30,
        lease_s: float = 60.0,
    ) -> None:
        check_order(dataset, shuffle)
        self.prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
        check_data(dataset, batch_size, drop_last=drop_last, seed=seed)
        check_workers(num_workers, self.prefetch_factor, timeout)
        self._terms = GroupTerms(
            group=group,
            join=join,
            jobs=jobs,
            gather_s=gather_s,
            budget_bytes=parse_budget(budget),
            lease_s=lease_s,
        )
        self._context = parse_context(multiprocessing_context)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_workers, self.pin_memory, self.timeout = num_workers, pin_memory, timeout
        self.worker_init_fn = worker_init_fn
        self.augment_seed: AugmentSeed = parse_augment_seed(augment_seed)
        self.collate_fn: Callable[..., object] = collate_fn or _default_collate(
            is_batched=batch_size is not None
        )
        self._order = OrderSpec(kind=OrderKind.PERMUTED if shuffle else OrderKind.SEQUENTIAL, seed=seed)
        self._fingerprint = fingerprint_of(dataset)
        self._cut = BatchCut(
            sample_count=len(cast(MapDataset, dataset)), batch_size=batch_size or 1, drop_last=drop_last
        )
        self._walk = Walk(cut=self._cut, epoch=0)
        self._ledger = Ledger(seed)
        self._weight = 1.0
        self._quarantined: list[QuarantinedSample] = []
        self._callbacks: list[Callback] = []
        self._newest = 0
        self._is_live = self._has_handed = self._has_warned = self._has_checked_ranks = False
        self._passes_end = False
        """Where nothing is left of this epoch, the next iterator is of the next one."""
        self._is_passed_over = False
        """The next iterator is over at once: its loop ended in the attempt before."""
        self.moves = Moves()
        self._joining: Joining | None = None
        self._feed: Feed | None = None
        self._ending: weakref.finalize[..., Any] | None = None

    # -- where the loop stands

    @property
    def epoch(self) -> int:
        """The epoch that the running or the next loop belongs to."""
        return self._walk.epoch

    @property
    def seed(self) -> int:
        """The seed of order and augmentation; that of the state after load_state_dict."""
        return self._order.seed

    @property
    def ledger(self) -> Ledger:
        """What was handed out, by epoch. Set it to the checkpoint's ledger after load_state_dict."""
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the batch last handed out: below 1.0 where quarantined samples are not in it."""
        return self._weight

    @property
    def quarantined(self) -> tuple[QuarantinedSample, ...]:
        """The samples that are left out of their batches, because workers of any job died while they read them."""
        return tuple(self._quarantined)

    @property
    def in_loop(self) -> tuple[int, int] | None:
        """Which iterator has handed out batches and goes on, and how far it is in its epoch; None between loops."""
        return (self._newest, self._walk.taken) if self._is_live and self._has_handed else None

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._terms.group

    @property
    def prepared_count(self) -> int:
        """Batches that this job has prepared, for itself or for all; the group's first one, to compare, included."""
        return 0 if self._feed is None else self._feed.prepared_count

    @property
    def received_count(self) -> int:
        """Batches that came to this job prepared."""
        return 0 if self._feed is None else self._feed.received_count

    @property
    def is_shared(self) -> bool:
        """Tell whether this job takes part in its group now; it does from its first iter() on."""
        return self._feed is not None and self._feed.is_shared

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of another epoch. Naming the present epoch changes nothing, also in its middle."""
        if isinstance(epoch, bool) or epoch < 0:
            raise UsageError(f"an epoch is a whole number from 0, got {epoch!r}")
        if epoch != self.epoch:
            self._finish_if_over()
        if epoch == self.epoch:
            return
        if self._is_live:
            raise UsageError(
                f"set_epoch({epoch}) while epoch {self.epoch} is being iterated",
                hint="end the loop first, or call reset()",
            )
        self._go_to(Walk(cut=self._cut, epoch=epoch))

    def reset(self) -> None:
        """Start the present epoch over; what was handed out of it stays in the ledger, since it may have trained."""
        self._newest += 1
        self._go_to(Walk(cut=self._cut, epoch=self._walk.epoch))

    @property
    def is_at_begin(self) -> bool:
        """Whether nothing of the present epoch was handed out."""
        return self._walk.taken == 0

    def pass_end(self) -> None:
        """Have the next iter() go on with the next epoch where nothing is left of this one."""
        self._passes_end = True

    def pass_over(self) -> None:
        """Have the next iter() end at once, and the one behind it be of the present epoch, of which nothing is gone."""
        self._is_passed_over = True

    @property
    def place(self) -> tuple[int, int]:
        """The present epoch, and how many of its batches were handed out."""
        return self._walk.epoch, self._walk.taken

    def add_first_batch_callback(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` whenever the first batch after an iter() is asked for; return its remover."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    # -- state

    def state_dict(self) -> dict[str, object]:
        """Return the state after the last batch handed out: plain JSON types, fresh."""
        return WalkState(loader=self._loader_state(), walk=self._walk).to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next iter() go on from a state; `{}` changes nothing. The state's seed replaces the loader's.

        Raises:
            LoaderStateError: not a state, another dataset or cut, another kind of order, or iteration has begun.
        """
        if state_dict == {}:
            return
        self.check_unmoved()
        self.check_state(state_dict)
        state = parse_walk_state(state_dict, self._cut)
        if state.loader.order.seed != self._ledger.seed:
            self._ledger = Ledger(state.loader.order.seed)
        self._order, self._walk = state.loader.order, state.walk

    def check_state(self, state_dict: object) -> None:
        """Return if a state is of this dataset, order and cut; LoaderStateError names the difference."""
        state = parse_walk_state(state_dict, self._cut).loader
        check_fit(state, self._loader_state(state.rotation))

    def check_unmoved(self) -> None:
        """Return if load_state_dict may still be called; LoaderStateError once iteration has begun."""
        if self._is_live or self._has_handed or self._feed is not None:
            raise LoaderStateError(
                "iteration has begun", hint="load the state into a new loader, before its first iter()"
            )

    def _loader_state(self, rotation: tuple[int, int] | None = None) -> LoaderState:
        return LoaderState(
            fingerprint=self._fingerprint,
            sample_count=self._cut.sample_count,
            order=self._order,
            epoch=self._walk.epoch,
            cursor=self._walk.samples_taken,
            rotation=rotation_of(self._walk) or rotation,
        )

    # -- iteration

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._cut.batch_count

    def __iter__(self) -> WalkIterator | PassedOver:
        """Return an iterator over the rest of the present epoch; the first one joins the group.

        Raises:
            UsageError: this job's batches are others than the group's, and the message names the difference; or the
                job has several ranks.
        """
        self._check_ranks()
        note_iterated(self)
        if self._ledger.seed != self._order.seed:
            raise LoaderStateError(
                f"the ledger was kept under seed {self._ledger.seed}, the loader's order has seed {self._order.seed}",
                hint="load the state and the ledger of one checkpoint",
            )
        if self._is_passed_over:
            self._is_passed_over = False
            return PassedOver(self.moves)
        if self._has_handed or self._passes_end:
            self._finish_if_over()
        self._passes_end = not len(self._walk)
        self._warn_of_the_rest()
        feed = self._joined()
        self._newest += 1
        self._is_live = True
        if len(self._walk):
            if self._terms.join == "rotate" and self._walk.taken == 0:
                self._walk = self._rotated(feed.locate())
            feed.begin(self._walk)
        return WalkIterator(self, self._newest, self._callbacks)

    def close(self) -> None:
        """Leave the group and end all workers. The next iter() would join again."""
        if self._ending is not None:
            self._ending()
        self._feed = self._ending = None

    def take(self, token: int) -> MadeBatch | None:
        """Return the next batch for an iterator; None at the end of the epoch, and then the next epoch begins."""
        if token != self._newest:
            raise UsageError(
                "a newer iter() or reset() of this loader took over; this iterator cannot go on",
                hint="use one iterator of a loader at a time",
            )
        walk, feed = self._walk, self._feed
        if not len(walk):
            self._finish()
            return None
        if feed is None:
            raise UsageError(
                f"the loader was closed in epoch {walk.epoch}, at batch {walk.taken}",
                hint="call iter() on it again: it begins there",
            )
        try:
            return feed.next()
        finally:
            if (
                feed.is_broken
            ):  # workers that cannot go on, an interrupt: the next iter() begins with new ones
                self.close()

    def count(self, made: MadeBatch) -> None:
        """Count a batch as handed out, the next moment before it is."""
        walk, ids = self._walk, made.ids
        self._ledger.add(walk.epoch, ids, padding_count=int(made.is_stand_in), quarantined=made.left_out)
        self._weight = ids.size / (ids.size + len(made.left_out))
        self._walk = Walk(cut=self._cut, epoch=walk.epoch, start=walk.start, taken=walk.taken + 1)
        self._has_handed = True
        self.moves.hand()

    @property
    def batches_left(self) -> int:
        """The batches that are left of the present epoch."""
        return len(self._walk)

    def release(self, token: int) -> None:
        """Say that an iterator will not go on."""
        if token == self._newest:
            self._is_live = False

    def _warn_of_the_rest(self) -> None:
        if self._has_handed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"iter() goes on with epoch {self.epoch} at batch {self._walk.taken}, where the loop before it was "
                "left; call reset() to start the epoch over",
                stacklevel=3,
            )

    def _check_ranks(self) -> None:
        if not self._has_checked_ranks:
            check_ranks()
            self._has_checked_ranks = True

    def _rotated(self, place: int) -> Walk:
        """Return the walk through this epoch from where the others are, if that is further on in this epoch."""
        epoch, start = divmod(place, self._cut.batch_count)
        if place < 0 or epoch != self.epoch or start == 0:
            return self._walk
        logger.info("share_rotated group=%s epoch=%d start=%d", self.group, epoch, start)
        return Walk(cut=self._cut, epoch=epoch, start=start)

    def _finish_if_over(self) -> None:
        """Go to the next epoch if nothing is left of this one, though no iterator has said so."""
        if self._walk.taken and not len(self._walk):
            self._newest += 1
            self._finish()

    def _finish(self) -> None:
        walk = self._walk
        if left_out := self._cut.sample_count - walk.samples_taken:
            self._ledger.finish(walk.epoch, left_out)
        self._go_to(Walk(cut=self._cut, epoch=walk.epoch + 1))
        self.moves.end()

    def _go_to(self, walk: Walk) -> None:
        self._walk = walk
        self._is_live = self._has_handed = self._passes_end = self._is_passed_over = False

    # -- the group

    def _joined(self) -> Feed:
        """Return the feed, in the group if there is a daemon to be had."""
        feed = self._feed
        if feed is None:
            feed = self._feed = self._make_feed()
            self._ending = weakref.finalize(self, feed.close)
            try:
                if self._cut.batch_count:
                    self._join(feed)
            except BaseException:
                self.close()
                raise
        elif not feed.is_shared and self._joining is not None:  # perhaps there is a daemon again
            self._joining.join(feed, self._walk.batch(0))
        return feed

    def _join(self, feed: Feed) -> None:
        """Prepare the group's first batch, which every job shows, and take part."""
        first = feed.first(FIRST_BATCH)
        position = self._walk.batch(0)
        if position == FIRST_BATCH and self._walk.taken == 0:
            feed.put(FIRST_BATCH, first)  # it need not be prepared again for the loop
            position += 1
        if is_analysed():  # its batches are of no use to others, and it may hang in the middle of one
            return
        self._joining = Joining(self._terms, self._key(), first, helps_while_waiting=self.num_workers == 0)
        self._joining.join(feed, position)

    def _key(self) -> ShareKey:
        return ShareKey(
            dataset=self._fingerprint or "-",
            samples=self._cut.sample_count,
            order=self._order.kind.value,
            seed=self._order.seed,
            batch_size=self.batch_size or 0,
            drop_last=self.drop_last,
            augment_seed=self.augment_seed is not False,
        )

    def _make_feed(self) -> Feed:
        maker = EncodingMaker(
            cast(MapDataset, self.dataset),
            self.collate_fn,
            is_batched=self.batch_size is not None,
            augment_seed=self.augment_seed,
        )
        worker_terms = WorkerTerms(
            count=self.num_workers,
            prefetch=self.prefetch_factor,
            context=self._context,
            init=self.worker_init_fn,
            timeout_s=self.timeout,
        )
        ids = BatchIds(self._order, self._cut)
        pinner = pinner_for(self.pin_memory, "")
        return make_feed(maker, ids, worker_terms, quarantined=self._quarantined, pinner=pinner)


def _default_collate(*, is_batched: bool) -> Callable[..., object]:
    name = "default_collate" if is_batched else "default_convert"
    return cast(Callable[..., object], getattr(torch_data, name))  # torch leaves type arguments out
