"""What an operator asks changes what rank 0 decides: a pause at once, a budget with the next decision."""

import time

from training_simulator import Training, World

from everstep.checkpoint.frequency_types import BoundKind, Limits
from everstep.hook.pace import Pace
from everstep.hook.steering_machine import Steering


def test_a_pause_lists_no_boundary_until_it_is_over() -> None:
    pace = Pace(every=5, limits=Limits())
    pace.begin(0, devices=[])
    assert pace.due(1, 11) == (5, 10)
    now_unix_s = time.time()
    pace.steer(Steering(paused_until_unix_s=now_unix_s + 600, pause_asked_unix_s=now_unix_s))
    assert pace.decision.kind is BoundKind.FIXED, "what is decided already is not paused"
    assert pace.due(11, 31) == ()
    assert pace.decision.kind is BoundKind.PAUSED
    assert (pace.decision.interval_steps, "as asked" in pace.decision.reason) == (5, True)
    assert pace.decision.pause_asked_unix_s == now_unix_s
    assert (pace.decision.cost_share, pace.decision.steps_undecided) == (None, 0), (
        "none is taken at this rate"
    )
    pace.steer(Steering(paused_until_unix_s=0.0, pause_asked_unix_s=now_unix_s - 1))  # which came late
    assert pace.due(31, 41) == ()
    pace.steer(Steering(paused_until_unix_s=0.0, pause_asked_unix_s=now_unix_s + 1))
    assert pace.due(41, 51) == (45, 50)
    assert pace.decision.kind is BoundKind.FIXED
    assert pace.decision.pause_asked_unix_s == now_unix_s + 1, (
        "who asked for the pause has to learn of its end"
    )


def test_a_budget_reaches_the_controller_and_outlives_the_begin_of_training() -> None:
    pace = Pace(every=None, limits=Limits(budget=0.035))
    pace.steer(Steering(budget=0.2, budget_asked_unix_s=1.0))
    pace.begin(0, devices=[])
    pace.due(1, 2)
    assert (pace.decision.budget, pace.decision.budget_asked_unix_s) == (0.2, 1.0)
    pace.steer(Steering(budget=0.1, budget_asked_unix_s=0.5))  # older than what holds
    pace.due(2, 3)
    assert (pace.decision.budget, pace.decision.budget_asked_unix_s) == (0.2, 1.0)
    pace.steer(Steering(budget=0.1, budget_asked_unix_s=1.5))
    assert pace.decision.budget_asked_unix_s == 1.0, "what is decided does not follow it yet"


def test_another_budget_counts_with_the_next_decision() -> None:
    """Ten times the budget, a tenth of the interval, without the calm that changes by measurement wait for."""
    world = World(persist_s=0.001, eager_s=0.02, slower=0.0)
    training = Training(lambda _: world, Limits(budget=0.01)).run_checkpoints(30)
    before = training.decision
    assert (before.kind, before.budget) == (BoundKind.BUDGET, 0.01)
    training.machine.limit(0.1)
    training.run(2)
    after = training.decision
    assert after.budget == 0.1
    assert after.interval_steps <= before.interval_steps / 5
    training.machine.limit(0.01)
    training.run(2)
    assert training.decision.interval_steps >= 5 * after.interval_steps
