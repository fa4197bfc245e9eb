"""Streams without random access (tier 3): an IterableDataset says itself where it stands, batch by batch.

torch's own loader runs the stream: each worker process iterates a copy of the dataset, which takes its share by
`get_worker_info()` as torch has it, and between ranks by whatever the dataset does. A worker makes whole batches and
sends with each what the dataset (or its iterator) said of itself right after: what is prefetched does not count.

A state holds one such entry per worker, hence ranks and workers are fixed, and it is this rank's alone. A stream
without `state_dict` and `load_state_dict` can be iterated and not be resumed in mid-epoch. Nothing proves that its
samples come once. Random augmentation is seeded by (seed, epoch, rank, worker, number of the sample there).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch.utils.data import IterableDataset, get_worker_info

from ..core.errors import LoaderStateError, UsageError
from .epoch_iterator import Callback
from .position import Position
from .sample_seed import preserved, seed_generators, stream_seed
from .user_sampler import Stateful

Shard = dict[str, object]
"""Where one worker stands: {"own": the dataset's state, "seen": samples, "is_over": bool}."""


class StreamBatch(NamedTuple):
    """A batch of one worker and where the stream stands behind it; without samples it says that the worker is done."""

    worker: int
    sample_count: int
    data: object
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """All that decides what the workers of one rank make of a stream in one epoch."""

    seed: int
    epoch: int
    rank: int
    batch_size: int | None
    drop_last: bool
    augment_seed: bool
    first_worker: int
    """The worker whose turn is first."""
    shards: tuple[Shard | None, ...]
    """Where each worker begins; None: at the begin of its share."""


class StreamMaker(IterableDataset[StreamBatch]):
    """The dataset that torch's loader iterates in each worker: makes batches of the user's stream."""

    def __init__(self, dataset: object, collate: Callable[..., object], plan: StreamPlan) -> None:
        self.dataset = dataset
        self._collate = collate
        self._plan = plan

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield the batches of one worker, then one without samples."""
        plan, worker = self._plan, self.logical_worker()
        shard = deepcopy(plan.shards[worker]) or {"own": None, "seen": 0, "is_over": False}
        if not shard["is_over"]:
            yield from self._batches(worker, shard)
        yield StreamBatch(worker, 0, None, {**shard, "is_over": True})

    def logical_worker(self) -> int:
        """Return whose share this process iterates: after a resume the worker whose turn it was is the first one."""
        info = get_worker_info()
        return 0 if info is None else (info.id + self._plan.first_worker) % info.num_workers

    def _batches(self, worker: int, shard: Shard) -> Iterator[StreamBatch]:
        guest = preserved if self._plan.augment_seed and get_worker_info() is None else nullcontext
        with guest():
            stream, owner = _opened(self.dataset, cast("dict[str, object] | None", shard["own"]))
        size = self._plan.batch_size
        is_more = True
        while is_more:
            samples: list[object] = []
            with guest():
                while is_more and len(samples) < (size or 1):
                    self._seed(worker, cast(int, shard["seen"]) + len(samples))
                    sample = next(stream, _END)
                    if sample is _END:
                        is_more = False
                    else:
                        samples.append(sample)
                if not samples or (self._plan.drop_last and size is not None and len(samples) < size):
                    return
                data = self._collate(samples[0] if size is None else samples)
            shard["seen"] = cast(int, shard["seen"]) + len(samples)
            shard["is_over"] = not is_more  # then the dataset may already say where its next epoch begins
            shard["own"] = None if owner is None else deepcopy(owner.state_dict())
            yield StreamBatch(worker, len(samples), data, dict(shard))

    def _seed(self, worker: int, index: int) -> None:
        plan = self._plan
        if plan.augment_seed:
            share = plan.rank * len(plan.shards) + worker
            seed_generators(stream_seed(plan.seed, plan.epoch, share, index))


_END = object()


def unchanged_stream(batch: StreamBatch) -> StreamBatch:
    """Return the batch as it is: torch's collate function, with nothing left to collate."""
    return batch


def _opened(dataset: object, own: dict[str, object] | None) -> tuple[Iterator[object], Stateful | None]:
    """Return the stream from where `own` says, and who says where it stands: the dataset, or else its iterator."""
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
    return stream, owner


class StreamWorkerInit:
    """torch's worker_init_fn: users see their own dataset and the worker whose share it is."""

    def __init__(self, user_function: Callable[[int], None] | None) -> None:
        self._user_function = user_function

    def __call__(self, worker_id: int) -> None:
        """Run once in each worker process, before any batch."""
        info = get_worker_info()
        assert info is not None
        maker = cast(StreamMaker, info.dataset)  # pyright: ignore[reportUnknownMemberType]
        worker = maker.logical_worker()
        object.__setattr__(info, "dataset", maker.dataset)
        object.__setattr__(info, "id", worker)
        maker.logical_worker = lambda: worker
        if self._user_function is not None:
            self._user_function(worker)


class StreamPosition:
    """Where the workers of one rank stand, after the batches that the loop got."""

    def __init__(self, dataset: object, worker_count: int) -> None:
        self._name = type(dataset).__name__
        self._begin_epoch = 0
        self._worker_count = max(1, worker_count)
        self.restart(0)

    def restart(self, epoch: int) -> None:
        """Stand at the begin of an epoch."""
        self._begin_epoch = epoch
        self.next_worker = 0
        self.shards: list[Shard | None] = [None] * self._worker_count
        self.is_resumable = True

    def is_in(self, epoch: int) -> bool:
        """Tell whether this is where that epoch stands."""
        return self._begin_epoch == epoch

    def hand(self, batch: StreamBatch) -> None:
        """Count a batch as handed to the loop."""
        self.shards[batch.worker] = batch.shard
        self.next_worker = (batch.worker + 1) % self._worker_count
        if batch.sample_count and batch.shard["own"] is None:
            self.is_resumable = False

    def source(self, rank: int, world_size: int) -> dict[str, object]:
        """Return what a state says of the stream."""
        return {
            "rank": rank,
            "world_size": world_size,
            "next_worker": self.next_worker,
            "shards": deepcopy(self.shards) if self.is_resumable else None,
            "workers": self._worker_count,
        }

    def load(self, epoch: int, source: Mapping[str, object], rank: int, world_size: int) -> None:
        """Take over what a state said; LoaderStateError if it cannot be gone on from."""
        if source.get("shards") is None:
            raise LoaderStateError(
                f"{self._name} did not say where it stands, so that the middle of an epoch cannot be found again",
                hint="give it state_dict() and load_state_dict(), or checkpoint between epochs",
            )
        ours = (rank, world_size, self._worker_count)
        theirs = (source.get("rank"), source.get("world_size"), source.get("workers"))
        if theirs != ours:
            raise LoaderStateError(
                "the stream's state is of rank {} of {} with {} workers, this is rank {} of {} with {}".format(
                    *theirs, *ours
                ),
                hint="a stream goes on only with the ranks and workers it had; each rank loads its own state",
            )
        shards, next_worker = source["shards"], source.get("next_worker")
        if (
            not isinstance(shards, list)
            or len(cast("list[object]", shards)) != self._worker_count
            or not all(_is_shard(shard) for shard in cast("list[object]", shards))
            or not isinstance(next_worker, int)
            or not 0 <= next_worker < self._worker_count
        ):
            raise LoaderStateError(
                f"source of the state is no position of {self._worker_count} workers",
                hint="give the dict that state_dict() of this loader returned, unchanged",
            )
        self.restart(epoch)
        self.shards = deepcopy(cast("list[Shard | None]", shards))
        self.next_worker = next_worker


def _is_shard(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    shard = cast(Shard, value)
    return set(shard) == {"own", "seen", "is_over"} and isinstance(shard["seen"], int)


class StreamIterator:
    """The rest of one epoch of a stream; moves the loader's position by each batch it returns."""

    def __init__(
        self,
        position: Position,
        token: int,
        place: StreamPosition,
        made: Iterator[StreamBatch],
        callbacks: list[Callback],
    ) -> None:
        self._position, self._token, self._place = position, token, place
        self._made: Iterator[StreamBatch] | None = made
        self._callbacks: list[Callback] | None = callbacks
        self._is_finished = False

    def __iter__(self) -> "StreamIterator":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; UsageError when a newer iter() or reset() took over, or after an error."""
        if self._is_finished:
            raise StopIteration
        if not self._position.is_newest(self._token) or self._made is None:
            raise UsageError(
                "this iterator of a stream cannot go on: a newer one took over, or it ended with an error",
                hint="use one iterator of a loader at a time; iter() makes a new one",
            )
        try:
            batch = self._next_batch(self._made)
        except BaseException:
            self._close()
            raise
        if batch is None:
            self._is_finished = True
            self._close()
            self._position.finish(self._position.cursor)
            raise StopIteration
        self._place.hand(batch)
        self._position.hand_uncounted(batch.sample_count)
        return batch.data

    def __del__(self) -> None:
        self._position.release(self._token)

    def _next_batch(self, made: Iterator[StreamBatch]) -> StreamBatch | None:
        for batch in made:
            if batch.sample_count:
                for callback in tuple(self._callbacks or ()):
                    callback()
                self._callbacks = None
                return batch
            self._place.hand(batch)
        return None

    def _close(self) -> None:
        self._made = None
        self._position.release(self._token)
