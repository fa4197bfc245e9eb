import contextlib
import math
import random
import statistics
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint import drift_machine
from everstep.checkpoint.drift_machine import (
    SAMPLES_MAX,
    Block,
    DriftWindow,
    Spread,
    exactly,
    student_t,
)

TIMES = st.floats(0, 1e4)


def filled(samples: list[float]) -> DriftWindow:
    window = DriftWindow()
    for sample in samples:
        window.add(sample)
    return window


def spread_of(window: DriftWindow) -> Spread:
    spread = window.spread
    assert spread is not None
    return spread


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)],
)
def test_student_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(1.959964, freedom) == pytest.approx(t, rel=0.012)


def test_what_nobody_has_measured_twice_is_not_sure() -> None:
    assert Spread(mean=3.0, count=1).half_width == math.inf
    assert exactly(3.0).half_width == 0
    assert DriftWindow().spread is None


@given(st.lists(TIMES, min_size=2, max_size=60))
def test_the_spread_is_that_of_the_newest_samples(samples: list[float]) -> None:
    window = DriftWindow()
    for sample in samples:
        window.add(sample)
        spread = spread_of(window)
        rest = (
            samples[: samples.index(sample) + 1][-spread.count :] if len(set(samples)) == len(samples) else []
        )
        if len(rest) == spread.count > 1:
            assert spread.mean == pytest.approx(statistics.fmean(rest), rel=1e-6, abs=1e-6)
            assert spread.deviation == pytest.approx(statistics.stdev(rest), rel=1e-4, abs=1e-4)


@given(st.lists(TIMES, min_size=1, max_size=200))
def test_blocks_go_on_where_they_were_left(samples: list[float]) -> None:
    window = filled(samples)
    again = spread_of(DriftWindow(window.blocks))
    assert again.count == spread_of(window).count
    assert again.mean == pytest.approx(spread_of(window).mean)
    assert again.deviation == pytest.approx(spread_of(window).deviation)
    assert all(
        older.samples >= newer.samples for older, newer in zip(window.blocks, window.blocks[1:], strict=False)
    )


@pytest.mark.parametrize("factor", [0.2, 0.5, 1.1, 5.0])
def test_without_noise_two_samples_show_a_change(factor: float) -> None:
    window = filled([2.0] * 50)
    assert not window.add(2.0 * factor), "a single one may be an exception"
    assert window.add(2.0 * factor)
    assert spread_of(window).mean == pytest.approx(2.0 * factor)


def test_one_exception_is_forgotten() -> None:
    window = filled([1.0, *[0.01] * 4])
    assert spread_of(window).mean == pytest.approx(0.01)


@pytest.mark.parametrize("count", [5, 30, 500])
def test_one_exception_is_no_change(count: int) -> None:
    """However far above all others it lies."""
    window = filled([*[1.0, 1.02] * count, 1e5, *[1.0, 1.02] * 10])
    assert spread_of(window).count == 2 * count + 21


@pytest.mark.parametrize(("times", "every"), [(1000, 10), (1e4, 50)])
def test_the_mean_holds_exceptions_that_come_again_and_again(times: float, every: int) -> None:
    window = filled(([*[1.0, 1.02] * (every // 2 - 1), 1.0, times]) * (1000 // every))
    assert spread_of(window).mean == pytest.approx((every - 1 + times) / every, rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_steady_noise_is_no_change(seed: int) -> None:
    draw = random.Random(seed)
    window = DriftWindow()
    drops = sum(window.add(draw.gammavariate(11, 1 / 11)) for _ in range(3000))
    assert drops == 0
    assert spread_of(window).count == 3000
    assert abs(spread_of(window).mean - 1) < 2 * spread_of(window).half_width
    assert spread_of(window).deviation == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_a_change_below_the_noise_is_found_in_time(seed: int) -> None:
    draw = random.Random(seed)
    window = DriftWindow()
    for _ in range(2000):
        window.add(draw.gauss(1.0, 0.3))
    for _ in range(400):
        window.add(draw.gauss(1.2, 0.3))
    assert spread_of(window).count < 500
    assert abs(spread_of(window).mean - 1.2) < 2 * spread_of(window).half_width < 0.15


def test_memory_is_bounded() -> None:
    window = DriftWindow([Block(SAMPLES_MAX // 2, 1.0, 0.0), Block(SAMPLES_MAX // 2, 1.0, 0.0)])
    window.add(1.0)
    assert spread_of(window).count == SAMPLES_MAX // 2 + 1
    assert len(filled([1.0] * 5000).blocks) < 70


STRETCHES = st.lists(
    st.tuples(st.floats(1e-6, 1e4), st.floats(0, 1.5), st.integers(1, 40)), min_size=1, max_size=6
)
"""Of each: the mean, the deviation as a share of it, and how many samples."""


@given(STRETCHES, st.integers(0, 2**32), st.booleans(), st.booleans())
def test_no_change_is_overlooked_for_being_quick(
    stretches: list[tuple[float, float, int]], seed: int, is_skewed: bool, may_be_negative: bool
) -> None:
    """What `_may_be_over` passes by, comparing all cuts would not have forgotten either."""
    draw = random.Random(seed)
    quick, thorough = DriftWindow(), DriftWindow()
    for mean, share, count in stretches:
        for _ in range(count):
            noise = draw.expovariate(1) - 1 if is_skewed else draw.gauss(0, 1)
            sample = mean * (1 + share * noise)
            sample = sample if may_be_negative else abs(sample)
            with mock.patch.object(drift_machine, "_may_be_over", return_value=True):
                was_over = thorough.add(sample)
            assert quick.add(sample) == was_over
            assert quick.blocks == thorough.blocks


def test_a_sample_that_is_interrupted_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, wherever: what a window says of its blocks holds."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("_compressed", "_is_surprising", "_first_of_now", "_may_be_over"):
        for count in (0, 1, 41):
            window = DriftWindow()
            for _ in range(count):
                window.add(1.0)
            blocks, spread = list(window.blocks), window.spread
            taken = False
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(drift_machine, place, interrupt)
                window.add(5.0)
                taken = True  # it does not come by there
            assert taken or (window.blocks, window.spread) == (blocks, spread)
            window.add(2.0)


def test_comparing_is_quick_where_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cuts of steady times are passed by: each boundary has several windows, and training waits for them."""
    draw, passed, may_be_over = random.Random(7), [], drift_machine._may_be_over

    def counting(blocks: list[Block], whole: Block, chance: float) -> bool:
        passed.append(not may_be_over(blocks, whole, chance))
        return not passed[-1]

    monkeypatch.setattr(drift_machine, "_may_be_over", counting)
    window = DriftWindow()
    for _ in range(500):
        window.add(draw.gauss(0.1, 0.01))
    assert len(passed) > 50
    assert sum(passed) >= 0.95 * len(passed)
