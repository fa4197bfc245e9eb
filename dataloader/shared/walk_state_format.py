"""The state of a SharedLoader: a loader's state, and how its epochs are cut into batches.

    {… as state_format.py has it …, "shared": {"batch_size": n, "drop_last": bool, "start": b, "taken": batches}}

`start` is the batch at which the epoch was begun: not 0 only where the job joined late with `join="rotate"`. Else it is
a state that a DataLoader takes, too, and a DataLoader's state is one of this loader if it stands between two batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ...core.errors import LoaderStateError
from ..state_format import LoaderState, parse_state, shown
from .walk_plan import BatchCut, Walk

_HINT = "give the dict that state_dict() of this loader returned, unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkState:
    """A position in the walk of a job."""

    loader: LoaderState
    walk: Walk

    def to_dict(self) -> dict[str, object]:
        """Return a fresh dict of plain JSON types."""
        cut = self.walk.cut
        return self.loader.to_dict() | {
            "shared": {
                "batch_size": cut.batch_size,
                "drop_last": cut.drop_last,
                "start": self.walk.start,
                "taken": self.walk.taken,
            }
        }


def rotation_of(walk: Walk) -> tuple[int, int] | None:
    """Return where a walk began its epoch and where that ends, in positions; None where it began at 0."""
    if walk.start == 0:
        return None
    cut = walk.cut
    return walk.start * cut.batch_size, min(cut.sample_count, cut.batch_count * cut.batch_size)


def parse_walk_state(state: object, cut: BatchCut) -> WalkState:
    """Return the state that a dict holds, for a loader that cuts epochs like `cut`; LoaderStateError otherwise."""
    loader = parse_state(state)
    shared = cast(Mapping[str, object], state).get("shared")
    if loader.holes:
        raise LoaderStateError(
            f"the state skips the positions {loader.holes.to_list()}, and jobs share whole batches",
            hint="load it into an everstep.DataLoader for the rest of this epoch",
        )
    if shared is None and loader.rotation is None:
        walk = _between_batches(loader, cut)
    elif isinstance(shared, Mapping):
        walk = _walk(cast(Mapping[str, object], shared), loader.epoch, cut)
    else:
        raise LoaderStateError(f"shared of a loader state is a dict, got {shown(shared)}", hint=_HINT)
    if walk.samples_taken != loader.cursor or rotation_of(walk) != loader.rotation:
        raise LoaderStateError(
            f"cursor {loader.cursor} does not fit start {walk.start} and taken {walk.taken}", hint=_HINT
        )
    return WalkState(loader=loader, walk=walk)


def _walk(shared: Mapping[str, object], epoch: int, cut: BatchCut) -> Walk:
    for name, ours in (("batch_size", cut.batch_size), ("drop_last", cut.drop_last)):
        if shared.get(name) != ours:
            raise LoaderStateError(
                f"the state was made with {name}={shown(shared.get(name))}, this loader has {ours}",
                hint=f"construct the loader with the same {name}",
            )
    start, taken = _whole(shared, "start", cut.batch_count), _whole(shared, "taken", cut.batch_count)
    return Walk(cut=cut, epoch=epoch, start=start, taken=taken)


def _between_batches(loader: LoaderState, cut: BatchCut) -> Walk:
    """Return the walk of which a DataLoader's state says how far it is."""
    taken = -(-loader.cursor // cut.batch_size)
    walk = Walk(cut=cut, epoch=loader.epoch, taken=min(taken, cut.batch_count))
    if walk.samples_taken != loader.cursor:
        raise LoaderStateError(
            f"the state stands at sample {loader.cursor}, which is not between two batches of {cut.batch_size}",
            hint="batches are shared whole: take a state at a multiple of the batch size",
        )
    return walk


def _whole(values: Mapping[str, object], name: str, most: int) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise LoaderStateError(f"shared.{name} is a whole number from 0 to {most}, got {shown(value)}")
    return value
