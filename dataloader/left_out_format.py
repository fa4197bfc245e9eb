"""What an epoch did not hand out, by name: with it the ledger's proof reads "the dataset, less this"; plain Python.

Quarantined samples are named by their ids, which the ledger lists. Holes and the end that was dropped are positions,
whose ids follow from the order; above 65,536 samples 10 µs each. Of many only the first are named; all are counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

from .holes_format import Spans
from .ledger_format import LedgerRecord, Tally, merge_records, parse_ledger
from .order_format import ids_between
from .state_format import LoaderState, parse_state

NAMED_MAX = 100
"""Ids that are named of each kind in each epoch."""

EPOCHS_MAX = 100
"""Epochs that are listed, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Samples: how many, and the ids of the first of them. No ids where the order is not known here."""

    count: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What one epoch did not hand out with a weight of its own."""

    epoch: int
    quarantined: Named = field(default_factory=Named)
    """Workers died while they read these."""

    skipped: Named = field(default_factory=Named)
    """Passed over on purpose: the holes of a state."""

    skipped_positions: Spans = ()
    dropped: Named = field(default_factory=Named)
    """The end of an epoch, by `drop_last` or `uneven="drop"`."""

    padding_count: int = 0
    """Samples that came once more, with weight 0, at an uneven end or in the place of an empty batch."""

    @property
    def is_less(self) -> bool:
        """Whether some sample was not handed out; else some came once more, without a weight."""
        return bool(self.quarantined.count or self.skipped.count or self.dropped.count)

    def sentences(self) -> list[str]:
        """Return what there is to say, for people."""
        said: list[str] = []
        if self.quarantined.count:
            said.append(f"less {_samples(self.quarantined, 'quarantined')}")
        if self.skipped.count:
            where = ", ".join(f"[{start}, {stop})" for start, stop in self.skipped_positions[:8])
            more = ", …" if len(self.skipped_positions) > 8 else ""
            said.append(f"less {_samples(self.skipped, 'skipped')}, positions {where}{more}")
        if self.dropped.count:
            said.append(f"less {_samples(self.dropped, 'dropped at the end')}")
        if self.padding_count:
            said.append(f"{self.padding_count} repeated with weight 0")
        return [f"epoch {self.epoch}: {each}" for each in said]


def find_left_out(ledgers: Iterable[object], loader_state: object) -> list[LeftOut]:
    """Return what the epochs left out, by the ledgers of *all* ranks and the state that any of them holds; ascending.

    Raises:
        LoaderStateError: a ledger or the state is not of the known format, or seeds differ.
    """
    state = parse_state(loader_state)
    total = merge_records(state.order.seed, [parse_ledger(each) for each in ledgers])
    return list(reversed(list(islice(_each(total, state), EPOCHS_MAX))))


def _each(total: LedgerRecord, state: LoaderState) -> Iterable[LeftOut]:
    for epoch, tally in sorted(total.tallies.items(), reverse=True):
        found = _left_out(epoch, tally, state)
        if found != LeftOut(epoch=epoch):
            yield found


def _left_out(epoch: int, tally: Tally, state: LoaderState) -> LeftOut:
    end = state.sample_count
    dropped: Spans = ((max(0, end - tally.dropped_count), end),) if tally.dropped_count else ()
    quarantined = tuple(dict.fromkeys(tally.quarantined))
    return LeftOut(
        epoch=epoch,
        quarantined=Named(count=len(quarantined), ids=quarantined[:NAMED_MAX]),
        skipped=_named(epoch, tally.skipped, state),
        skipped_positions=tally.skipped,
        dropped=_named(epoch, dropped, state),
        padding_count=tally.padding_count,
    )


def _named(epoch: int, spans: Spans, state: LoaderState) -> Named:
    spec = state.order
    is_known = spec.kind.is_numbered and (spec.blocks is None or spec.blocks.runs is not None)
    ids = chain.from_iterable(ids_between(spec, epoch, state.sample_count, span) for span in spans)
    return Named(
        count=sum(stop - start for start, stop in spans),
        ids=tuple(islice(ids, NAMED_MAX)) if is_known else (),
    )


def _samples(named: Named, what: str) -> str:
    noun = "sample" if named.count == 1 else "samples"
    if not named.ids:
        return f"{named.count} {noun} {what}"
    more = "" if len(named.ids) == named.count else f", … {named.count} in all"
    return f"{noun} {', '.join(map(str, named.ids))}{more} {what}"
