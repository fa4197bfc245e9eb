"""What a loader hands to those who prepare its batches (tickets), and what users see as `loader.sampler`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import DistributedSampler

from ..core.errors import UsageError
from .batch_maker import Ticket
from .holes_format import Holes
from .order_format import OrderSpec
from .order_plan import Ids, order
from .position import Position
from .split_plan import Part, Split
from .user_sampler import DrawnSplit

_CHUNK_COUNT = 4096  # ids computed at a time: 1 ms for the first batch, then 0.2 µs per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """All that decides the batches of one rank from `cursor` to the end of an epoch."""

    order: OrderSpec
    epoch: int
    cursor: int
    split: Split | DrawnSplit


class OrderSampler(DistributedSampler[int]):
    """`loader.sampler`: says how long an epoch is and takes `set_epoch`; refuses to be iterated by anybody else.

    A framework that rebuilds the loader around its sampler would go round the state and the ledger. It is a
    DistributedSampler by type, since that is what tells Lightning that the ranks share the data already; nothing of
    torch's class runs.
    """

    def __init__(self, position: Position, sample_count: int) -> None:
        self._position = position
        self._sample_count = sample_count

    def __iter__(self) -> Iterator[int]:
        """Raise UsageError."""
        raise UsageError(
            "this sampler belongs to an everstep DataLoader and cannot be iterated apart from it",
            hint="iterate the loader itself, which splits the data between ranks; for Accelerate see "
            "everstep.dataloader.adapters, for torchdata everstep.dataloader.OrderBatchSampler; Lightning's predict "
            "wants a loader of torch's",
        )

    def __len__(self) -> int:
        """Return the number of samples of an epoch, over all ranks."""
        return self._sample_count

    def set_epoch(self, epoch: int) -> None:
        """Do what the loader's `set_epoch` does: frameworks call it here."""
        self._position.set_epoch(epoch)


def tickets(plan: EpochPlan) -> Iterator[Ticket]:
    """Yield a ticket per step. Memory: a few thousand ids, whatever the size of the dataset."""
    split = plan.split
    if isinstance(split, DrawnSplit):
        yield from split.tickets(plan.order.seed, plan.cursor)
        return
    epoch_order = order(plan.order, plan.epoch, split.sample_count)
    per_chunk = max(1, _CHUNK_COUNT // split.batch_size)
    parts: list[Part] = []
    part = split.part(plan.cursor)
    while part is not None:
        parts.append(part)
        part = split.part(part.next_cursor)
        if part is None or len(parts) == per_chunk:
            ids = epoch_order.at(_positions(parts, split.holes)).tolist()
            for each in parts:
                count = each.stop - each.start
                yield Ticket(plan.order.seed, plan.epoch, each.cursor, ids[:count])
                ids = ids[count:]
            parts = []


def _positions(parts: list[Part], holes: Holes) -> Ids:
    turns = np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])
    if not holes:
        return turns
    skipped, first_turns = np.array(holes.skipped), np.array(holes.first_turns)
    return turns + skipped[np.searchsorted(first_turns, turns, side="right")]
