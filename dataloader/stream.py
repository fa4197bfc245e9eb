"""Streams without random access (tier 3): an IterableDataset says itself where it stands, batch by batch.

Each worker process reads a copy of the dataset, which takes its share by `get_worker_info()` as torch has it, and
between ranks by whatever the dataset does, which hears of them by `set_ranks(rank, world_size)` if it has that, as of
`set_epoch` (stream_plan.py). A worker makes whole batches and sends with each what the
dataset (or its iterator) said of itself right after: what is prefetched does not count. A worker that dies is replaced
by one that opens its share behind the last batch that came; of a stream that says nothing that is an error.

A state holds one such entry per share, hence the ranks are fixed in the middle of an epoch, and it is this rank's
alone. The epoch is read to its end by as many workers as began it, the next one by `num_workers`. A stream without
`state_dict` and `load_state_dict` can be iterated and not be resumed in mid-epoch. Nothing proves that its samples come
once. Random augmentation is seeded by (seed, epoch, rank, share, number of the sample there).
"""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

from ..core.errors import LoaderStateError, UsageError, WorkerError
from .batch_maker import MadeBatch, Maker
from .batch_supply import Work
from .epoch_iterator import Callback
from .position import Position
from .stream_maker import Pristine, StreamMaker
from .stream_plan import Shard, Standing, StreamShares
from .workers.batches import Batches

_log = logging.getLogger(__name__)

SHARE_COUNT_MAX = 4096


class Stream:
    """Where the shares of one rank's stream stand, after the batches that the loop got; and what goes on from there."""

    def __init__(self, dataset: object, worker_count: int) -> None:
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._begin_epoch = 0
        self._worker_count = worker_count
        self._pristine = Pristine(dataset)
        self.restart(0)

    def restart(self, epoch: int) -> None:
        """Stand at the begin of an epoch."""
        self._begin_epoch = epoch
        self._next_share = 0
        self._shards: list[Shard | None] = [None] * max(1, self._worker_count)
        self.is_resumable = True

    @property
    def worker_count(self) -> int:
        """How many processes read this epoch: as many as began it; 0: the trainer reads it itself."""
        return self._worker_count if len(self._shards) == max(1, self._worker_count) else len(self._shards)

    def is_in(self, epoch: int) -> bool:
        """Tell whether this is where that epoch stands."""
        return self._begin_epoch == epoch

    @property
    def is_over(self) -> bool:
        """Whether every share has said that it is at its end."""
        return all(shard is not None and shard["is_over"] for shard in self._shards)

    def hand(self, standing: Standing) -> None:
        """Count a batch as handed to the loop."""
        self._shards[standing.share] = standing.shard
        self._next_share = (standing.share + 1) % len(self._shards)
        if standing.sample_count and standing.shard["own"] is None:
            self.is_resumable = False

    # -- reading -------------------------------------------------------------------------------------------------

    def work(
        self,
        collate: Callable[..., object],
        *,
        seed: int,
        ranks: tuple[int, int],
        batch_size: int | None,
        drop_last: bool,
        augment_seed: bool,
    ) -> Work:
        """Return the batches from here to the end of the epoch."""
        epoch = self._begin_epoch
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        shares = StreamShares(
            seed=seed, epoch=epoch, ranks=ranks, begins=self._shards, first_share=self._next_share
        )
        dataset, name, pristine = self._dataset, self._name, self._pristine

        def made_with(share: int) -> Maker:
            if not shares.can_be_opened(share):
                raise WorkerError(
                    f"DataLoader worker {share} died, and {name} does not say where it stands: nobody can read on "
                    "in its place without losing or repeating samples",
                    hint="give it state_dict() and load_state_dict(); the log says how the worker ended",
                )
            return StreamMaker(
                dataset,
                collate,
                batch_size=batch_size,
                drop_last=drop_last,
                augment_seed=augment_seed,
                opening=shares.opening(share),
                pristine=pristine,
            )

        def came(made: MadeBatch) -> None:
            assert made.standing is not None, made
            shares.came(made.standing)

        return Work(tickets=shares.tickets(), maker=made_with, came=came)

    # -- state ---------------------------------------------------------------------------------------------------

    def source(self, rank: int, world_size: int) -> dict[str, object]:
        """Return what a state says of the stream."""
        return {
            "rank": rank,
            "world_size": world_size,
            "next_worker": self._next_share,
            "shards": deepcopy(self._shards) if self.is_resumable else None,
            "workers": len(self._shards),
        }

    def check(self, source: Mapping[str, object], rank: int, world_size: int) -> None:
        """Return if what a state said can be gone on from; LoaderStateError otherwise."""
        if source.get("shards") is None:
            raise LoaderStateError(
                f"{self._name} did not say where it stands, so that the middle of an epoch cannot be found again",
                hint="leave the loader out of what is attached, and its epoch begins anew; for the next time give the "
                "dataset state_dict() and load_state_dict()",
            )
        ours, theirs = (rank, world_size), (source.get("rank"), source.get("world_size"))
        if theirs != ours:
            raise LoaderStateError(
                f"the stream's state is of rank {theirs[0]} of {theirs[1]}, this is rank {rank} of {world_size}",
                hint="an epoch of a stream goes on only with the ranks that began it; each rank loads its own state",
            )
        _shares_of(source)

    def load(self, epoch: int, source: Mapping[str, object]) -> None:
        """Take over what a state said, once it was checked."""
        shards, next_share = _shares_of(source)
        self.restart(epoch)
        self._shards, self._next_share = deepcopy(shards), next_share
        if len(shards) != max(1, self._worker_count):
            _log.warning(
                "loader_workers_of_state epoch=%d workers=%d num_workers=%d: the epoch ends with the workers that "
                "began it",
                epoch,
                len(shards),
                self._worker_count,
            )


def _shares_of(source: Mapping[str, object]) -> tuple[list[Shard | None], int]:
    """Return where the shares of a state stand, and whose turn it is; LoaderStateError for anything else."""
    count, shards, next_share = source.get("workers"), source["shards"], source.get("next_worker")
    if (
        not isinstance(count, int)
        or not 1 <= count <= SHARE_COUNT_MAX
        or not isinstance(shards, list)
        or len(cast("list[object]", shards)) != count
        or not all(_is_shard(shard) for shard in cast("list[object]", shards))
        or not isinstance(next_share, int)
        or not 0 <= next_share < count
    ):
        raise LoaderStateError(
            f"source of the state is no position of {count if isinstance(count, int) else 'any'} workers",
            hint="give the dict that state_dict() of this loader returned, unchanged",
        )
    return cast("list[Shard | None]", shards), next_share


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
        stream: Stream,
        made: Batches,
        callbacks: list[Callback],
    ) -> None:
        self._position, self._token, self._stream = position, token, stream
        self._made: Batches | None = made
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
        data, standing = batch
        self._stream.hand(standing)
        self._position.hand_uncounted(standing.sample_count)
        return data

    def __del__(self) -> None:
        self._close()

    def _next_batch(self, made: Batches) -> tuple[object, Standing] | None:
        """Return the next batch and where its share stands behind it, past those that only say that one is over."""
        self._call_back()  # first: the trainer itself may make the batch, with random numbers
        for batch in made:
            standing = batch.standing
            assert standing is not None, batch
            if standing.sample_count:
                return batch.data, standing
            self._stream.hand(standing)
        if not self._stream.is_over:
            raise UsageError(
                f"collate_fn raised StopIteration at sample {self._position.cursor}",
                hint="raise another error: this one means the end of the epoch",
            )
        return None

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in tuple(callbacks or ()):
            callback()

    def _close(self) -> None:
        made, self._made = self._made, None
        self._position.release(self._token)
        if made is not None:
            made.close()
