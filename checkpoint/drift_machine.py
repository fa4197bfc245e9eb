"""The mean of what is measured again and again, over as long a past as looks like the present. Pure.

ADWIN (Bifet and Gavaldà, SDM'07): samples lie in blocks of doubling size; when those behind a cut differ from those
before it by more than chance explains, those before it are forgotten. ADWIN's bound is for values of a known range;
times have none, so the difference is judged by Student's t.
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate

import msgspec

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
VARIES_MOST = 1.25
"""Deviation as a share of the mean: of exponential times it is 1, of two samples of which one is far larger sqrt(2)."""
NEWER_MIN = 2
"""A single one is an exception until there is a second."""


class Spread(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # made several times at each boundary
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


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
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

    __slots__ = ("_check_every", "_spread", "_whole", "blocks")

    def __init__(self, blocks: Iterable[Block] = (), *, check_every: int = 8) -> None:
        self.blocks = list(blocks)
        self._check_every = check_every
        self._whole = _joined(self.blocks)
        self._spread: Spread | None = None

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation; None before the first sample."""
        whole = self._whole
        if self._spread is None and whole.samples:
            self._spread = Spread(mean=whole.mean, deviation=math.sqrt(whole.variance), count=whole.samples)
        return self._spread

    def add(self, value: float) -> bool:
        """Take a sample; tell whether it showed that the past is over.

        A signal's handler may raise in the middle: then the sample is not taken, and nothing has changed.
        """
        assert math.isfinite(value), value
        before, single = self._whole, Block(1, value, 0.0)
        blocks, whole = _compressed([*self.blocks, single]), before.joined(single)
        if whole.samples > SAMPLES_MAX:
            del blocks[0]
            whole = _joined(blocks)
        is_time = before.samples < FEW or before.samples % self._check_every == 0
        place = _first_of_now(blocks, whole) if is_time or _is_surprising(blocks, before) else 0
        if place:
            blocks = blocks[place:]
            whole = _joined(blocks)
        self.blocks, self._whole, self._spread = blocks, whole, None
        return place > 0

    def add_to_past(self, value: float) -> None:
        """Take a sample that came before the newest ones, and shows nothing of a change."""
        single = Block(1, value, 0.0)
        blocks, whole = (
            [single.joined(_joined(self.blocks[:1])), *self.blocks[1:]],
            single.joined(self._whole),
        )
        self.blocks, self._whole, self._spread = blocks, whole, None


def _joined(blocks: Iterable[Block]) -> Block:
    return reduce(Block.joined, blocks, Block(0, 0.0, 0.0))


def _compressed(blocks: list[Block]) -> list[Block]:
    """Join the two oldest blocks of a size where there are too many of it, in place."""
    end, most = len(blocks), SINGLES_MAX
    while end > most and blocks[end - 1 - most].samples == (size := blocks[end - 1].samples):
        begin = end - 1 - most
        while begin > 0 and blocks[begin - 1].samples == size:
            begin -= 1
        blocks[begin : begin + 2] = [blocks[begin].joined(blocks[begin + 1])]
        end, most = begin + 1, BLOCKS_PER_SIZE
    return blocks


def _is_surprising(blocks: Sequence[Block], before: Block) -> bool:
    limit = SURPRISE_Z * math.sqrt(before.variance) + DRIFT_SHARE * abs(before.mean)
    return any(abs(block.mean - before.mean) > limit for block in blocks[-2:])


def _first_of_now(blocks: Sequence[Block], whole: Block) -> int:
    """Return the index of the first block of the present; 0 where all of the past looks like it.

    Cut where before and after differ most, if that is no chance; then look again at what is left.
    """
    freedom = whole.samples - 2
    if freedom < 1:
        return 0
    chance = student_t(DRIFT_Z, freedom)
    if not _may_be_over(blocks, whole, chance):
        return 0
    before = list(accumulate(blocks, Block.joined))
    after = list(accumulate(reversed(blocks), lambda later, earlier: earlier.joined(later)))[::-1]
    best, place = 1.0, 0
    for cut in range(1, len(blocks)):
        difference = _difference(before[cut - 1], after[cut], chance)
        if difference > best:
            best, place = difference, cut
    if not place:
        return 0
    left = blocks[place:]
    return place + _first_of_now(left, _joined(left))


def _may_be_over(blocks: Sequence[Block], whole: Block, chance: float) -> bool:
    """Tell whether any cut comes near what `_difference` asks for: nearly always none does, and this is quick.

    The pooled deviation is the least that both of its limits can be; what the squares before and after a cut have
    together is the sum of all without what the means' difference accounts for. Of the ratio, whose limits are
    shares of two means, the larger mean over the smaller one is allowed besides. Of what both ignore, the share of the
    smaller mean is the least.
    """
    freedom, mean = whole.samples - 2, whole.mean
    count, total = 0, 0.0
    for block in blocks[:-1]:
        count += block.samples
        total += block.samples * (block.mean - mean)
        left = whole.samples - count
        if left < NEWER_MIN:
            break
        between = total * total * whole.samples / (count * left)
        within = (whole.squares - between) * (1 - ROUNDING)
        older, newer = mean + total / count, mean - total / left
        ignored = DRIFT_Z * DRIFT_SHARE * min(abs(older), abs(newer))
        if between <= ignored * ignored * (1 - ROUNDING):
            continue
        ratio = max(older / newer, newer / older) if older > 0 and newer > 0 else 1.0
        if ratio * ratio * between * freedom >= chance * chance * within:
            return True
    return False


def _difference(older: Block, newer: Block, chance: float) -> float:
    """Return how far two stretches are apart; 1 is what is neither chance nor too little to care about."""
    if newer.samples < NEWER_MIN:
        return 0.0
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
    Where few of them make the mean, an hour among milliseconds, it says nothing of the others' ratio.
    """
    if _is_made_by_few(older) or _is_made_by_few(newer):
        return 0.0
    older_share = older.squares / older.mean / older.mean
    newer_share = newer.squares / newer.mean / newer.mean
    scale = 1 / older.samples + 1 / newer.samples
    pooled = scale * (older_share + newer_share) / (older.samples + newer.samples - 2)
    welch = newer_share / (newer.samples - 1) / newer.samples
    few = 1 + 1 / min(older.samples, newer.samples)
    limit = few * chance * math.sqrt(max(pooled, welch)) + DRIFT_Z * DRIFT_SHARE * math.sqrt(scale)
    return abs(math.log(newer.mean) - math.log(older.mean)) / limit


def _is_made_by_few(stretch: Block) -> bool:
    """Tell whether the samples vary by more than exponential times do, or are none."""
    return stretch.mean <= 0 or math.sqrt(stretch.variance) > VARIES_MOST * stretch.mean
