"""Ranks that read the plans at different moments decide alike."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.frequency_machine import FixedInterval
from everstep.hook.horizon_machine import Horizon, Planner


def test_multiples_of_the_interval_are_due() -> None:
    planner, horizon = Planner(due=FixedInterval(5).due), Horizon()
    plan = planner.first(0)
    horizon.receive(plan)
    due: list[int] = []
    for step in range(1, 30):
        if planner.wants_next(plan, step):
            plan = planner.next(plan, requested=False)
            horizon.receive(plan)
        assert horizon.knows(step)
        if horizon.is_due(step):
            due.append(step)
    assert due == [5, 10, 15, 20, 25]


def test_a_request_becomes_a_boundary_that_no_rank_has_passed() -> None:
    planner = Planner(due=FixedInterval(1000).due)
    plan = planner.first(0)
    following = planner.next(plan, requested=True)
    assert following.start == plan.horizon
    assert following.steps == (plan.horizon,)


def test_no_plan_reaches_further_than_about_a_second_or_is_made_before_anybody_knows_how_far_that_is() -> (
    None
):
    """What is asked for with long steps would begin eight of them later."""
    planner = Planner(due=FixedInterval(1000).due)
    spans = [planner.first(0)]
    for step_s in (0.0, 10.0, 0.5, 0.001):
        spans.append(planner.next(spans[-1], requested=False, step_s=step_s))
    assert [plan.horizon - plan.start for plan in spans] == [1, 1, 1, 2, 8]


def test_the_last_boundary_gets_a_checkpoint_only_if_there_is_time_for_it() -> None:
    for saved in (True, False):
        planner, horizon = Planner(due=FixedInterval(1).due), Horizon()
        horizon.receive(first := planner.first(0))
        plan = planner.next(first, requested=saved, end="the lease ends")
        horizon.receive(plan)
        assert plan.steps == ((plan.start,) if saved else ())
        assert horizon.end_after(plan.start) == "the lease ends"


def test_a_boundary_that_was_left_out_is_known_at_the_next_one() -> None:
    planner, horizon = Planner(due=FixedInterval(2).due), Horizon()
    horizon.receive(first := planner.first(0))
    horizon.receive(planner.next(first, requested=False, step_s=0.001))
    assert horizon.passed(2) == ()
    assert horizon.is_due(2)
    assert horizon.passed(2) == ()
    assert horizon.passed(5) == (2, 4)
    assert horizon.passed(6) == ()
    assert horizon.is_due(6)


def test_who_leaves_out_the_last_boundary_ends_with_the_next_one() -> None:
    planner, horizon = Planner(due=FixedInterval(1).due), Horizon()
    horizon.receive(first := planner.first(0))
    plan = planner.next(first, requested=True, end="SIGTERM", step_s=0.001)
    horizon.receive(plan)
    assert [horizon.end_after(plan.start + each) for each in (-1, 0, 1)] == ["", "SIGTERM", "SIGTERM"]


@given(
    start=st.integers(0, 10**9),
    every=st.integers(1, 50),
    requests=st.lists(st.booleans(), min_size=1, max_size=20),
    lags=st.lists(st.integers(0, 5), min_size=2, max_size=4),
)
def test_every_rank_takes_the_same_checkpoints_however_late_it_reads(
    start: int, every: int, requests: list[bool], lags: list[int]
) -> None:
    planner = Planner(due=FixedInterval(every).due)
    plans = [planner.first(start)]
    for asked in requests:
        plans.append(planner.next(plans[-1], requested=asked))
    taken: list[list[int]] = []
    for lag in lags:
        horizon, received, due = Horizon(), 0, list[int]()
        for step in range(start + 1, plans[-1].horizon):
            while received < len(plans) and (not horizon.knows(step + lag) or not horizon.knows(step)):
                horizon.receive(plans[received])
                received += 1
            if horizon.is_due(step):
                due.append(step)
        taken.append(due)
    assert all(due == taken[0] for due in taken)
    assert taken[0] == sorted({step for plan in plans for step in plan.steps})
