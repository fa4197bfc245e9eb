"""A loader's state, `everstep-loader/1`: where an epoch stands, the same on every rank and below 1 KiB.

    {"format": "everstep-loader/1",
     "dataset": {"fingerprint": text, "n": samples},
     "order": {"algo": "permuted-1" | "sequential-1", "seed": 0 … 2^64 - 1, "block": 0},
     "epoch": e, "cursor": samples handed to the loop in epoch e over all ranks, "holes": []}

Plain JSON types only, so that every framework can store it. It depends on neither ranks nor workers. Keys that a
framework adds are ignored. `block` (two-level shuffles) and `holes` (positions that are to be skipped) are part of
the format; this version writes no others than 0 and [] and refuses them, rather than to hand out the wrong samples.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ..core.errors import LoaderStateError
from .hash_format import SEED_MAX
from .order_format import OrderKind, OrderSpec

STATE_FORMAT = "everstep-loader/1"
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

    def to_dict(self) -> dict[str, object]:
        """Return a fresh dict of plain JSON types."""
        return {
            "format": STATE_FORMAT,
            "dataset": {"fingerprint": self.fingerprint, "n": self.sample_count},
            "order": {"algo": self.order.kind.value, "seed": self.order.seed, "block": 0},
            "epoch": self.epoch,
            "cursor": self.cursor,
            "holes": [],
        }


def parse_state(state: object) -> LoaderState:
    """Return the state that a dict holds; LoaderStateError names what is wrong with any other value."""
    top = _mapping(state, "the state")
    if top.get("format") != STATE_FORMAT:
        raise LoaderStateError(
            f"a loader state has the format {STATE_FORMAT!r}, got {shown(top.get('format'))}", hint=_HINT
        )
    dataset, order = _mapping(top.get("dataset"), "dataset"), _mapping(top.get("order"), "order")
    if order.get("block") != 0 or top.get("holes") != []:
        raise LoaderStateError(
            f"order.block is {shown(order.get('block'))} and holes is {shown(top.get('holes'))}, expected 0 and []",
            hint="block shuffles and holes need a newer version of everstep",
        )
    sample_count = _whole(dataset.get("n"), "dataset.n", COUNT_MAX)
    return LoaderState(
        fingerprint=_text(dataset.get("fingerprint"), "dataset.fingerprint"),
        sample_count=sample_count,
        order=OrderSpec(
            kind=_kind(order.get("algo")), seed=_whole(order.get("seed"), "order.seed", SEED_MAX)
        ),
        epoch=_whole(top.get("epoch"), "epoch", COUNT_MAX),
        cursor=_whole(top.get("cursor"), "cursor", sample_count),
    )


def short_fingerprint(text: str) -> str:
    """Return `text`, or its 128-bit digest where it is too long for a state below 1 KiB."""
    if len(text) <= FINGERPRINT_CHARS_MAX and text.isprintable() and text.isascii():
        return text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise LoaderStateError(f"{name} of a loader state is a dict, got {shown(value)}", hint=_HINT)
    return cast(Mapping[str, object], value)


def _whole(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise LoaderStateError(f"{name} is a whole number from 0 to {most}, got {shown(value)}", hint=_HINT)
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
