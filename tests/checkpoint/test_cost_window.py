"""What an attempt's first checkpoints pay for once is forgotten as soon as a later one shows it, nothing else is."""

import pytest

from everstep.checkpoint.cost_window_machine import FIRSTS, CostWindow
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
        ((10.0, 0.005, 10.0), 5.0025),
        ((10.0, 6.0), 8.0),
        ((0.005, 10.0), 5.0025),
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
    assert mean_of(window, 10.0) > 0.9
    assert mean_of(window, 0.005) == pytest.approx(0.005)
    assert sum(block.samples for block in window.blocks) == 10
