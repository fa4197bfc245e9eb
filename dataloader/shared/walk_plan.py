"""Which batches a job walks through, and which samples are in them: plain arithmetic.

Batch b of an epoch has the positions [b * batch_size, (b + 1) * batch_size) of the epoch's order. Over all epochs
batches are numbered g = epoch * batches_per_epoch + b. A job that joins late may begin its walk through an epoch
elsewhere than at 0 and take what it missed at the end: `start`.
"""

from dataclasses import dataclass

import numpy as np

from ..order_format import OrderSpec
from ..order_plan import Order, order


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """How an epoch is cut into batches."""

    sample_count: int
    batch_size: int
    drop_last: bool

    @property
    def batch_count(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self.sample_count, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def size(self, b: int) -> int:
        """Return the number of samples in batch b of an epoch."""
        return min(self.batch_size, self.sample_count - b * self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What is left of an epoch: its batches from `start` around to `start`, without the first `taken`."""

    cut: BatchCut
    epoch: int
    start: int = 0
    taken: int = 0

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return self.cut.batch_count - self.taken

    @property
    def samples_taken(self) -> int:
        """Samples of the batches that were taken."""
        cut, count = self.cut, self.cut.batch_count
        missing_in_last = cut.batch_size - cut.size(count - 1) if count else 0
        has_last = self.start + self.taken >= count and self.taken > 0
        return self.taken * cut.batch_size - (missing_in_last if has_last else 0)

    def batch(self, index: int) -> int:
        """Return the number g of the index-th batch that is left."""
        count = self.cut.batch_count
        return self.epoch * count + (self.start + self.taken + index) % count


class BatchIds:
    """The sample ids of batches; keeps the order of the epoch it was asked about last."""

    def __init__(self, spec: OrderSpec, cut: BatchCut) -> None:
        self._spec, self._cut = spec, cut
        self._epoch = -1
        self._order: Order | None = None

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self._spec.seed

    def of(self, g: int) -> tuple[int, int, list[int]]:
        """Return epoch, first position and sample ids of batch g."""
        epoch, b = divmod(g, self._cut.batch_count)
        if self._order is None or epoch != self._epoch:
            self._order, self._epoch = order(self._spec, epoch, self._cut.sample_count), epoch
        begin = b * self._cut.batch_size
        positions = np.arange(begin, begin + self._cut.size(b), dtype=np.int64)
        return epoch, begin, self._order.at(positions).tolist()
