"""What is paid for once is forgotten as soon as a later one shows it, nothing else is."""

import pytest

from everstep.checkpoint.cost_window_machine import EXCEPTION, FIRSTS, LIGHT, CostWindow
from everstep.checkpoint.drift_machine import Block


def mean_of(window: CostWindow, *values: float) -> float:
    for value in values:
        window.add(value)
    spread = window.spread
    assert spread is not None
    return spread.mean


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ((10.0,), 10.0),
        ((10.0, 0.005), 0.005),
        ((10.0, 10.0, 0.005), 0.005),
        ((10.0, 4.0, 0.005), 0.005),
        ((10.0, 0.005, 10.0), 0.005),
        ((10.0, 0.005, 10.0, 10.0), 10.0),
        ((10.0, 6.0), 8.0),
        ((0.005, 10.0), 0.005),
        ((0.005, 10.0, 0.005), 0.005),
        ((0.005, 0.04), 0.0225),
        ((0.0, 0.0, 0.0), 0.0),
    ],
)
def test_dear_first_ones_count_until_a_far_cheaper_one_comes(values: tuple[float, ...], mean: float) -> None:
    assert mean_of(CostWindow(), *values) == pytest.approx(mean)


def test_later_ones_are_no_first_ones() -> None:
    assert mean_of(CostWindow(), *[10.0] * FIRSTS, 1.0) == pytest.approx((10 * FIRSTS + 1) / (FIRSTS + 1))


def test_what_earlier_attempts_knew_stays() -> None:
    remembered = (Block(8, 0.005, 0.0), Block(1, 0.005, 0.0))
    window = CostWindow(remembered)
    assert mean_of(window, 10.0) == pytest.approx(0.005)
    assert mean_of(window, 0.005) == pytest.approx(0.005)
    assert sum(block.samples for block in window.blocks) == 10


def test_a_single_exception_waits_for_a_second_one() -> None:
    """A trainer was stopped for ten minutes within a stall."""
    window = CostWindow()
    assert mean_of(window, *[0.005] * 20, 600.0, *[0.005] * 20) == pytest.approx(0.005)
    assert mean_of(window, 600.0) == pytest.approx((40 * 0.005 + 2 * 600.0) / 42)


@pytest.mark.parametrize("between", [0, 3])
def test_a_second_one_that_is_far_less_is_another_exception(between: int) -> None:
    """Pages that have to be read again, after ten minutes: each counts with one like it."""
    window = CostWindow()
    values = [*[0.005] * 20, 600.0, *[0.005] * between, 0.2, *[0.005] * 20]
    assert mean_of(window, *values) == pytest.approx((0.2 + (40 + between) * 0.005) / (41 + between))
    assert mean_of(window, 500.0) > 1


@pytest.mark.parametrize("between", [0, 3])
def test_a_second_one_that_is_far_more_waits_itself(between: int) -> None:
    values = [*[0.005] * 20, 0.2, *[0.005] * between, 600.0, *[0.005] * 5]
    assert mean_of(CostWindow(), *values) == pytest.approx((0.2 + (25 + between) * 0.005) / (26 + between))


def test_what_befell_two_at_once_is_one_exception() -> None:
    """A drive hung while both slots were written."""
    window = CostWindow()
    for value in (*[0.8] * 20, 600.0, 580.0, *[0.8] * 20):
        assert not window.add(value, at_once=2)
    assert mean_of(window) == pytest.approx(0.8)


def test_what_is_dear_for_good_is_seen_behind_as_many_as_may_be_one_exception() -> None:
    window = CostWindow()
    found = [window.add(value, at_once=2) for value in (*[0.8] * 20, 20.0, 20.0, 20.0)]
    assert found == [*[False] * 22, True]
    assert mean_of(window) == pytest.approx(20.0)


def test_an_exception_of_a_past_that_is_over_waits_no_more() -> None:
    window = CostWindow()
    assert mean_of(window, *[1.0] * 20, 600.0, *[5.0] * 10) == pytest.approx(5.0)
    assert mean_of(window, 600.0) == pytest.approx(5.0)


def test_what_happens_again_and_again_is_no_exception() -> None:
    """Each tenth stall is a hundred times as long: from the second one on all of them count."""
    assert mean_of(CostWindow(), *([0.005] * 9 + [0.5]) * 12) == pytest.approx(0.9 * 0.005 + 0.1 * 0.5)


def test_of_what_is_dear_for_good_the_second_one_counts() -> None:
    window = CostWindow()
    assert mean_of(window, *[0.005] * 50, 2.0) == pytest.approx(0.005)
    assert window.add(2.0), "the past is over"
    assert mean_of(window, 2.0) == pytest.approx(2.0)


def test_an_exception_counts_as_soon_as_it_makes_little_of_the_mean() -> None:
    """Else one that comes each thousandth time would never count."""
    window, value = CostWindow(), 2.0 * EXCEPTION
    needed = round(value / LIGHT)
    assert mean_of(window, *[1.0] * 10, value, *[1.0] * (needed - 11)) == 1.0
    assert mean_of(window, 1.0, 1.0) == pytest.approx((needed + 1 + value) / (needed + 2))


def test_what_is_within_the_noise_counts_at_once() -> None:
    noisy = [0.5, 1.5] * 5
    assert mean_of(CostWindow(), *noisy, EXCEPTION) == pytest.approx((10 + EXCEPTION) / 11)


def test_an_exception_of_an_earlier_attempt_waits_for_its_second_one() -> None:
    """Else attempts that end before the second would never learn what a checkpoint costs by now."""
    first = CostWindow()
    mean_of(first, *[0.005] * 20, 120.0)
    second = CostWindow(first.blocks, first.waiting)
    assert mean_of(second, 0.005) == pytest.approx(0.005)
    assert mean_of(second, 120.0) > 10


def test_it_waits_on_where_a_first_one_was_dear() -> None:
    window = CostWindow((Block(8, 0.005, 0.0),), (120.0,))
    assert mean_of(window, 1.0, 0.005, 0.005) == pytest.approx(0.005)
    assert mean_of(window, 120.0) > 10
