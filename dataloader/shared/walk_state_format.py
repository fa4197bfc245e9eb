"""The state of a SharedLoader: a loader's state, and where the walk through the epoch began.

    {… as `everstep-loader/1` …, "shared": {"batch_size": n, "drop_last": bool, "start": b, "taken": batches}}

Unless the job joined late and began in mid-epoch (`start` > 0), it is a state of `everstep-loader/1` that a DataLoader
takes, too, and a DataLoader's state is one of this loader if it stands between two batches. With `start` > 0 the
format is `everstep-shared-loader/1`, since a cursor does not tell what was handed out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ...core.errors import LoaderStateError
from ..state_format import STATE_FORMAT, LoaderState, parse_state, shown
from .walk_plan import BatchCut

SHARED_FORMAT = "everstep-shared-loader/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkState:
    """A position in the walk of a job."""

    loader: LoaderState
    cut: BatchCut
    start: int
    taken: int

    def to_dict(self) -> dict[str, object]:
        """Return a fresh dict of plain JSON types."""
        state = self.loader.to_dict()
        state["format"] = STATE_FORMAT if self.start == 0 else SHARED_FORMAT
        state["shared"] = {
            "batch_size": self.cut.batch_size,
            "drop_last": self.cut.drop_last,
            "start": self.start,
            "taken": self.taken,
        }
        return state


def samples_taken(cut: BatchCut, start: int, taken: int) -> int:
    """Return how many samples the first `taken` batches from `start` on have."""
    count = cut.batch_count
    missing_in_last = cut.batch_size - cut.size(count - 1) if count else 0
    has_last = start + taken >= count and taken > 0
    return taken * cut.batch_size - (missing_in_last if has_last else 0)


def parse_walk_state(state: object, cut: BatchCut) -> WalkState:
    """Return the state that a dict holds, for a loader that cuts epochs like `cut`; LoaderStateError otherwise."""
    if not isinstance(state, Mapping):
        raise LoaderStateError(f"a loader state is a dict, got {shown(state)}")
    top = dict(cast(Mapping[str, object], state))
    is_rotated = top.get("format") == SHARED_FORMAT
    loader = parse_state(top | {"format": STATE_FORMAT} if is_rotated else top)
    shared = top.get("shared")
    if shared is None and not is_rotated:
        return _of_loader(loader, cut)
    if not isinstance(shared, Mapping):
        raise LoaderStateError(f"shared of a loader state is a dict, got {shown(shared)}")
    values = cast(Mapping[str, object], shared)
    for name, ours in (("batch_size", cut.batch_size), ("drop_last", cut.drop_last)):
        if values.get(name) != ours:
            raise LoaderStateError(
                f"the state was made with {name}={shown(values.get(name))}, this loader has {ours}",
                hint=f"construct the loader with the same {name}",
            )
    start, taken = _whole(values, "start", cut.batch_count), _whole(values, "taken", cut.batch_count)
    if (start == 0) is is_rotated or samples_taken(cut, start, taken) != loader.cursor:
        raise LoaderStateError(
            f"cursor {loader.cursor} does not fit start {start} and taken {taken}",
            hint="give the dict that state_dict() of this loader returned, unchanged",
        )
    return WalkState(loader=loader, cut=cut, start=start, taken=taken)


def _of_loader(loader: LoaderState, cut: BatchCut) -> WalkState:
    """Return the state of a DataLoader as one of this loader."""
    taken = -(-loader.cursor // cut.batch_size)
    if taken > cut.batch_count or samples_taken(cut, 0, taken) != loader.cursor:
        raise LoaderStateError(
            f"the state stands at sample {loader.cursor}, which is not between two batches of {cut.batch_size}",
            hint="batches are shared whole: take a state at a multiple of the batch size",
        )
    return WalkState(loader=loader, cut=cut, start=0, taken=taken)


def _whole(values: Mapping[str, object], name: str, most: int) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise LoaderStateError(f"shared.{name} is a whole number from 0 to {most}, got {shown(value)}")
    return value
