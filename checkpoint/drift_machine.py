"""The mean of what is measured again and again, over as long a past as looks like the present. Pure.

ADWIN (Bifet and Gavaldà, SDM'07): samples lie in blocks of doubling size; when those behind a cut differ from those
before it by more than chance explains, those before it are forgotten. ADWIN's bound is for values of a known range;
times have none, so the difference is judged by Student's t.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

SURE_Z = 1.96
"""95 % of a normal distribution lie within so many deviations: what an interval of confidence means here."""
DRIFT_Z = 4.0
"""By chance one comparison of 16,000 comes as far; several are made with each sample."""
DRIFT_SHARE = 0.005
"""Changes below this share of the mean need samples, whatever the spread: clocks and rounding are no drift."""
SINGLES_MAX, BLOCKS_PER_SIZE = 5, 2
"""The newest samples lie singly, so that a change can be cut off cleanly; of larger blocks few are enough."""
SAMPLES_MAX = 32768
"""Older ones are forgotten: 30 % of noise is known to 0.3 % by then."""
ROUNDING = 1e-6
"""Of sums of squares: a cut that comes so near is compared."""
FEW = 32
SURPRISE_Z = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean, and what it was taken of."""

    mean: float
    deviation: float = 0.0
    """Of one sample, not of the mean."""
    count: int = 0

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of confidence of the mean; infinite while nobody knows."""
        return self.half_width_at(SURE_Z)

    def half_width_at(self, z: float) -> float:
        """Return half of the interval that holds the mean as surely as `z` deviations of a normal distribution."""
        if self.count < 2:
            return math.inf
        return student_t(z, self.count - 1) * self.deviation / math.sqrt(self.count)

    @property
    def low(self) -> float:
        """Lower end of the interval of confidence."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval of confidence."""
        return self.mean + self.half_width


def exactly(value: float) -> Spread:
    """Return a value that is known, not measured."""
    return Spread(mean=value, deviation=0.0, count=2)


def student_t(z: float, freedom: int) -> float:
    """Return the quantile of Student's t that is as rare as `z` of a normal distribution.

    The approximation of Peizer and Pratt (JASA 1968), within 1 %; exact for one degree of freedom.
    """
    assert freedom >= 1
    if freedom == 1:
        return 1 / math.tan(math.pi * math.erfc(z / math.sqrt(2)) / 2)
    scale = (freedom - 5 / 6) / (freedom - 2 / 3 + 0.1 / freedom) ** 2
    return math.sqrt(freedom * math.expm1(z * z * scale))


class Block(NamedTuple):
    """Some samples in a row, by what is needed of them."""

    samples: int
    mean: float
    squares: float
    """Sum of squared differences from the mean."""

    @property
    def variance(self) -> float:
        """Of one sample."""
        return self.squares / (self.samples - 1) if self.samples > 1 else 0.0

    def joined(self, later: "Block") -> "Block":
        """Return both as one."""
        count = self.samples + later.samples
        difference = later.mean - self.mean
        return Block(
            count,
            self.mean + difference * later.samples / count,
            self.squares + later.squares + difference * difference * self.samples * later.samples / count,
        )


class DriftWindow:
    """The samples that look like the present, the oldest block first.

    Comparing takes time: once there are more than a few, samples that surprise nobody are compared with the past once
    in `check_every`.
    """

    __slots__ = ("_check_every", "_whole", "blocks")

    def __init__(
        self, blocks: Iterable[Block] = (), *, check_every: int = 8, whole: Block | None = None
    ) -> None:
        """`whole`: the blocks as one, where that is known."""
        self.blocks = list(blocks)
        self._check_every = check_every
        self._whole = self._joined() if whole is None else whole

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation; None before the first sample."""
        whole = self._whole
        if not whole.samples:
            return None
        return Spread(mean=whole.mean, deviation=math.sqrt(whole.variance), count=whole.samples)

    def add(self, value: float) -> bool:
        """Take a sample; tell whether it showed that the past is over.

        A signal's handler may raise in the middle: then the sample is not taken, and nothing has changed.
        """
        assert math.isfinite(value), value
        before, single = self._whole, Block(1, value, 0.0)
        changed = type(self)(
            (*self.blocks, single), check_every=self._check_every, whole=before.joined(single)
        )
        changed._compress()
        is_time = before.samples < FEW or before.samples % self._check_every == 0
        is_over = (is_time or changed._is_surprising(before)) and changed._forget_what_is_over()
        self.blocks, self._whole = changed.blocks, changed._whole
        return is_over

    def _is_surprising(self, before: Block) -> bool:
        limit = SURPRISE_Z * math.sqrt(before.variance) + DRIFT_SHARE * abs(before.mean)
        return any(abs(block.mean - before.mean) > limit for block in self.blocks[-2:])

    def _joined(self) -> Block:
        return reduce(Block.joined, self.blocks, Block(0, 0.0, 0.0))

    def _forget_what_is_over(self) -> bool:
        """Cut where before and after differ most, if that is no chance; then look again at what is left."""
        freedom = self._whole.samples - 2
        if freedom < 1:
            return False
        chance = student_t(DRIFT_Z, freedom)
        if not self._may_be_over(chance):
            return False
        before = list(accumulate(self.blocks, Block.joined))
        after = list(accumulate(reversed(self.blocks), lambda later, earlier: earlier.joined(later)))[::-1]
        best, place = 1.0, 0
        for cut in range(1, len(self.blocks)):
            difference = _difference(before[cut - 1], after[cut], chance)
            if difference > best:
                best, place = difference, cut
        if place:
            del self.blocks[:place]
            self._whole = self._joined()
            self._forget_what_is_over()
        return place > 0

    def _may_be_over(self, chance: float) -> bool:
        """Tell whether any cut comes near what `_difference` asks for: nearly always none does, and this is quick.

        The pooled deviation is the least that both of its limits can be; what the squares before and after a cut have
        together is the sum of all without what the means' difference accounts for. Of the ratio, whose limits are
        shares of two means, the larger mean over the smaller one is allowed besides.
        """
        whole = self._whole
        freedom, mean = whole.samples - 2, whole.mean
        count, total = 0, 0.0
        for block in self.blocks[:-1]:
            count += block.samples
            total += block.samples * (block.mean - mean)
            left = whole.samples - count
            between = total * total * whole.samples / (count * left)
            within = (whole.squares - between) * (1 - ROUNDING)
            older, newer = mean + total / count, mean - total / left
            ratio = max(older / newer, newer / older) if older > 0 and newer > 0 else 1.0
            if ratio * ratio * between * freedom >= chance * chance * within:
                return True
        return False

    def _compress(self) -> None:
        """Join the two oldest blocks of a size where there are too many of it."""
        end, most = len(self.blocks), SINGLES_MAX
        while end > most:
            size = self.blocks[end - 1].samples
            begin = end
            while begin > 0 and self.blocks[begin - 1].samples == size:
                begin -= 1
            if end - begin <= most:
                break
            self.blocks[begin : begin + 2] = [self.blocks[begin].joined(self.blocks[begin + 1])]
            end, most = begin + 1, BLOCKS_PER_SIZE
        if self._whole.samples > SAMPLES_MAX:
            del self.blocks[0]
            self._whole = self._joined()


def _difference(older: Block, newer: Block, chance: float) -> float:
    """Return how far two stretches are apart; 1 is what is neither chance nor too little to care about."""
    if newer.samples < 2:
        return 0.0  # a single one is an exception until there is a second
    return max(_apart(older, newer, chance), _apart_as_ratio(older, newer, chance))


def _apart(older: Block, newer: Block, chance: float) -> float:
    """Return the difference of the means."""
    scale = 1 / older.samples + 1 / newer.samples
    pooled = scale * (older.squares + newer.squares) / (older.samples + newer.samples - 2)
    # Welch's, too: a stretch that holds both the old and the new is no new one.
    welch = older.variance / older.samples + newer.variance / newer.samples
    few = 1 + 1 / min(older.samples, newer.samples)  # of skewed samples, some in a row lie far out more often
    ignored = DRIFT_SHARE * max(abs(older.mean), abs(newer.mean))
    limit = few * chance * math.sqrt(max(pooled, welch)) + DRIFT_Z * ignored * math.sqrt(scale)
    difference = abs(newer.mean - older.mean)
    return difference / limit if limit > 0 else 0.0


def _apart_as_ratio(older: Block, newer: Block, chance: float) -> float:
    """Return the same of the means' ratio.

    Times vary by a share of themselves, so that a fall to a fifth is clear long before the difference exceeds what the
    longer ones varied by. Of exponential times, which vary by all of themselves, one of 3,600 looks like a change.
    """
    if older.mean <= 0 or newer.mean <= 0:
        return 0.0
    older_share = older.squares / older.mean / older.mean
    newer_share = newer.squares / newer.mean / newer.mean
    scale = 1 / older.samples + 1 / newer.samples
    pooled = scale * (older_share + newer_share) / (older.samples + newer.samples - 2)
    welch = newer_share / (newer.samples - 1) / newer.samples
    few = 1 + 1 / min(older.samples, newer.samples)
    limit = few * chance * math.sqrt(max(pooled, welch)) + DRIFT_Z * DRIFT_SHARE * math.sqrt(scale)
    return abs(math.log(newer.mean) - math.log(older.mean)) / limit
