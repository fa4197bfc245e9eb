"""The ledger that a loader keeps while it hands out batches; ledger_format.py says what it proves and how."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from .hash_vector import mix64_array
from .holes_format import Spans
from .ledger_format import (
    Lanes,
    LedgerRecord,
    Tally,
    add_lanes,
    find_problems,
    ledger_keys,
    merge_records,
    parse_ledger,
    with_block_sizes,
)
from .order_format import OrderSpec
from .order_plan import Ids, order
from .state_format import parse_state

_PENDING_COUNT_MAX = 4096
_CHUNK_COUNT = 1 << 18


class Ledger:
    """Counts and hashes every sample id that one rank handed out, by epoch; not thread safe.

    A loader keeps one (`loader.ledger`); a run with `attach` saves and restores it. By hand:

        saved = loader.state_dict(), loader.ledger.state()  # plain JSON types, both
        problems = Ledger.verify([loader.ledger], loader.state_dict())  # []: each sample exactly once

    Ids wait in a list and are hashed a few thousand at a time, or when somebody looks: a batch costs about 1 µs.
    """

    def __init__(self, seed: int = 0) -> None:
        self._record = LedgerRecord(seed)
        self._pending: list[Ids] = []
        self._pending_epoch = 0
        self._pending_count = 0

    @property
    def seed(self) -> int:
        """The loader's seed, under which the ids are hashed."""
        return self._record.seed

    def add(self, epoch: int, ids: Ids, padding_count: int = 0, quarantined: tuple[int, ...] = ()) -> None:
        """Count the ids that came back with one batch; the array is kept, not copied.

        Padding is not in `ids`, nor are the ids of the batch that were left out as quarantined.
        """
        if epoch != self._pending_epoch or self._pending_count >= _PENDING_COUNT_MAX:
            self._fold()
            self._pending_epoch = epoch
        if ids.size:
            self._pending.append(ids)
            self._pending_count += ids.size
        if padding_count or quarantined:
            self._add_tally(epoch, Tally(padding_count=padding_count, quarantined=quarantined))

    def skip(self, epoch: int, spans: Spans) -> None:
        """Record that these positions of an epoch were passed and skipped on purpose, by all ranks."""
        self._add_tally(epoch, Tally(skipped=spans))

    def finish(self, epoch: int, dropped_count: int) -> None:
        """Record that an epoch ended and left out this many samples, over all ranks."""
        self._fold()
        self._add_tally(epoch, Tally(dropped_count=dropped_count))

    def merge(self, other: "Ledger") -> None:
        """Add another rank's ledger to this one; LoaderStateError if it was kept under another seed.

        For a restore at another number of ranks: each ledger of the checkpoint must live on in exactly one rank.
        """
        self._fold()
        self._record = merge_records(self.seed, [self._record, other.record()])

    def tally(self, epoch: int) -> Tally:
        """Return what was handed out in an epoch."""
        return self.record().tallies.get(epoch, Tally())

    def record(self) -> LedgerRecord:
        """Return the ledger as a value of its own."""
        self._fold()
        return LedgerRecord(self.seed, dict(self._record.tallies))

    def state(self) -> dict[str, object]:
        """Return a fresh dict of plain JSON types, `everstep-ledger/1`; about 100 bytes per epoch."""
        return self.record().to_dict()

    @classmethod
    def from_state(cls, state: object) -> "Ledger":
        """Return the ledger that `state()` described; LoaderStateError on anything else."""
        ledger = cls()
        ledger._record = parse_ledger(state)
        return ledger

    @staticmethod
    def verify(
        ledgers: Iterable["Ledger"],
        loader_state: Mapping[str, object],
        block_sizes: Iterable[int] | None = None,
    ) -> list[str]:
        """Return what is wrong, a sentence each: `ledger_problems` over arrays. Give the ledgers of all ranks."""
        state = with_block_sizes(parse_state(loader_state), block_sizes)
        return find_problems([each.record() for each in ledgers], state, VectorClosedForms())

    def _add_tally(self, epoch: int, tally: Tally) -> None:
        self._record.tallies[epoch] = self._record.tallies.get(epoch, Tally()) + tally

    def _fold(self) -> None:
        if self._pending:
            ids = np.concatenate(self._pending)
            self._pending = []
            self._pending_count = 0
            lanes = sum_id_array(self.seed, self._pending_epoch, ids)
            self._add_tally(self._pending_epoch, Tally(int(ids.size), lanes))


def sum_id_array(seed: int, epoch: int, ids: Ids) -> Lanes:
    """Return the keyed sums of these ids: the twin of `ledger_format.sum_ids`."""
    values = ids.astype(np.uint64)
    key_1, key_2 = ledger_keys(seed, epoch)
    return _lane(values, key_1), _lane(values, key_2)


def _lane(values: npt.NDArray[np.uint64], key: int) -> int:
    return int(np.add.reduce(mix64_array(values + np.uint64(key))))


class VectorClosedForms:
    """Closed forms over arrays, a quarter of a million ids at a time."""

    def whole(self, seed: int, epoch: int, n: int) -> Lanes:
        """Return the sum over the ids 0 … n - 1."""
        total = (0, 0)
        for start in range(0, n, _CHUNK_COUNT):
            total = add_lanes(
                total, sum_id_array(seed, epoch, np.arange(start, min(n, start + _CHUNK_COUNT)))
            )
        return total

    def between(self, spec: OrderSpec, epoch: int, n: int, span: tuple[int, int]) -> Lanes:
        """Return the sum over the ids at positions span[0] <= p < span[1] of the order."""
        total, epoch_order = (0, 0), order(spec, epoch, n)
        for start in range(span[0], span[1], _CHUNK_COUNT):
            ids = epoch_order.at(np.arange(start, min(span[1], start + _CHUNK_COUNT)))
            total = add_lanes(total, sum_id_array(spec.seed, epoch, ids))
        return total
