"""The exactly-once ledger, `everstep-ledger/1`: its form on disk, its closed form and the comparison, without numpy.

For each epoch a rank keeps the count of the sample ids that came back with its batches and, in two independent 64-bit
lanes, the sum modulo 2^64 of their keyed hashes. Sums do not depend on the order, so the ledgers of all ranks add up
to one, and n distinct ids have a closed form to compare with: one id lost, repeated or exchanged for another goes
unseen with a chance of 2^-128. Padding (weight 0) is counted apart and not hashed; samples that the end of an epoch
left out (`drop_last`, `uneven="drop"`) are counted as dropped, positions that the user had skipped (holes of the state)
are listed, and so are the ids of samples that kill workers (`loader.quarantined`).

    {"format": "everstep-ledger/1", "seed": s, "epochs": [
        {"epoch": e, "count": c, "sum": 32 hex digits, "padding": p, "dropped": d}, …]}     ascending by epoch

An epoch with holes has `"skipped": [[a, b], …]`, too, and one that left out samples `"quarantined": [ids]`.

A ledger is cumulative along the lineage of checkpoints: a restored one goes on from what the checkpoint held.

The command line must run without numpy, so here is the whole check in plain Python. A finished epoch costs 1 µs per
sample; for the running epoch, and for one that dropped samples, the ids concerned are computed from the order
(10 µs each above 65,536 samples). ledger.py does the same over arrays, and a test holds the two equal.

Nothing can be compared where a user's own sampler or stream decides the order, and of an epoch in progress in a block
shuffle only the count, where the state has no room for the block sizes and nobody gives them (`unproven`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from ..core.errors import LoaderStateError
from .block_format import listed_blocks
from .hash_format import MASK64, SEED_MAX, derive_keys, mix64
from .holes_format import HOLE_COUNT_MAX, Spans, united
from .order_format import OrderKind, OrderSpec, ids_between
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
    skipped: Spans = ()
    """Positions that were passed and skipped on purpose."""
    quarantined: tuple[int, ...] = ()
    """Ids that were left out, because workers die of reading them; ascending."""

    def __add__(self, other: "Tally") -> "Tally":
        """Return both together; what was dropped or skipped is said by every rank about the whole epoch: not added."""
        return Tally(
            self.count + other.count,
            add_lanes(self.lanes, other.lanes),
            self.padding_count + other.padding_count,
            max(self.dropped_count, other.dropped_count),
            united([*self.skipped, *other.skipped]).spans,
            tuple(sorted(self.quarantined + other.quarantined)),
        )

    def to_dict(self, epoch: int) -> dict[str, object]:
        """Return a fresh dict of plain JSON types."""
        entry: dict[str, object] = {
            "epoch": epoch,
            "count": self.count,
            "sum": f"{self.lanes[0]:016x}{self.lanes[1]:016x}",
            "padding": self.padding_count,
            "dropped": self.dropped_count,
        }
        if self.skipped:
            entry["skipped"] = [list(span) for span in self.skipped]
        if self.quarantined:
            entry["quarantined"] = list(self.quarantined)
        return entry


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
            "epochs": [tally.to_dict(epoch) for epoch, tally in sorted(self.tallies.items())],
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


def ledger_problems(
    ledgers: Iterable[object], loader_state: object, block_sizes: Iterable[int] | None = None
) -> list[str]:
    """Return what is wrong with one checkpoint's data, a sentence each; an empty list is the proof (see `unproven`).

    `ledgers` are the parsed JSON values of *all* ranks of the checkpoint, `loader_state` the state that any of them
    holds, `block_sizes` those of the dataset, for a block shuffle. No numpy.

    Raises:
        LoaderStateError: a ledger or the state is not of the known format, or seeds differ.
    """
    state = with_block_sizes(parse_state(loader_state), block_sizes)
    return find_problems([parse_ledger(each) for each in ledgers], state, PlainClosedForms())


def with_block_sizes(state: LoaderState, block_sizes: Iterable[int] | None) -> LoaderState:
    """Return the state with the block sizes it had no room for; LoaderStateError if they are other ones."""
    known = state.order.blocks
    if block_sizes is None or known is None:
        return state
    blocks = listed_blocks(block_sizes, known.window)
    if not blocks.is_like(known):
        raise LoaderStateError(
            f"the state was made with {known.count} blocks of digest {known.digest}, given are {blocks.count} of "
            f"digest {blocks.digest}",
            hint="give the block sizes of the dataset that the checkpoint was made with",
        )
    return replace(state, order=replace(state.order, blocks=blocks))


def unproven(state: LoaderState) -> str:
    """Return what the ledgers cannot prove for a state of this kind, a sentence; empty when they prove everything."""
    if not state.order.kind.is_numbered:
        return (
            f"order {state.order.kind.value!r} is the user's own: there is nothing to compare the ledger with"
        )
    if state.order.blocks is not None and state.order.blocks.runs is None:
        return (
            "epochs that are in progress or left samples out are compared by their counts alone: the state has no "
            f"room for the sizes of {state.order.blocks.count} blocks"
        )
    return ""


def find_problems(records: Sequence[LedgerRecord], state: LoaderState, forms: ClosedForms) -> list[str]:
    """Return what differs between the ledgers of all ranks and what `state` says was handed out; at most 100."""
    total = merge_records(state.order.seed, records)
    if not state.order.kind.is_numbered:
        return []
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
    is_present = epoch == state.epoch
    end = state.cursor if is_present else max(0, state.sample_count - tally.dropped_count)
    skipped = united(tally.skipped).between(0, end)
    if is_present and skipped != state.holes.between(0, end):
        said = [list(span) for span in state.holes.between(0, end)]
        return [f"epoch {epoch}: positions {[list(s) for s in skipped]} were skipped, the state says {said}"]
    left_out = tally.quarantined
    count = end - sum(stop - start for start, stop in skipped) - len(left_out)
    if tally.count != count:
        beside = f" beside {len(left_out)} quarantined ones" if left_out else ""
        return [
            f"epoch {epoch}: {count} samples should have been handed out{beside}, the ledger counts {tally.count}"
        ]
    if is_present and state.rotation is not None:
        expected = _lanes_between(epoch, state, state.passed(), forms)
    else:
        expected = _expected_lanes(epoch, state, end, skipped, forms)
    without = sum_ids(state.order.seed, epoch, left_out)
    if expected is not None and add_lanes(tally.lanes, without) != expected:
        return [
            f"epoch {epoch}: the count of {count} samples is right, but some were lost and others handed out twice"
        ]
    return []


def _lanes_between(epoch: int, state: LoaderState, spans: Spans, forms: ClosedForms) -> Lanes:
    total = (0, 0)
    for span in spans:
        if span[0] < span[1]:
            total = add_lanes(total, forms.between(state.order, epoch, state.sample_count, span))
    return total


def _expected_lanes(
    epoch: int, state: LoaderState, end: int, skipped: Spans, forms: ClosedForms
) -> Lanes | None:
    """Return the sum over the positions [0, end) without `skipped`; None where the order cannot be computed."""
    n, spec = state.sample_count, state.order
    if end == 0:
        return 0, 0
    minus = list(skipped)
    if 2 * end <= n or spec.kind is OrderKind.CONTINUED:
        plus = [(0, end)]
        total = (0, 0)
    else:
        plus = []
        total = forms.whole(spec.seed, epoch, n)
        if end < n:
            minus.append((end, n))
    if (plus or minus) and spec.blocks is not None and spec.blocks.runs is None:
        return None
    for span in plus:
        total = add_lanes(total, forms.between(spec, epoch, n, span))
    for span in minus:
        left, right = forms.between(spec, epoch, n, span)
        total = add_lanes(total, (-left, -right))
    return total


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
            _spans(entry.get("skipped", [])),
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


def _spans(value: object) -> Spans:
    if not isinstance(value, list | tuple) or len(cast(Sequence[object], value)) > HOLE_COUNT_MAX:
        raise LoaderStateError(f"skipped of a ledger is a list of ranges, got {shown(cast(object, value))}")
    spans: list[tuple[int, int]] = []
    for each in cast(Sequence[object], value):
        if not isinstance(each, list | tuple) or len(cast(Sequence[object], each)) != 2:
            raise LoaderStateError(
                f"skipped of a ledger is a list of ranges, got {shown(cast(object, each))}"
            )
        start, stop = cast(Sequence[object], each)
        entry: dict[str, object] = {"a": start, "b": stop}
        spans.append((_whole(entry, "a", COUNT_MAX), _whole(entry, "b", COUNT_MAX)))
    return united(spans).spans


def _lanes(value: object) -> Lanes:
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise LoaderStateError(f"sum of a ledger is 32 hex digits, got {shown(value)}")
    return int(value[:16], 16), int(value[16:], 16)
