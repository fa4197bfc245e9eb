"""The exactly-once ledger, `everstep-ledger/1`: its form on disk, its closed form and the comparison, without numpy.

For each epoch a rank keeps the count of the sample ids that came back with its batches and, in two independent 64-bit
lanes, the sum modulo 2^64 of their keyed hashes. Sums do not depend on the order, so the ledgers of all ranks add up
to one, and n distinct ids have a closed form to compare with: one id lost, repeated or exchanged for another goes
unseen with a chance of 2^-128. Padding (weight 0) is counted apart and not hashed; samples that the end of an epoch
left out (`drop_last`, `uneven="drop"`) are counted as dropped. Samples that kill workers (`loader.quarantined`) are
listed by their ids; the key is there only where there are any.

    {"format": "everstep-ledger/1", "seed": s, "epochs": [
        {"epoch": e, "count": c, "sum": 32 hex digits, "padding": p, "dropped": d, "quarantined": [ids]}, …]}

    ascending by epoch

A ledger is cumulative along the lineage of checkpoints: a restored one goes on from what the checkpoint held.

The command line must run without numpy, so here is the whole check in plain Python. A finished epoch costs 1 µs per
sample; for the running epoch, and for one that dropped samples, the ids concerned are computed from the order
(10 µs each above 65,536 samples). ledger.py does the same over arrays, and a test holds the two equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from ..core.errors import LoaderStateError
from .hash_format import MASK64, SEED_MAX, derive_keys, mix64
from .order_format import OrderSpec, ids_between
from .state_format import COUNT_MAX, LoaderState, parse_state, shown

LEDGER_FORMAT = "everstep-ledger/1"
PROBLEM_COUNT_MAX = 100

Lanes = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tally:
    """What was handed out in one epoch, by one rank or by several together."""

    count: int = 0
    lanes: Lanes = (0, 0)
    padding_count: int = 0
    dropped_count: int = 0
    quarantined: tuple[int, ...] = ()
    """Ids that were left out, because workers die of reading them; ascending."""

    def __add__(self, other: "Tally") -> "Tally":
        """Return both together; `dropped_count` is said by every rank about the whole epoch, so it is not added."""
        return Tally(
            self.count + other.count,
            add_lanes(self.lanes, other.lanes),
            self.padding_count + other.padding_count,
            max(self.dropped_count, other.dropped_count),
            tuple(sorted(self.quarantined + other.quarantined)),
        )


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """A ledger as a value: the tallies of one rank, or of several together, by epoch."""

    seed: int
    tallies: dict[int, Tally] = field(default_factory=dict[int, Tally])

    def to_dict(self) -> dict[str, object]:
        """Return a fresh dict of plain JSON types."""
        return {
            "format": LEDGER_FORMAT,
            "seed": self.seed,
            "epochs": [
                {
                    "epoch": epoch,
                    "count": tally.count,
                    "sum": f"{tally.lanes[0]:016x}{tally.lanes[1]:016x}",
                    "padding": tally.padding_count,
                    "dropped": tally.dropped_count,
                    **({"quarantined": list(tally.quarantined)} if tally.quarantined else {}),
                }
                for epoch, tally in sorted(self.tallies.items())
            ],
        }


class ClosedForms(Protocol):
    """What the sums must be; in plain Python here, over arrays in ledger.py."""

    def whole(self, seed: int, epoch: int, n: int) -> Lanes:
        """Return the sum over the ids 0 … n - 1."""
        ...

    def between(self, spec: OrderSpec, epoch: int, n: int, span: tuple[int, int]) -> Lanes:
        """Return the sum over the ids at positions span[0] <= p < span[1] of the order."""
        ...


def ledger_keys(seed: int, epoch: int) -> Lanes:
    """Return the keys of the two lanes."""
    key_1, key_2 = derive_keys("ledger", seed, epoch, 2)
    return key_1, key_2


def add_lanes(left: Lanes, right: Lanes) -> Lanes:
    """Return the sum of two sums."""
    return (left[0] + right[0]) & MASK64, (left[1] + right[1]) & MASK64


def sum_ids(seed: int, epoch: int, ids: Iterable[int]) -> Lanes:
    """Return the keyed sums of these ids."""
    key_1, key_2 = ledger_keys(seed, epoch)
    lane_1 = lane_2 = 0
    for sample_id in ids:
        lane_1 += mix64(sample_id + key_1)
        lane_2 += mix64(sample_id + key_2)
    return lane_1 & MASK64, lane_2 & MASK64


class PlainClosedForms:
    """Closed forms without numpy."""

    def whole(self, seed: int, epoch: int, n: int) -> Lanes:
        """Return the sum over the ids 0 … n - 1."""
        return sum_ids(seed, epoch, range(n))

    def between(self, spec: OrderSpec, epoch: int, n: int, span: tuple[int, int]) -> Lanes:
        """Return the sum over the ids at positions span[0] <= p < span[1] of the order."""
        return sum_ids(spec.seed, epoch, ids_between(spec, epoch, n, span))


def ledger_problems(ledgers: Iterable[object], loader_state: object) -> list[str]:
    """Return what is wrong with one checkpoint's data, a sentence each; an empty list is the proof.

    `ledgers` are the parsed JSON values of *all* ranks of the checkpoint, `loader_state` the state that any of them
    holds. No numpy.

    Raises:
        LoaderStateError: a ledger or the state is not of the known format, or seeds differ.
    """
    return find_problems(
        [parse_ledger(each) for each in ledgers], parse_state(loader_state), PlainClosedForms()
    )


def find_problems(records: Sequence[LedgerRecord], state: LoaderState, forms: ClosedForms) -> list[str]:
    """Return what differs between the ledgers of all ranks and what `state` says was handed out; at most 100."""
    total = merge_records(state.order.seed, records)
    problems = [
        f"epoch {epoch} is ahead of the loader's epoch {state.epoch}, yet {tally.count} samples were handed out in it"
        for epoch, tally in sorted(total.tallies.items())
        if epoch > state.epoch and tally.count
    ]
    for epoch in range(state.epoch + 1 if state.sample_count else 0):
        problems += _epoch_problems(total.tallies.get(epoch, Tally()), epoch, state, forms)
        if len(problems) >= PROBLEM_COUNT_MAX:
            return [*problems[:PROBLEM_COUNT_MAX], "further problems are not listed"]
    return problems


def merge_records(seed: int, records: Iterable[LedgerRecord]) -> LedgerRecord:
    """Return the ledgers of several ranks as one; LoaderStateError if one was kept under another seed."""
    total = LedgerRecord(seed)
    for record in records:
        if record.seed != seed and record.tallies:
            raise LoaderStateError(
                f"a ledger was kept under seed {record.seed}, expected seed {seed}",
                hint="ledgers and loader state must come from one checkpoint",
            )
        for epoch, tally in record.tallies.items():
            total.tallies[epoch] = total.tallies.get(epoch, Tally()) + tally
    return total


def _epoch_problems(tally: Tally, epoch: int, state: LoaderState, forms: ClosedForms) -> list[str]:
    n, left_out = state.sample_count, tally.quarantined
    end = state.cursor if epoch == state.epoch else max(0, n - tally.dropped_count)
    count = end - len(left_out)
    if tally.count != count:
        beside = f" beside {len(left_out)} quarantined ones" if left_out else ""
        return [
            f"epoch {epoch}: {count} samples should have been handed out{beside}, the ledger counts {tally.count}"
        ]
    if end == 0:
        expected = (0, 0)
    elif 2 * end <= n:
        expected = forms.between(state.order, epoch, n, (0, end))
    else:
        rest = forms.between(state.order, epoch, n, (end, n))
        whole = forms.whole(state.order.seed, epoch, n)
        expected = add_lanes(whole, (-rest[0], -rest[1]))
    without = sum_ids(state.order.seed, epoch, left_out)
    if add_lanes(tally.lanes, without) != expected:
        return [
            f"epoch {epoch}: the count of {count} samples is right, but some were lost and others handed out twice"
        ]
    return []


def parse_ledger(state: object) -> LedgerRecord:
    """Return the ledger that a dict holds; LoaderStateError on anything else."""
    top = _mapping(state)
    if top.get("format") != LEDGER_FORMAT:
        raise LoaderStateError(f"a ledger has the format {LEDGER_FORMAT!r}, got {shown(top.get('format'))}")
    epochs = top.get("epochs")
    if not isinstance(epochs, Sequence) or isinstance(epochs, str | bytes):
        raise LoaderStateError(f"epochs of a ledger is a list, got {type(epochs).__name__}")
    record = LedgerRecord(_whole(top, "seed", SEED_MAX))
    for each in cast(Sequence[object], epochs):
        entry = _mapping(each)
        epoch = _whole(entry, "epoch", COUNT_MAX)
        if epoch in record.tallies:
            raise LoaderStateError(f"a ledger lists epoch {epoch} twice")
        record.tallies[epoch] = Tally(
            _whole(entry, "count", COUNT_MAX),
            _lanes(entry.get("sum")),
            _whole(entry, "padding", COUNT_MAX),
            _whole(entry, "dropped", COUNT_MAX),
            _ids(entry.get("quarantined", ())),
        )
    return record


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise LoaderStateError(f"a ledger and its epochs are dicts, got {type(value).__name__}")
    return cast(Mapping[str, object], value)


def _whole(entry: Mapping[str, object], name: str, most: int) -> int:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise LoaderStateError(f"{name} of a ledger is a whole number from 0 to {most}, got {shown(value)}")
    return value


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise LoaderStateError(f"quarantined of a ledger is a list of ids, got {type(value).__name__}")
    entries = [{"quarantined": each} for each in cast(Sequence[object], value)]
    return tuple(sorted(_whole(entry, "quarantined", COUNT_MAX) for entry in entries))


def _lanes(value: object) -> Lanes:
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise LoaderStateError(f"sum of a ledger is 32 hex digits, got {shown(value)}")
    return int(value[:16], 16), int(value[16:], 16)
