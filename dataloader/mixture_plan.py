"""Which dataset of a weighted mixture gives the sample at each position: a fixed schedule, plain Python.

Weights become whole numbers whose sum is the period of the schedule. Within it the k-th sample of a dataset of weight
w has to come after k period / w samples of the mixture and before (k + 1) period / w (rounded outwards), and of those
that may come the one whose time is up first does. Earliest deadline first meets every deadline when deadlines can be
met at all (Liu and Layland 1973), and here they can: after any number of samples each dataset has given its exact
share, rounded up or down, where random draws would be off by the square root.

Everything is arithmetic on one period, at most 65,536 slots long: position -> (dataset, how many it gave before), and
back, at any position of an endless stream.
"""

import heapq
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..core.errors import UsageError

PERIOD_MAX = 1 << 16
_DENOMINATOR_MAX = 1 << 12


def whole_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Return whole weights in the same proportions, with a sum of at most 65,536.

    Fractions that a float can only come near (1/3) are recognised. Proportions that need a longer period are rounded
    to 1/65,536, largest remainders first, and no dataset below one slot.
    """
    for weight in weights:
        if isinstance(weight, bool) or not math.isfinite(weight) or weight <= 0:
            raise UsageError(
                f"a weight is a number above 0, got {weight!r}", hint="leave out what is not wanted"
            )
    if not 0 < len(weights) <= PERIOD_MAX // 2:
        raise UsageError(f"a mixture has 1 to {PERIOD_MAX // 2} datasets, got {len(weights)}")
    exact = [_recognised(weight) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    divisor = math.gcd(*whole)
    whole = [each // divisor for each in whole]
    return tuple(whole) if sum(whole) <= PERIOD_MAX else _rounded(whole)


def _recognised(weight: float | Fraction) -> Fraction:
    exact = Fraction(weight)
    near = exact.limit_denominator(_DENOMINATOR_MAX)
    return near if float(near) == float(exact) else exact


def _rounded(weights: Sequence[int]) -> tuple[int, ...]:
    """Return shares of 65,536 slots by largest remainders; at least one slot each."""
    total, slots = sum(weights), PERIOD_MAX - len(weights)
    shares = [divmod(weight * slots, total) for weight in weights]
    left = slots - sum(share for share, _ in shares)
    by_remainder = sorted(range(len(weights)), key=lambda index: (-shares[index][1], index))
    favoured = set(by_remainder[:left])
    return tuple(1 + share + (index in favoured) for index, (share, _) in enumerate(shares))


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample of a mixture: the `count`-th, from 0, that the dataset with this index gives."""

    dataset_index: int
    count: int


class Schedule:
    """The endless sequence of datasets that whole weights lead to."""

    def __init__(self, weights: Sequence[int]) -> None:
        assert weights, weights
        assert min(weights) > 0, weights
        self.weights = tuple(weights)
        self.period = sum(weights)
        self._choices = _earliest_deadline_first(self.weights, self.period)
        self._slots = [array("L", ()) for _ in weights]
        """Per dataset the places in the period where it comes."""
        for place, index in enumerate(self._choices):
            self._slots[index].append(place)
        assert tuple(len(slots) for slots in self._slots) == self.weights

    def at(self, position: int) -> Draw:
        """Return what stands at a position of the mixture."""
        cycle, place = divmod(position, self.period)
        index = self._choices[place]
        return Draw(index, cycle * self.weights[index] + bisect_left(self._slots[index], place))

    def position_of(self, draw: Draw) -> int:
        """Return the position of one draw: the inverse of `at`."""
        cycle, rest = divmod(draw.count, self.weights[draw.dataset_index])
        return cycle * self.period + self._slots[draw.dataset_index][rest]

    def counts_before(self, position: int) -> tuple[int, ...]:
        """Return how many samples each dataset has given before a position."""
        cycle, place = divmod(position, self.period)
        return tuple(
            cycle * weight + bisect_left(slots, place)
            for weight, slots in zip(self.weights, self._slots, strict=True)
        )


def _earliest_deadline_first(weights: Sequence[int], period: int) -> "array[int]":
    choices = array("H")
    waiting = [(0, index, 0) for index in range(len(weights))]  # (first slot allowed, dataset, count)
    ready: list[tuple[int, int, int]] = []  # (slot that must not be reached, dataset, count)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, index, count = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(count + 1) * period // weights[index]), index, count))
        deadline, index, count = heapq.heappop(ready)
        assert place < deadline, (weights, place)
        choices.append(index)
        if count + 1 < weights[index]:
            heapq.heappush(waiting, ((count + 1) * period // weights[index], index, count + 1))
    return choices
