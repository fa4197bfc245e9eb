"""Our order for other loaders: batches of ids, resumable where the loader asks its batch sampler for a state."""

from collections.abc import Iterator, Sized

import torch.distributed
from torch.utils.data import Sampler

from ..core.errors import UsageError
from .arguments import BlockShuffle, fingerprint_of, parse_order, parse_rank, parse_seed, parse_uneven
from .position import Position
from .sampler import EpochPlan, tickets
from .split_plan import Part, Split, Uneven
from .state_format import LoaderState, check_fit, parse_state


class OrderBatchSampler(Sampler[list[int]]):
    """`batch_sampler=` for torch's DataLoader or torchdata's StatefulDataLoader: everstep's order, split, and state.

        loader = StatefulDataLoader(dataset, batch_sampler=OrderBatchSampler(dataset, 64, shuffle=True), num_workers=8)

    It yields lists of sample numbers (int), one list for each batch of this rank.

    The state is a loader's, `everstep-loader/1`, the same on every rank, and goes on at any number of ranks. It counts
    the batches that were taken from this object: right under torchdata, which asks each time a batch is handed out
    and remembers the answer; under a loader that prefetches and does not remember, it is ahead. Nobody counts what
    comes back with the batches, so there is no ledger, and no weights for an uneven end: with `uneven="weight"` a rank
    without a sample would train on a repeated one, hence the default is "drop".

    Args:
        dataset: what the ids are of; its length, `fingerprint()` and `block_sizes()` are asked.
        batch_size, shuffle, seed, uneven, drop_last, rank, world_size: as for `everstep.DataLoader`, but for
            `uneven="step"`.

    Raises:
        UsageError: a bad value.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int = 1,
        *,
        shuffle: bool | str | BlockShuffle | None = None,
        seed: int = 0,
        uneven: str = "drop",
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._sample_count = len(dataset)
        self._batch_size = batch_size
        self._fingerprint = fingerprint_of(dataset)
        self._uneven, self._drop_last = parse_uneven(uneven), drop_last
        if self._uneven is Uneven.STEP:
            raise UsageError("uneven='step' repeats samples, and nobody here can give them the weight 0")
        self._fixed_rank = parse_rank(rank, world_size)
        spec = parse_order(dataset, self._sample_count, shuffle, parse_seed(seed, None))
        self._position = Position(spec)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of another epoch; the present one changes nothing."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the state after the last batch taken: plain JSON types, fresh, equal on every rank."""
        position = self._position
        return LoaderState(
            fingerprint=self._fingerprint,
            sample_count=self._sample_count,
            order=position.order,
            epoch=position.epoch,
            cursor=position.cursor,
            holes=position.holes,
        ).to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Make the next iter() go on from a state; LoaderStateError if it is of other data or another order."""
        if not state_dict:
            return
        state = parse_state(state_dict)
        check_fit(state, parse_state(self.state_dict()))
        self._position = Position(self._position.order)
        self._position.load(state)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank."""
        return self._split().step_count()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches from the present position to the end of the epoch."""
        position, split = self._position, self._split()
        plan = EpochPlan(order=position.order, epoch=position.epoch, cursor=position.cursor, split=split)
        for ticket in tickets(plan):
            part = split.part(ticket.cursor)
            assert isinstance(part, Part)
            position.cursor = part.next_cursor
            yield ticket.ids
        position.set_epoch(plan.epoch + 1)

    def _split(self) -> Split:
        rank, world_size = self._fixed_rank or _ranks()
        return Split(
            sample_count=self._sample_count,
            batch_size=self._batch_size,
            rank=rank,
            world_size=world_size,
            uneven=self._uneven,
            drop_last=self._drop_last,
            holes=self._position.holes,
        )


def _ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
