"""Which positions of an epoch one rank gets at each step: plain arithmetic on a cursor, with no memory of its own.

The stream of an epoch is one for all ranks. A step takes the next `batch_size * world_size` positions and cuts them
into one contiguous part per rank, whose sizes differ by at most one. The next step begins where this one ended, so a
cursor (samples handed out so far, over all ranks) is the whole state, and any number of ranks can go on from it.

Holes (holes_format.py) are left out of the stream: cursors are positions and leap over holes; the shares that are dealt
out are turns, the numbers of the samples in the stream without holes.

Only the end of an epoch can be short. DDP averages the ranks' mean gradients, which is biased when parts
differ, and a rank without a batch breaks BatchNorm and hangs collectives. `Uneven` is the caller's choice:

* WEIGHT (default): nothing is lost; `Part.weight` times the rank's mean loss makes DDP's mean exact. A rank without a
  sample repeats one with weight 0: that is padding, and the ledger counts it apart.
* STEP: as WEIGHT, but the samples that cannot be shared evenly (fewer than there are ranks) come in a step of their
  own, the last one. So all ranks have batches of one size at each step, as gathering them asks for.
* DROP: the samples that cannot be shared evenly (fewer than there are ranks) are left out and recorded as dropped.
* ERROR: refused before the epoch begins, for who wants neither.
"""

from dataclasses import dataclass
from enum import Enum

from .holes_format import NO_HOLES, Holes


class Uneven(Enum):
    """What to do with an end of an epoch that cannot be shared evenly."""

    WEIGHT = "weight"
    STEP = "step"
    DROP = "drop"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of one step: turns [start, stop), or a repeated turn if `is_padding`; cursors are positions."""

    cursor: int
    next_cursor: int
    start: int
    stop: int
    weight: float
    is_padding: bool

    def __post_init__(self) -> None:
        assert self.start < self.stop, self
        assert self.cursor + (self.stop - self.start) <= self.next_cursor, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the stream of an epoch of `sample_count` samples is cut for one rank."""

    sample_count: int
    batch_size: int
    rank: int
    world_size: int
    uneven: Uneven = Uneven.WEIGHT
    drop_last: bool = False
    holes: Holes = NO_HOLES

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.world_size or self.sample_count < 0:
            raise ValueError(f"not a split: {self}")

    @property
    def step_size(self) -> int:
        """Samples of a full step, over all ranks."""
        return self.batch_size * self.world_size

    def part(self, cursor: int) -> Part | None:
        """Return this rank's share of the step at `cursor`, or None when the epoch is over; the same on all ranks."""
        turn = self.holes.turns_before(cursor)
        total = self._step_total(turn)
        if total == 0:
            return None
        small, bigger_count = divmod(total, self.world_size)
        count = small + (self.rank < bigger_count)
        start = turn + self.rank * small + min(self.rank, bigger_count)
        if count == 0:
            # only where total < world_size; which sample is repeated does not matter, its weight is 0
            start = turn + self.rank % total
        return Part(
            cursor=cursor,
            next_cursor=self.holes.leap(self.holes.position_of(turn + total - 1) + 1),
            start=start,
            stop=start + max(1, count),
            weight=self.world_size * count / total,
            is_padding=count == 0,
        )

    def step_count(self, cursor: int = 0) -> int:
        """Return how many steps are left from `cursor`; the same on all ranks."""
        full, rest = divmod(self._left(self.holes.turns_before(cursor)), self.step_size)
        short = self._short_total(rest)
        return full + (short > 0) + (self.uneven is Uneven.STEP and 0 < short < rest)

    def uneven_rest(self, cursor: int = 0) -> int:
        """Return the size of the last step if its parts would differ, else 0: what `Uneven.ERROR` refuses."""
        rest = self._left(self.holes.turns_before(cursor)) % self.step_size
        return 0 if self.drop_last or rest % self.world_size == 0 else rest

    def _left(self, turn: int) -> int:
        return max(0, self.holes.turns_before(self.sample_count) - turn)

    def _step_total(self, turn: int) -> int:
        left = self._left(turn)
        return self.step_size if left >= self.step_size else self._short_total(left)

    def _short_total(self, rest: int) -> int:
        if self.drop_last:
            return 0
        even = rest - rest % self.world_size
        if self.uneven is Uneven.DROP:
            return even
        return even or rest if self.uneven is Uneven.STEP else rest
