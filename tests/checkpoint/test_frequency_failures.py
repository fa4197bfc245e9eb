"""The controller learns how often attempts die, also from those that leave no checkpoint."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from training_simulator import Training, World

from everstep.checkpoint.frequency_machine import CALM_CHECKPOINTS
from everstep.checkpoint.frequency_types import BoundKind, FailureKind, Limits

NORMAL = World()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_each_death_counts_once_whether_or_not_a_checkpoint_came_between(steps: list[int]) -> None:
    """A crash loop's count lies in no checkpoint: those that died before their first one would be forgotten."""
    training = Training(lambda _: NORMAL).run_checkpoints(5).run(10)
    for number, survived in enumerate(steps, start=1):
        training.restart(FailureKind.NODE)
        assert training.machine.memory.meter.node_failures == number
        training.run(survived)


def test_the_rate_of_failures_is_learnt_over_attempts() -> None:
    training = Training(lambda _: NORMAL).run(2000)
    interval = training.decision.interval_steps
    for _ in range(3):
        training.restart(FailureKind.NODE)
        training.run(200)
    assert training.decision.reason.startswith("bound by the best for a failure each ")
    assert training.decision.interval_steps > 2 * interval


def bound_by_failures(world: Callable[[int], World] = lambda _: NORMAL) -> Training:
    """Return a run that has learnt from three deaths, far apart, how rarely it fails."""
    training = Training(world).run(2000)
    for _ in range(3):
        training.restart(FailureKind.NODE)
        training.run(2000)
    training.run_checkpoints(2 * CALM_CHECKPOINTS).run(10)
    assert training.decision.reason.startswith("bound by the best for a failure each ")
    return training


def deaths_until_a_checkpoint(training: Training) -> int:
    """Let attempts die half an interval of before after their restart."""
    survived, step, deaths = training.decision.interval_steps // 2, training.taken[-1], 0
    while training.taken[-1] <= step:
        assert deaths < 50, training.decision
        training.restart(FailureKind.NODE)
        training.run(survived)
        deaths += 1
    return deaths


def test_attempts_that_die_before_an_interval_of_rarer_failures_get_their_checkpoint() -> None:
    """Each death is counted, though in no checkpoint: the interval follows before there is one."""
    training = bound_by_failures()
    assert deaths_until_a_checkpoint(training) < 3 * 2**2 + 2, "the interval goes by the root of the rate"


def test_attempts_that_die_get_their_checkpoint_where_the_interval_was_already_too_long() -> None:
    """A stall became cheap just before: that alone asks for a fall, which waits for checkpoints that never come."""
    now = [replace(NORMAL, eager_s=0.5)]
    training = bound_by_failures(lambda _: now[0])
    before = training.decision.interval_steps
    now[0] = NORMAL
    training.run_checkpoints(4).run(10)
    assert training.decision.interval_steps >= before, "so few cheap ones are not enough for a fall"
    assert deaths_until_a_checkpoint(training) < 3 * 2**2 + 2


def test_a_death_beside_a_stall_that_has_become_cheap_hurries_nothing() -> None:
    """What checkpoints cost is for the usual rules, while failures come about as often as is known."""
    now = [replace(NORMAL, eager_s=0.5)]
    training = Training(lambda _: now[0], Limits(budget=0.01)).run_checkpoints(20).run(10)
    for _ in range(12):
        training.restart(FailureKind.NODE)
        training.run_checkpoints(2).run(10)
    interval = training.decision.interval_steps
    assert training.decision.kind is BoundKind.BUDGET
    now[0] = NORMAL
    training.run_checkpoints(4).run(10)
    for _ in range(3):
        training.restart(FailureKind.NODE)
        assert training.run(interval // 2).decision.interval_steps == interval
