import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.drift_machine import Spread, exactly
from everstep.checkpoint.frequency_plan import (
    find_target,
    full_after_bytes,
    hard_bounds,
    merge,
    steps_at_least,
    steps_at_most,
)
from everstep.checkpoint.frequency_types import BoundKind, Figures, Limits
from everstep.checkpoint.goodput_plan import goodput
from everstep.core.errors import UsageError

FIGURES = Figures(
    step=exactly(0.1),
    stall=exactly(0.02),
    persist=exactly(1.0),
    held=exactly(1.4),
    slot_count=2,
    fill={"a": 0.001},
)
NO_ENDURANCE = replace(FIGURES, fill={})
"""Nobody knows how large the drives are."""


def target_of(
    figures: Figures = NO_ENDURANCE, mtbf_s: float | None = None, slower_s: float = 0.0, **limits: Any
):
    return find_target(figures, Limits(**limits), mtbf_s=mtbf_s, slower_s=slower_s)


@pytest.mark.parametrize(
    ("figures", "limits", "kind", "need_s", "reason"),
    [
        (NO_ENDURANCE, {}, BoundKind.BANDWIDTH, 1.0, "persist bandwidth: 1 s"),
        (
            replace(NO_ENDURANCE, held=exactly(3.0)),
            {},
            BoundKind.SLOTS,
            1.5,
            "persist bandwidth: 3 s / 2 slots",
        ),
        (NO_ENDURANCE, {"budget": 0.01}, BoundKind.BUDGET, 2.0, "the budget: 20 ms / 1 %"),
        (
            FIGURES,
            {},
            BoundKind.ENDURANCE,
            86.4,
            "endurance: 0.1 % of the drives each time, 1 drive write a day",
        ),
        (NO_ENDURANCE, {"least_steps": 50}, BoundKind.LEAST, 5.0, "the least interval allowed: 50 steps"),
        (NO_ENDURANCE, {"least_s": 90}, BoundKind.LEAST, 90.0, "the least interval allowed: 90 s"),
    ],
)
def test_each_bound_decides_where_it_asks_for_most(
    figures: Figures, limits: dict[str, float], kind: BoundKind, need_s: float, reason: str
) -> None:
    target = target_of(figures, **limits)
    assert target.bound.kind is kind
    assert target.need_s == pytest.approx(need_s)
    assert target.bound.text == reason


def test_slower_steps_are_part_of_the_cost() -> None:
    target = target_of(slower_s=0.05)
    assert target.need_s == pytest.approx(0.07 / 0.035)
    assert target.bound.text == "the budget: 20 ms stall + 50 ms slower steps / 3.5 %"


def test_slower_steps_by_rounding_are_not_said() -> None:
    found = target_of(slower_s=1e-16, budget=0.01)
    assert found.bound.text == "the budget: 20 ms / 1 %"


def test_failures_make_it_longer_only_while_their_rate_is_known() -> None:
    assert target_of().bound.kind is BoundKind.BANDWIDTH
    target = target_of(mtbf_s=10_000)
    assert target.need_s == pytest.approx(math.sqrt(2 * 0.02 * 10_000))
    assert target.bound.text == "the best for a failure each 2.78 h: sqrt(2 x 20 ms x that)"


def test_the_work_that_may_be_lost_cuts_the_best_for_failures() -> None:
    target = target_of(mtbf_s=10_000, most_s=11.4)
    assert target.bound.kind is BoundKind.MOST
    assert target.aim_s == pytest.approx(10.0)
    assert target.bound.text == "at most 11.4 s of work to lose, less 1.4 s to commit"
    assert target.goal_missed == ""


def test_a_goal_that_cannot_be_kept_is_said() -> None:
    target = target_of(most_s=2.0)
    assert target.need_s == pytest.approx(1.0)
    assert target.goal_missed == (
        "at most 2 s of work to lose, less 1.4 s to commit: not possible, persist bandwidth: 1 s asks for 1 s"
    )
    assert target_of(most_steps=30).goal_missed == ""


@pytest.mark.parametrize("most_s", [2.0, 1.0])
def test_a_goal_below_one_step_cannot_be_kept_and_is_said(most_s: float) -> None:
    """Less 1.4 s to commit there is less left than a step takes, or nothing."""
    target = target_of(replace(NO_ENDURANCE, step=exactly(2.0)), most_s=most_s)
    assert "not possible, the least interval" in target.goal_missed
    assert target.most_s == math.inf


def test_a_budget_that_asks_for_more_than_the_failures_says_what_that_costs() -> None:
    """It is a promise and is kept; who made it should know."""
    dear = replace(NO_ENDURANCE, stall=exactly(10.0))
    target = target_of(dear, mtbf_s=2785.0, budget=0.01)
    assert target.bound.kind is BoundKind.BUDGET
    assert target.need_s == pytest.approx(1000.0), "the budget is kept"
    assert target.loss is not None
    assert target.loss.share == pytest.approx(
        1 - goodput(1150.0, 10.0, 2785.0) / goodput(236.0, 10.0, 2785.0), abs=1e-3
    )
    assert target.bound.text == (
        "the budget: 10 s / 1 %, which costs 13 % of goodput:"
        " for a failure each 46.4 min a budget of 4.87 % would be best"
    )
    best = target_of(dear, mtbf_s=2785.0, budget=target.loss.best_budget)
    assert best.loss is None
    assert best.aim_s == pytest.approx(236.0, rel=0.01)


def test_a_budget_costs_nothing_where_something_else_asks_for_as_much() -> None:
    """Nor where nobody knows how often the job fails."""
    dear = replace(NO_ENDURANCE, stall=exactly(10.0))
    assert target_of(dear, budget=0.01).loss is None
    slow = target_of(replace(dear, persist=exactly(1100.0)), mtbf_s=2785.0, budget=0.01)
    assert slow.loss is None
    assert target_of(dear, mtbf_s=2785.0, budget=0.1).bound.kind is BoundKind.FAILURES


@given(st.floats(1e-3, 1e4), st.floats(1e-3, 1e6), st.floats(1.0, 1e7))
def test_goodput_is_a_share_and_best_near_youngs_interval(
    cost_s: float, interval_s: float, mtbf_s: float
) -> None:
    found = goodput(interval_s, cost_s, mtbf_s)
    assert 0 <= found <= 1
    young_s = math.sqrt(2 * cost_s * mtbf_s)
    if cost_s < mtbf_s / 20:
        assert found <= goodput(young_s, cost_s, mtbf_s) * 1.01


@pytest.mark.parametrize(
    "limits",
    [
        {"budget": 0.0}, {"budget": 1.0}, {"least_steps": 0}, {"least_s": -1.0}, {"most_steps": 0},
        {"least_steps": 10**400}, {"most_steps": 10**400},
        {"most_s": math.inf}, {"mtbf_s": 0.0}, {"drive_writes_per_day": 0.0}, {"budget": math.nan},
    ],
)  # fmt: skip
def test_limits_that_no_interval_meets_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(limits))} is "):
        Limits(**limits)


SPREADS = st.builds(Spread, mean=st.floats(1e-4, 1e3), deviation=st.floats(0, 10), count=st.integers(0, 1000))
RANKS = st.lists(
    st.builds(
        Figures,
        step=SPREADS,
        stall=st.none() | SPREADS,
        slower=st.none() | SPREADS,
        persist=st.none() | SPREADS,
        held=st.none() | SPREADS,
        slot_count=st.integers(2, 8),
        fill=st.dictionaries(st.sampled_from("ab"), st.floats(0, 1), max_size=1),
    ),
    min_size=1,
    max_size=6,
)


@given(RANKS, st.randoms(use_true_random=False))
def test_the_order_of_ranks_does_not_matter(ranks: list[Figures], draw: Any) -> None:
    shuffled = draw.sample(ranks, len(ranks))
    merged, again = merge(ranks), merge(shuffled)
    for name in ("step", "stall", "persist", "held"):
        one, other = getattr(merged, name), getattr(again, name)
        assert (one and one.mean) == (other and other.mean)
    assert merged.fill == pytest.approx(again.fill)


@given(RANKS)
def test_no_rank_needs_a_longer_interval_than_all_together(ranks: list[Figures]) -> None:
    together = {bound.kind: bound.need_s for bound in hard_bounds(merge(ranks), Limits(), slower_s=0.0)}
    step_s = merge(ranks).step
    assert step_s is not None
    for figures in ranks:
        assert figures.step is not None
        assert step_s.mean <= figures.step.mean
        for bound in hard_bounds(figures, Limits(), slower_s=0.0):
            if bound.kind is not BoundKind.LEAST:
                assert bound.need_s <= together[bound.kind] * (1 + 1e-9)


COSTS = st.builds(Figures, stall=st.floats(0, 10).map(exactly), slower=st.floats(-1, 10).map(exactly))


@given(st.lists(COSTS, min_size=1, max_size=6))
def test_what_one_rank_stalls_and_the_others_wait_for_counts_once(ranks: list[Figures]) -> None:
    """All together cost what the dearest rank has measured, whose steps waited for the others' stalls."""

    def cost_s(figures: Figures) -> float:
        assert figures.stall is not None
        assert figures.slower is not None
        return figures.stall.mean + figures.slower.mean

    assert cost_s(merge(ranks)) == pytest.approx(max(map(cost_s, ranks)))


def test_among_many_ranks_one_that_looks_slow_by_chance_proves_little() -> None:
    rank = Figures(slower=Spread(mean=0.1, deviation=0.2, count=20))
    alone, crowd = merge([rank]).slower, merge([rank] * 512).slower
    assert alone is not None
    assert crowd is not None
    assert alone == rank.slower
    assert crowd.half_width > 1.8 * alone.half_width


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e3))
def test_steps_of_an_interval(interval_s: float, step_s: float) -> None:
    steps = steps_at_least(interval_s, step_s)
    assert steps >= 1
    assert steps * step_s >= interval_s * (1 - 1e-6) - 2e-6 * step_s
    assert steps == 1 or (steps - 1) * step_s < interval_s
    assert 1 <= steps_at_most(interval_s, step_s) <= steps
    assert steps_at_most(math.inf, step_s) == math.inf


def test_a_whole_number_of_steps_is_not_rounded_up() -> None:
    assert steps_at_least(0.3, 0.1) == 3
    assert steps_at_most(0.3, 0.1) == 3


def test_the_first_drive_to_be_full_decides_how_much_can_be_written() -> None:
    assert full_after_bytes([]) == full_after_bytes([(1.0, 0)]) == 0
    assert full_after_bytes([(0, 100)] * 4) == 400
    assert full_after_bytes([(7, 100), (1, 1500)]) == pytest.approx(100 * 8 / 7)
    assert full_after_bytes([(7, 100), (1, 1500), (0, 10)]) == pytest.approx(10 * 12 / 4)
