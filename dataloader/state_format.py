"""A loader's state, `everstep-loader/1`: where an epoch stands, the same on every rank and below 1 KiB.

    {"format": "everstep-loader/1",
     "dataset": {"fingerprint": text, "n": samples},
     "order": {"algo": …, "seed": 0 … 2^64 - 1, "block": 0},
     "epoch": e, "cursor": samples handed to the loop in epoch e over all ranks, "holes": [[a, b], …]}

Plain JSON types only, so that every framework can store it. It depends on neither ranks nor workers. Keys that a
framework adds are ignored.

* `algo` is "permuted-1", "sequential-1", "blocks-1" or "continued-1" (order_format.py).
* `block` is 0 but for "blocks-1": {"window": blocks shuffled together, "runs": [[blocks, samples in each], …]}, or
  {"window", "count", "digest"} where the runs are many (block_format.py).
* `holes` are positions of epoch e that are skipped (holes_format.py); they count as passed, not as handed out.

A loader that began its epoch at another position than 0 (a SharedLoader that came late) writes
`everstep-shared-loader/1`: the same, and `"rotation": [a, m]`. It goes through the positions [a, m), then [0, a); of
these it has handed out the first `cursor`. No other loader can go on there, so none takes it.

Two more values of `algo` say that somebody else decides the order: "sampler-1" and "stream-1". There `cursor` counts
the samples of this rank alone, and `source` holds what the user's sampler or stream said of itself.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

from ..core.errors import LoaderStateError
from .block_format import RUNS_IN_STATE_MAX, BlockSpec, spec_of_runs
from .hash_format import SEED_MAX
from .holes_format import HOLE_COUNT_MAX, NO_HOLES, Holes, Spans, united
from .order_format import OrderKind, OrderSpec

STATE_FORMAT = "everstep-loader/1"
ROTATED_FORMAT = "everstep-shared-loader/1"
FINGERPRINT_CHARS_MAX = 128
COUNT_MAX = (1 << 63) - 1  # ids are int64
_HINT = "give the dict that state_dict() of this loader returned, unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """A position in the stream of samples of one dataset."""

    fingerprint: str
    sample_count: int
    order: OrderSpec
    epoch: int = 0
    cursor: int = 0
    holes: Holes = NO_HOLES
    source: Mapping[str, object] | None = None
    """What a sampler or stream of the user's said of itself; None for orders of our own."""
    rotation: tuple[int, int] | None = None
    """Where the epoch was begun, and where its end is; None: at 0."""

    def passed(self) -> Spans:
        """Return the positions of the epoch that were handed out or skipped."""
        if self.rotation is None:
            return ((0, self.cursor),)
        begin, end = self.rotation
        return ((begin, min(begin + self.cursor, end)), (0, max(0, begin + self.cursor - end)))

    def to_dict(self) -> dict[str, object]:
        """Return a fresh dict, of plain JSON types but for what a user's own object put in `source`."""
        state: dict[str, object] = {
            "format": STATE_FORMAT if self.rotation is None else ROTATED_FORMAT,
            "dataset": {"fingerprint": self.fingerprint, "n": self.sample_count},
            "order": {
                "algo": self.order.kind.value,
                "seed": self.order.seed,
                "block": 0 if self.order.blocks is None else _block_dict(self.order.blocks),
            },
            "epoch": self.epoch,
            "cursor": self.cursor,
            "holes": self.holes.to_list(),
        }
        if self.source is not None:
            state["source"] = deepcopy(dict(self.source))
        if self.rotation is not None:
            state["rotation"] = list(self.rotation)
        return state


def _block_dict(blocks: BlockSpec) -> dict[str, object]:
    if blocks.runs is not None and len(blocks.runs) <= RUNS_IN_STATE_MAX:
        return {"window": blocks.window, "runs": [list(run) for run in blocks.runs]}
    return {"window": blocks.window, "count": blocks.count, "digest": blocks.digest}


def parse_state(state: object) -> LoaderState:
    """Return the state that a dict holds; LoaderStateError names what is wrong with any other value."""
    top = _mapping(state, "the state")
    if top.get("format") not in (STATE_FORMAT, ROTATED_FORMAT):
        raise LoaderStateError(
            f"a loader state has the format {STATE_FORMAT!r}, got {shown(top.get('format'))}", hint=_HINT
        )
    dataset, order = _mapping(top.get("dataset"), "dataset"), _mapping(top.get("order"), "order")
    kind = _kind(order.get("algo"))
    sample_count = _whole(dataset.get("n"), "dataset.n", COUNT_MAX)
    return LoaderState(
        fingerprint=_text(dataset.get("fingerprint"), "dataset.fingerprint"),
        sample_count=sample_count,
        order=OrderSpec(
            kind=kind,
            seed=_whole(order.get("seed"), "order.seed", SEED_MAX),
            blocks=_blocks(order.get("block"), kind, sample_count),
        ),
        epoch=_whole(top.get("epoch"), "epoch", COUNT_MAX),
        cursor=_whole(top.get("cursor"), "cursor", sample_count if kind.is_numbered else COUNT_MAX),
        holes=_holes(top.get("holes"), kind, sample_count),
        source=None if kind.is_numbered else _source(top.get("source")),
        rotation=_rotation(top, sample_count) if top.get("format") == ROTATED_FORMAT else None,
    )


def _rotation(top: Mapping[str, object], sample_count: int) -> tuple[int, int]:
    pair = top.get("rotation")
    ((begin, end),) = _pairs([pair], "rotation", 1)
    is_within = 0 < begin < end <= sample_count and _whole(top.get("cursor"), "cursor", sample_count) <= end
    if not is_within or top.get("holes") != []:
        raise LoaderStateError(
            f"rotation [{begin}, {end}] does not fit {sample_count} samples, or there are holes", hint=_HINT
        )
    return begin, end


def check_fit(state: LoaderState, here: LoaderState) -> None:
    """Return if a state is of the dataset and the order that `here` describes, whatever the seed.

    Raises:
        LoaderStateError: another dataset, another kind of order, or other blocks.
    """
    if (state.fingerprint, state.sample_count) != (here.fingerprint, here.sample_count):
        raise LoaderStateError(
            f"the state belongs to dataset {state.fingerprint!r} with {state.sample_count} samples, "
            f"this loader has {here.fingerprint!r} with {here.sample_count}",
            hint="give the dataset that the checkpoint was made with, or start without the loader's state",
        )
    if state.order.kind is not here.order.kind:
        raise LoaderStateError(
            f"the state has order {state.order.kind.value!r}, this loader {here.order.kind.value!r}",
            hint="construct the loader with the same shuffle= or sampler= as before",
        )
    if state.rotation is not None and here.rotation is None:
        raise LoaderStateError(
            f"the state is of a SharedLoader that began its epoch at sample {state.rotation[0]}",
            hint="load it into a SharedLoader, or take a state at the end of an epoch",
        )
    theirs, ours = state.order.blocks, here.order.blocks
    if theirs is not None and ours is not None and not ours.is_like(theirs):
        raise LoaderStateError(
            f"the state has windows of {theirs.window} out of {theirs.count} blocks (digest {theirs.digest}), this "
            f"loader {ours.window} out of {ours.count} (digest {ours.digest})",
            hint="construct the loader with the same blocks and window= as before",
        )


def _source(value: object) -> dict[str, object]:
    try:
        return deepcopy(dict(_mapping(value, "source")))
    except RecursionError:
        raise LoaderStateError("source of a loader state is nested too deeply", hint=_HINT) from None


def _blocks(value: object, kind: OrderKind, sample_count: int) -> BlockSpec | None:
    if kind is not OrderKind.BLOCKS:
        if value != 0:
            raise LoaderStateError(
                f"order.block is {shown(value)}, expected 0 for {kind.value!r}",
                hint="upgrade everstep, or " + _HINT,
            )
        return None
    block = _mapping(value, "order.block")
    window = _whole(block.get("window"), "order.block.window", COUNT_MAX, least=1)
    if "runs" not in block:
        return BlockSpec(
            window=window,
            count=_whole(block.get("count"), "order.block.count", COUNT_MAX),
            digest=_text(block.get("digest"), "order.block.digest"),
            runs=None,
        )
    runs = _pairs(block["runs"], "order.block.runs", RUNS_IN_STATE_MAX)
    blocks = spec_of_runs(tuple(runs), window)
    if blocks.sample_count != sample_count:
        raise LoaderStateError(
            f"order.block.runs hold {shown(blocks.sample_count)} samples, the dataset {sample_count}",
            hint=_HINT,
        )
    return blocks


def _holes(value: object, kind: OrderKind, sample_count: int) -> Holes:
    spans = _pairs(value, "holes", HOLE_COUNT_MAX)
    for start, stop in spans:
        if not start < stop <= sample_count or not kind.is_numbered:
            raise LoaderStateError(
                f"a hole is a range [a, b) of positions with 0 <= a < b <= {sample_count if kind.is_numbered else 0}, "
                f"got [{start}, {stop}]",
                hint="everstep.dataloader.skip(state, a, b) makes one",
            )
    return united(spans)


def _pairs(value: object, name: str, most: int) -> list[tuple[int, int]]:
    if not isinstance(value, list | tuple) or len(cast(Sequence[object], value)) > most:
        text = shown(cast(object, value))
        raise LoaderStateError(f"{name} is a list of at most {most} pairs, got {text}", hint=_HINT)
    pairs: list[tuple[int, int]] = []
    for pair in cast(Sequence[object], value):
        if not isinstance(pair, list | tuple) or len(cast(Sequence[object], pair)) != 2:
            text = shown(cast(object, pair))
            raise LoaderStateError(f"{name} is a list of pairs, got {text} in it", hint=_HINT)
        first, second = cast(Sequence[object], pair)
        pairs.append((_whole(first, name, COUNT_MAX), _whole(second, name, COUNT_MAX)))
    return pairs


def short_fingerprint(text: str) -> str:
    """Return `text`, or its 128-bit digest where it is too long for a state below 1 KiB."""
    if len(text) <= FINGERPRINT_CHARS_MAX and text.isprintable() and text.isascii():
        return text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise LoaderStateError(f"{name} of a loader state is a dict, got {shown(value)}", hint=_HINT)
    return cast(Mapping[str, object], value)


def _whole(value: object, name: str, most: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise LoaderStateError(
            f"{name} is a whole number from {least} to {most}, got {shown(value)}", hint=_HINT
        )
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise LoaderStateError(f"{name} is a text, got {shown(value)}", hint=_HINT)
    return value


def _kind(value: object) -> OrderKind:
    for kind in OrderKind:
        if value == kind.value:
            return kind
    known = ", ".join(kind.value for kind in OrderKind)
    raise LoaderStateError(f"order.algo is one of {known}, got {shown(value)}", hint="upgrade everstep")


def shown(value: object) -> str:
    """Return a short text for an error message, however large or hostile the value."""
    if isinstance(value, str):
        return repr(value[:80])
    if value is None or (isinstance(value, int) and value.bit_length() <= 128):
        return repr(value)
    return f"a value of type {type(value).__name__}"
