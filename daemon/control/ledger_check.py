"""The exactly-once proof of a checkpoint: finds the ledgers in the shards' values and compares their sum; no numpy.

The daemon only finds them (find_loaders); summing is work for the command that asks (check_loaders): about 1 µs for
each sample of each epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from ...checkpoint.value_format import decode_value, load_values
from ...core.errors import EverstepError
from ...dataloader.ledger_format import LEDGER_FORMAT, ledger_problems, unproven
from ...dataloader.left_out_format import LeftOut, find_left_out
from ...dataloader.state_format import ROTATED_FORMAT, STATE_FORMAT, LoaderState, parse_state
from .views import CheckpointView, LoaderRecord

LEDGER_KEY = "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerVerdict:
    """What the ledgers of one loader, of all ranks, prove."""

    place: str
    """Name of the loader in the state."""
    position: str
    """How far the loader is, for people."""
    missing_ranks: tuple[int, ...]
    """Ranks whose ledgers are not here: then nothing is proven, for better or worse."""
    problems: tuple[str, ...]
    """What contradicts that each sample was handed out exactly once."""
    left_out: tuple[LeftOut, ...] = ()
    """What was not handed out, by epoch: "each sample" means the dataset less this."""
    unproven: str = ""
    """What ledgers cannot prove for a loader of this kind, a sentence."""

    @property
    def is_proven(self) -> bool:
        """Tell whether each sample, but for `left_out`, was handed out exactly once."""
        return not self.missing_ranks and not self.problems and not self.unproven


def find_loaders(rank: int, values: bytes) -> list[LoaderRecord]:
    """Return what the values of one shard's manifest say of the data that its rank handed out.

    A loader's state is any object with a key `ledger` that holds a ledger; the position stands in the same object or
    in one right below it.

    Raises:
        CorruptDataError: the values are not JSON.
    """
    if LEDGER_FORMAT.encode() not in values:
        return []
    return [
        LoaderRecord(
            rank=rank,
            place=place.removesuffix(".state"),
            ledger=holder[LEDGER_KEY],
            state=_position_beside(holder),
        )
        for place, holder in _objects(load_values(values))
        if _format_of(holder.get(LEDGER_KEY)) == LEDGER_FORMAT
    ]


def check_loaders(summary: CheckpointView, records: Sequence[LoaderRecord]) -> list[LedgerVerdict]:
    """Return a verdict for each loader of the checkpoint; none when no loader kept a ledger."""
    by_place: dict[str, list[LoaderRecord]] = {}
    for record in records:
        by_place.setdefault(record.place, []).append(record)
    return [_check(summary, place, found) for place, found in sorted(by_place.items())]


def _check(summary: CheckpointView, place: str, records: Sequence[LoaderRecord]) -> LedgerVerdict:
    state = records[0].state
    missing = set(range(summary.world_size)) - {record.rank for record in records}
    problems: list[str] = []
    left_out: list[LeftOut] = []
    known = _known(state)
    is_shared = known is None or known.order.kind.is_numbered
    if is_shared and any(record.state != state for record in records):
        problems = ["the ranks' loaders do not stand at the same position"]
    elif not missing:
        try:
            ledgers = [decode_value(record.ledger) for record in records]
            problems = ledger_problems(ledgers, decode_value(state))
            left_out = find_left_out(ledgers, decode_value(state))
        except EverstepError as error:
            problems = [str(error)]
    return LedgerVerdict(
        place=place,
        position=_position_text(state),
        missing_ranks=tuple(sorted(missing)),
        problems=tuple(problems),
        left_out=tuple(left_out),
        unproven="" if known is None else unproven(known),
    )


def _known(state: object) -> LoaderState | None:
    try:
        return parse_state(decode_value(state))
    except EverstepError:
        return None


def _position_text(state: object) -> str:
    known = _known(state)
    if known is None:
        return "unknown"
    if not known.order.kind.is_numbered:
        return f"epoch {known.epoch}, {known.cursor} samples of rank 0"
    return f"epoch {known.epoch}, {known.cursor} of {known.sample_count} samples"


def _objects(document: object) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield every JSON object with the dotted path to it; a stack, because the depth is the writer's choice."""
    waiting: list[tuple[str, object]] = [("", document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            mapping = cast(dict[str, object], value)
            yield path, mapping
            waiting += [(f"{path}.{key}" if path else key, item) for key, item in mapping.items()]
        elif isinstance(value, list):
            items = cast(list[object], value)
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(items)]


def _position_beside(holder: dict[str, object]) -> object:
    formats = (STATE_FORMAT, ROTATED_FORMAT)
    if _format_of(holder) in formats:
        return {key: value for key, value in holder.items() if key != LEDGER_KEY}
    return next((value for value in holder.values() if _format_of(value) in formats), None)


def _format_of(value: object) -> object:
    return cast(dict[str, object], value).get("format") if isinstance(value, dict) else None
