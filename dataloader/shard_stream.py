"""A stream over shards that can only be read from their begin: resumed by opening a shard again and reading on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from ..core.errors import LoaderStateError, UsageError
from .hash_format import SEED_MAX
from .order_format import permutation

T_co = TypeVar("T_co", covariant=True)


class ShardStream(IterableDataset[T_co]):
    """The samples of shards (tar files, pipes, decompressed logs), each shard read by one worker of one rank.

    The order of the shards is a keyed permutation per epoch; ranks and workers take them in turn. The state is which
    shard, and how many samples of it: resuming opens that shard and reads over those samples, without decoding what
    `transform` decodes. Nothing is read of the shards before.

        stream = ShardStream(["a.jsonl.gz", "b.jsonl.gz"], lambda name: gzip.open(name), transform=json.loads)
        loader = everstep.DataLoader(stream, batch_size=64, num_workers=2)

    Args:
        shards: names of the shards, the same on all ranks.
        open_shard: name -> its samples, in an order that is always the same.
        transform: what is made of each sample; not called for samples that are read over.
        shuffle, seed: order of the shards.
        ranks: (rank, world size); by default what everstep's loader says, also in its workers, else what
            torch.distributed says when iteration begins. Give them to another loader that has workers.

    Raises:
        UsageError: no shard, or a seed out of range. When iterated: LoaderStateError, where a shard has fewer samples
            than the state says were read.
    """

    def __init__(
        self,
        shards: Sequence[str],
        open_shard: Callable[[str], Iterable[object]],
        transform: Callable[[object], T_co] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        ranks: tuple[int, int] | None = None,
    ) -> None:
        if not shards:
            raise UsageError("a stream needs at least one shard")
        if not 0 <= seed <= SEED_MAX:
            raise UsageError(f"seed is a whole number from 0 to 2^64 - 1, got {seed}")
        self._shards = list(shards)
        self._open = open_shard
        self._transform = transform
        self._shuffle, self._seed, self._ranks = shuffle, seed, ranks
        self._are_ranks_given = ranks is not None
        self._epoch = 0
        self._turn = 0
        """How many shards of this worker's share are done."""
        self._offset = 0
        """How many samples of the next one are done."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch; the loader calls it."""
        self._epoch = epoch

    def set_ranks(self, rank: int, world_size: int) -> None:
        """Take the shards of this rank, unless `ranks` was given; the loader calls it."""
        if not self._are_ranks_given:
            self._ranks = rank, world_size

    def state_dict(self) -> dict[str, object]:
        """Return where this worker stands."""
        return {"epoch": self._epoch, "turn": self._turn, "offset": self._offset, "shards": len(self._shards)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Go on from there; LoaderStateError if the number of shards is another one."""
        epoch, turn, offset, count = (state_dict.get(key) for key in ("epoch", "turn", "offset", "shards"))
        if not all(isinstance(each, int) and each >= 0 for each in (epoch, turn, offset)):
            raise LoaderStateError(f"not a position in shards: {sorted(state_dict)[:10]}")
        if count != len(self._shards):
            raise LoaderStateError(
                f"the state is of {count!r} shards, here are {len(self._shards)}",
                hint="give the shards that the checkpoint was made with",
            )
        assert isinstance(epoch, int)
        assert isinstance(turn, int)
        assert isinstance(offset, int)
        self._epoch, self._turn, self._offset = epoch, turn, offset

    def __iter__(self) -> Iterator[T_co]:
        """Yield this worker's samples from where it stands to the end of its share."""
        share = self._share()
        while self._turn < len(share):
            samples = iter(self._open(share[self._turn]))
            passed = sum(1 for _ in islice(samples, self._offset))
            if passed < self._offset:
                raise LoaderStateError(
                    f"shard {share[self._turn]!r} has {passed} samples, at the checkpoint at least {self._offset}",
                    hint="the shard changed; start without the loader's state",
                )
            for sample in samples:
                self._offset += 1
                yield self._made(sample)
            self._turn, self._offset = self._turn + 1, 0
        self._turn = self._offset = 0

    def _made(self, sample: object) -> T_co:
        return sample if self._transform is None else self._transform(sample)  # type: ignore[return-value]

    def _share(self) -> list[str]:
        """Return the shards of this worker, in order."""
        count = len(self._shards)
        at = (
            permutation(self._seed, self._epoch, count, "shards")
            if self._shuffle
            else range(count).__getitem__
        )
        rank, world_size = self._ranks or _ranks()
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first, step = rank * workers + worker, world_size * workers
        return [self._shards[at(position)] for position in range(first, count, step)]


def _ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
