"""Holes: positions of an epoch that are skipped on purpose; plain Python.

Whoever saw the loss jump at a step knows which *positions* that step took, for the cursor counts them: a step of 128
samples at cursor 10,112 took [10,112, 10,240). So holes are half-open ranges of positions, in the epoch that the state
is in, and end with it. The stream closes over a hole: batches stay whole, the epoch is shorter. A `turn` is the number
of a sample in the stream without holes; without any, turns are positions.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import cast

from ..core.errors import LoaderStateError

HOLE_COUNT_MAX = 1024

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Holes:
    """Disjoint ranges [start, stop) of positions, ascending, never touching each other."""

    spans: Spans = ()
    first_turns: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Of each hole, the turn of the first sample behind it."""
    skipped: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Positions in the first 0, 1, 2, … holes."""

    def __post_init__(self) -> None:
        skipped = tuple(accumulate((stop - start for start, stop in self.spans), initial=0))
        first_turns = tuple(start - before for (start, _), before in zip(self.spans, skipped, strict=False))
        assert all(left < right for left, right in pairwise(first_turns)), self.spans
        object.__setattr__(self, "skipped", skipped)
        object.__setattr__(self, "first_turns", first_turns)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def turns_before(self, position: int) -> int:
        """Return how many positions before this one are in no hole."""
        index = bisect_right(self.spans, (position, -1))
        inside = 0 if index == 0 else max(0, self.spans[index - 1][1] - position)
        return position - self.skipped[index] + inside

    def position_of(self, turn: int) -> int:
        """Return the position of the sample with this turn."""
        return turn + self.skipped[bisect_right(self.first_turns, turn)]

    def leap(self, position: int) -> int:
        """Return the first position from this one on that is in no hole."""
        return self.position_of(self.turns_before(position))

    def between(self, start: int, stop: int) -> Spans:
        """Return the parts of holes that lie in [start, stop)."""
        cut = ((max(a, start), min(b, stop)) for a, b in self.spans)
        return tuple((a, b) for a, b in cut if a < b)

    def to_list(self) -> list[list[int]]:
        """Return a fresh list of plain JSON types."""
        return [list(span) for span in self.spans]


NO_HOLES = Holes()


def united(spans: Iterable[tuple[int, int]]) -> Holes:
    """Return the union of these ranges, in any order, overlapping or not."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif start < stop:
            joined.append((start, stop))
    return Holes(tuple(joined))


def skip(state: Mapping[str, object], start: int, stop: int) -> dict[str, object]:
    """Return a copy of a loader state that skips the positions [start, stop) of its epoch.

    `loader.span` says which positions a step took: log it beside the loss. The samples are counted in the ledger as
    skipped on purpose, so that `everstep verify --ledger` still proves all others.

        loader.load_state_dict(skip(state, 10_000, 10_200))  # before the first iter()

    Raises:
        LoaderStateError: not a state, not a range of its epoch, or some of it was handed out before.
    """
    from .state_format import parse_state  # noqa: PLC0415  it needs the holes above

    known = parse_state(state)
    if not known.order.kind.is_numbered:
        raise LoaderStateError(
            f"order {known.order.kind.value!r} is not everstep's own: its positions cannot be skipped",
            hint="leave the samples out in your sampler or stream",
        )
    if known.rotation is not None:
        raise LoaderStateError(
            f"the state began its epoch at sample {known.rotation[0]}: its positions cannot be skipped",
            hint="take a state at the end of an epoch",
        )
    if not known.cursor <= start < stop <= known.sample_count:
        raise LoaderStateError(
            f"cannot skip [{start}, {stop}): epoch {known.epoch} stands at {known.cursor} of {known.sample_count}",
            hint="skip positions of the epoch that the state is in, from its cursor on; use an older state for others",
        )
    holes = united([*known.holes.spans, (start, stop)])
    return {**state, "holes": cast(object, holes.to_list())}
