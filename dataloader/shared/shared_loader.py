"""A loader whose batches are prepared once for several jobs of one node: a hyper-parameter search over one dataset.

It hands out what a `DataLoader` with the same arguments and one rank hands out, in the same order, whether others take
part or not. Without a daemon, or away from the others, it prepares for itself.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, Generic, TypeVar, cast

import msgspec
import torch
from torch.utils import data as torch_data

from ...core.errors import DaemonUnavailableError, LoaderStateError, UsageError
from ...core.sizes import parse_size
from ...proto.share_frames import JoinShare, ShareJoined, ShareKey
from ..batch_maker import BatchMaker, MadeBatch, MapDataset, Ticket
from ..hash_format import SEED_MAX
from ..ledger import Ledger
from ..loader import fingerprint_of
from ..order_format import OrderKind, OrderSpec
from ..sample_seed import worker_seed
from ..state_format import LoaderState
from .batch_tree import EncodedBatch, leaf_digests
from .feed import Feed
from .link import connect_or_start
from .preparers import OwnProcess, Preparer, Workers
from .walk_plan import BatchCut, BatchIds, Walk
from .walk_state_format import WalkState, parse_walk_state, samples_taken
from .worker import WorkerSettings

logger = logging.getLogger(__name__)

T_co = TypeVar("T_co", covariant=True)

JOINS = ("private", "rotate")
FIRST_BATCH = 0


class SharedLoader(Generic[T_co]):
    """Batches of a map-style dataset, each prepared once for all jobs of a group; resumable at any batch.

    The jobs are processes of one user on one node, started at any time; each gets every batch of every epoch once, in
    the same order. Batches are trees of tensors, numbers, strings and bytes (dict, list, tuple, named tuple).

    Args:
        dataset, batch_size, shuffle, num_workers, collate_fn, pin_memory, drop_last, worker_init_fn,
            multiprocessing_context, prefetch_factor, seed, augment_seed: as for `everstep.DataLoader`; what decides
            the batches must be the same in all jobs of a group.
        group: name of the group; a user's own.
        join: what a job does that comes late in an epoch. "private": it prepares what it missed, and everything until
            it meets the others, for itself. "rotate": it begins where the others are and takes what it missed last.
        jobs: so many jobs are expected: nothing is prepared before they are there, but for `gather_s` seconds at most.
        gather_s: see `jobs`.
        budget: bytes, or a text like "1GiB": memory for prepared batches that not every job has taken.
        lease_s: how long this job may take for one batch, before another prepares it instead.

    Raises:
        UsageError: a bad argument.
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
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        prefetch_factor: int | None = None,
        seed: int = 0,
        augment_seed: bool = True,
        join: str = "private",
        jobs: int = 1,
        gather_s: float = 60.0,
        budget: int | str = 1 << 30,
        lease_s: float = 60.0,
    ) -> None:
        _check(dataset, batch_size, num_workers=num_workers, seed=seed, drop_last=drop_last)
        _check_group(group, join, jobs=jobs, gather_s=gather_s, lease_s=lease_s)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_workers, self.pin_memory, self.worker_init_fn = num_workers, pin_memory, worker_init_fn
        self.multiprocessing_context = multiprocessing_context
        self.prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
        self.collate_fn: Callable[..., object] = collate_fn or _default_collate(
            is_batched=batch_size is not None
        )
        self.augment_seed, self.group, self.join = augment_seed, group, join
        self._jobs, self._gather_s, self._lease_s = jobs, gather_s, lease_s
        self._budget_bytes = _budget(budget)
        self._order = OrderSpec(kind=OrderKind.PERMUTED if shuffle else OrderKind.SEQUENTIAL, seed=seed)
        self._fingerprint = fingerprint_of(dataset)
        self._cut = BatchCut(
            sample_count=len(cast(MapDataset, dataset)), batch_size=batch_size or 1, drop_last=drop_last
        )
        self._walk = Walk(cut=self._cut, epoch=0)
        self._ledger = Ledger(seed)
        self._newest = 0
        self._is_live = self._has_handed = self._has_warned = self._has_told = False
        self._frame: JoinShare | None = None
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
        if epoch == self._walk.epoch:
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

    # -- state

    def state_dict(self) -> dict[str, object]:
        """Return the state after the last batch handed out: plain JSON types, fresh."""
        walk = self._walk
        loader = LoaderState(
            fingerprint=self._fingerprint,
            sample_count=self._cut.sample_count,
            order=self._order,
            epoch=walk.epoch,
            cursor=samples_taken(self._cut, walk.start, walk.taken),
        )
        return WalkState(loader=loader, cut=self._cut, start=walk.start, taken=walk.taken).to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next iter() go on from a state; `{}` changes nothing. The state's seed replaces the loader's.

        Raises:
            LoaderStateError: not a state, another dataset or cut, another kind of order, or iteration has begun.
        """
        if state_dict == {}:
            return
        if self._is_live or self._has_handed or self._feed is not None:
            raise LoaderStateError(
                "iteration has begun", hint="load the state into a new loader, before its first iter()"
            )
        state = parse_walk_state(state_dict, self._cut)
        theirs = (state.loader.fingerprint, state.loader.sample_count, state.loader.order.kind.value)
        ours = (self._fingerprint, self._cut.sample_count, self._order.kind.value)
        for name, its, mine in zip(("dataset", "number of samples", "order"), theirs, ours, strict=True):
            if its != mine:
                raise LoaderStateError(
                    f"the {name} of the state is {its!r}, of this loader {mine!r}",
                    hint="construct the loader as it was when the checkpoint was made",
                )
        if state.loader.order.seed != self._ledger.seed:
            self._ledger = Ledger(state.loader.order.seed)
        self._order = state.loader.order
        self._walk = Walk(cut=self._cut, epoch=state.loader.epoch, start=state.start, taken=state.taken)

    # -- iteration

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._cut.batch_count

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the present epoch; the first one joins the group.

        Raises:
            UsageError: this job's batches are others than the group's; the message names the difference.
        """
        if self._ledger.seed != self._order.seed:
            raise LoaderStateError(
                f"the ledger was kept under seed {self._ledger.seed}, the loader's order has seed {self._order.seed}",
                hint="load the state and the ledger of one checkpoint",
            )
        if self._has_handed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"iter() goes on with epoch {self.epoch} at batch {self._walk.taken}, where the loop before it was "
                "left; call reset() to start the epoch over",
                stacklevel=2,
            )
        feed = self._joined()
        self._newest += 1
        self._is_live = True
        if len(self._walk):
            if self.join == "rotate" and self._walk.taken == 0:
                self._walk = self._rotated(feed.locate())
            feed.begin(self._walk)
        return _WalkIterator(self, self._newest)

    def close(self) -> None:
        """Leave the group and end all workers. The next iter() would join again."""
        if self._ending is not None:
            self._ending()
        self._feed = self._ending = None

    def hand(self, token: int) -> MadeBatch | None:
        """Return the next batch for an iterator and count it as handed out; None at the end of the epoch."""
        if token != self._newest:
            raise UsageError(
                "a newer iter() or reset() of this loader took over; this iterator cannot go on",
                hint="use one iterator of a loader at a time",
            )
        walk = self._walk
        if not len(walk):
            left_out = self._cut.sample_count - samples_taken(self._cut, walk.start, walk.taken)
            if left_out:
                self._ledger.finish(walk.epoch, left_out)
            self._go_to(Walk(cut=self._cut, epoch=walk.epoch + 1))
            return None
        assert self._feed is not None
        made = self._feed.next()
        self._ledger.add(walk.epoch, made.ids)
        self._walk = Walk(cut=self._cut, epoch=walk.epoch, start=walk.start, taken=walk.taken + 1)
        self._has_handed = True
        return made

    def release(self, token: int) -> None:
        """Say that an iterator will not go on."""
        if token == self._newest:
            self._is_live = False

    def _rotated(self, place: int) -> Walk:
        """Return the walk through this epoch from where the others are, if that is further on in this epoch."""
        epoch, start = divmod(place, self._cut.batch_count)
        if place < 0 or epoch != self.epoch or start == 0:
            return self._walk
        logger.info("share_rotated group=%s epoch=%d start=%d", self.group, epoch, start)
        return Walk(cut=self._cut, epoch=epoch, start=start)

    def _go_to(self, walk: Walk) -> None:
        self._walk = walk
        self._is_live = self._has_handed = False

    # -- the group

    def _joined(self) -> Feed:
        """Return the feed, in the group if there is a daemon to be had."""
        if self._feed is None:
            feed = self._feed = self._make_feed()
            self._ending = weakref.finalize(self, feed.close)
            try:
                if self._cut.batch_count:
                    self._join(feed)
            except BaseException:
                self.close()
                raise
        elif not self._feed.is_shared and self._frame is not None:  # perhaps there is a daemon again
            self._enter(self._feed, self._frame)
        return self._feed

    def _join(self, feed: Feed) -> None:
        """Prepare the group's first batch, which every job shows, and take part."""
        first = feed.first(FIRST_BATCH)
        if self._walk.taken == 0 and self.epoch == 0:
            feed.put(FIRST_BATCH, first)  # it need not be prepared again for the loop
        self._frame = JoinShare(
            request_id=0,
            group=self.group,
            key=self._key(),
            first_batch=leaf_digests(first.data),
            first_batch_size_bytes=EncodedBatch(first.ids, first.data).size_bytes,
            budget_bytes=self._budget_bytes,
            lease_s=self._lease_s,
            position=0,
            jobs=self._jobs,
            gather_s=self._gather_s,
            helps_while_waiting=self.num_workers == 0,
        )
        self._enter(feed, self._frame)

    def _enter(self, feed: Feed, frame: JoinShare) -> None:
        position = self._walk.batch(0)
        if position == FIRST_BATCH and self._walk.taken == 0:
            position = FIRST_BATCH + 1
        try:
            link = connect_or_start()
        except DaemonUnavailableError as error:
            if not self._has_told:
                logger.warning("share_alone group=%s: %s; this job prepares for itself", self.group, error)
            self._has_told = True
            return
        try:
            reply, _ = link.ask(
                lambda number: msgspec.structs.replace(frame, request_id=number, position=position)
            )
            assert isinstance(reply, ShareJoined), reply
        except BaseException:
            link.close()
            raise
        logger.info("share_joined group=%s jobs=%d", self.group, reply.jobs)
        feed.use(link)

    def _key(self) -> ShareKey:
        return ShareKey(
            dataset=self._fingerprint or "-",
            samples=self._cut.sample_count,
            order=self._order.kind.value,
            seed=self._order.seed,
            batch_size=self.batch_size or 0,
            drop_last=self.drop_last,
            augment_seed=self.augment_seed,
        )

    def _make_feed(self) -> Feed:
        maker = BatchMaker(
            cast(MapDataset, self.dataset),
            self.collate_fn,
            is_batched=self.batch_size is not None,
            augment_seed=self.augment_seed,
        )
        ids = BatchIds(self._order, self._cut)
        preparer: Preparer = OwnProcess(maker)
        if self.num_workers:
            settings = WorkerSettings(
                worker_count=self.num_workers,
                seed=worker_seed(self.seed, 0, 0) >> 1,
                init=self.worker_init_fn,
            )
            preparer = Workers(
                maker,
                settings,
                context=self.multiprocessing_context,
                prefetch_factor=self.prefetch_factor,
            )
        return Feed(
            preparer,
            _Tickets(self.seed, ids),
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            threaded=self.num_workers > 0,
        )


class _Tickets:
    """Makes the ticket of a batch."""

    def __init__(self, seed: int, ids: BatchIds) -> None:
        self._seed, self._ids = seed, ids

    def __call__(self, g: int) -> Ticket:
        epoch, begin, ids = self._ids.of(g)
        return Ticket(self._seed, epoch, begin, ids)


class _WalkIterator:
    """The rest of one epoch. After an error the next iter() of the loader begins with the batch that failed."""

    def __init__(self, loader: SharedLoader[Any], token: int) -> None:
        self._loader, self._token = loader, token
        self._is_finished = False

    def __iter__(self) -> "_WalkIterator":
        return self

    def __next__(self) -> Any:
        if self._is_finished:
            raise StopIteration
        try:
            made = self._loader.hand(self._token)
        except BaseException:
            self._is_finished = True
            self._loader.release(self._token)
            raise
        if made is None:
            self._is_finished = True
            raise StopIteration
        return made.data

    def __del__(self) -> None:
        self._loader.release(self._token)


def _check(dataset: object, batch_size: int | None, *, num_workers: int, seed: int, drop_last: bool) -> None:
    if isinstance(dataset, cast(type, torch_data.IterableDataset)) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise UsageError(
            f"{type(dataset).__name__} has no random access", hint="give a map-style dataset with a length"
        )
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise UsageError(f"batch_size={batch_size!r}", hint="a whole number from 1, or None")
    if batch_size is None and drop_last:
        raise UsageError("drop_last=True with batch_size=None", hint="samples are not batched: leave it out")
    if num_workers < 0:
        raise UsageError(f"num_workers={num_workers}", hint="0: this process prepares")
    if not 0 <= seed <= SEED_MAX:
        raise UsageError(f"seed is a whole number from 0 to 2^64 - 1, got {seed}")


def _default_collate(*, is_batched: bool) -> Callable[..., object]:
    name = "default_collate" if is_batched else "default_convert"
    return cast(Callable[..., object], getattr(torch_data, name))  # torch leaves type arguments out


def _budget(budget: int | str) -> int:
    try:
        return parse_size(budget) if isinstance(budget, str) else max(0, budget)
    except ValueError as error:
        raise UsageError(f"budget={budget!r}", hint=str(error)) from error


def _check_group(group: str, join: str, *, jobs: int, gather_s: float, lease_s: float) -> None:
    if not 1 <= len(group) <= 128:
        raise UsageError(f"group={group!r}", hint="a name of 1 to 128 characters")
    if join not in JOINS:
        raise UsageError(f"join is 'private' or 'rotate', got {join!r}")
    if not 1 <= jobs <= 4096:
        raise UsageError(f"jobs={jobs}", hint="how many jobs are expected: 1 to 4096")
    if not (0 <= gather_s <= 86400 and 0 < lease_s <= 86400):
        raise UsageError(f"gather_s={gather_s}, lease_s={lease_s}", hint="seconds, at most a day")
