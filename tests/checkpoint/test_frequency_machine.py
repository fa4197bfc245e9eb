"""The controller on a simulated run: it keeps the budget whatever changes, and comes back when the change is over."""

import itertools
import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_simulator import Training, World

from everstep.checkpoint.drift_machine import DRIFT_Z, SURE_Z, Spread, exactly
from everstep.checkpoint.frequency_machine import (
    CALM_CHECKPOINTS,
    PROFILE_STEPS,
    PROFILE_STEPS_MIN,
    FixedInterval,
    FrequencyMachine,
    FrequencyMemory,
)
from everstep.checkpoint.frequency_meter_machine import MeterMemory
from everstep.checkpoint.frequency_types import (
    BoundKind,
    CheckpointSkipped,
    CheckpointStalled,
    CheckpointTaken,
    Failed,
    FailureKind,
    Figures,
    Limits,
    StepEnded,
)

BUDGETS = (0.01, 0.035, 0.1)
LOOKAHEADS = (1, 8)
"""One rank; several, which plan eight boundaries ahead."""
SETTLED = 10
"""Checkpoints after a start or a change: from there on the budget is kept."""
NOISY_RUNS = int(os.environ.get("EVERSTEP_NOISY_RUNS", "3"))
"""Half a minute of computing for each. All 24 combinations hold with 8, too (2026-11-25)."""
NORMAL = World()
CHANGES = {
    "a device slows five times": (NORMAL, replace(NORMAL, persist_s=4.0)),
    "a device slows five times, and writing costs": (
        replace(NORMAL, slower=0.1),
        replace(NORMAL, slower=0.1, persist_s=4.0),
    ),
    "steps become three times shorter": (NORMAL, replace(NORMAL, step_s=NORMAL.step_s / 3)),
    "steps become three times shorter than the copy": (
        replace(NORMAL, copy_s=0.4),
        replace(NORMAL, copy_s=0.4, step_s=NORMAL.step_s / 3),
    ),
    "a neighbour steals half the CPU": (NORMAL, replace(NORMAL, step_s=0.4, eager_s=0.01, copy_s=0.2)),
    "the eager part grows": (NORMAL, replace(NORMAL, eager_s=0.2)),
    "writing slows steps": (NORMAL, replace(NORMAL, slower=0.5)),
    "per-step checkpoints become dear": (
        World(step_s=1.0, persist_s=0.1, slower=0.0, eager_s=0.001),
        World(step_s=1.0, persist_s=0.1, slower=0.0, eager_s=0.5),
    ),
}
WORLDS = {
    "small": World(persist_s=0.1, eager_s=0.001, slower=0.0),
    "normal": NORMAL,
    "longer copy than step": replace(NORMAL, copy_s=0.5),
    "slow device": replace(NORMAL, persist_s=5.0),
    "writing slows steps": replace(NORMAL, slower=0.2),
    "short steps": replace(NORMAL, step_s=0.02),
    "long steps": replace(NORMAL, step_s=2.0),
}


def assert_calm(training: Training, since_checkpoint: int) -> None:
    """At most one change per five checkpoints."""
    changed_at = [change.checkpoint for change in training.changes if change.checkpoint >= since_checkpoint]
    gaps = [later - earlier for earlier, later in itertools.pairwise(changed_at)]
    assert all(gap >= 5 for gap in gaps), training.changes  # as promised, whatever the machine's constant is


def until_decided(training: Training, steps_max: int = 60_000) -> int:
    """Train as many steps as the interval of confidence asks for; return how many those were.

    At 1 % these are many: a checkpoint each second may cost 10 ms, and steps of 1 s vary by 300.
    """
    begun = training.step
    training.run_checkpoints(SETTLED)
    while training.decision.steps_undecided and training.step < begun + steps_max:
        training.run(min(training.decision.steps_undecided, 4000))
    assert training.decision.steps_undecided == 0
    return training.step - begun


def share_once_decided(training: Training) -> float:
    """Return the true share of cost once it is decided."""
    until_decided(training)
    decided = training.step
    return training.run_checkpoints(25).share(decided)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_the_budget_holds_from_the_tenth_checkpoint_on(world: World, budget: float, lookahead: int) -> None:
    training = Training(lambda _: world, Limits(budget=budget), lookahead=lookahead).run_checkpoints(40)
    assert training.share(training.taken[SETTLED]) <= budget
    assert_calm(training, SETTLED)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_the_budget_holds_again_after_a_change_and_after_its_end(
    before: World, after: World, budget: float, lookahead: int
) -> None:
    now = [before]
    training = Training(lambda _: now[0], Limits(budget=budget), lookahead=lookahead).run_checkpoints(30)
    first = training.decision.interval_steps
    now[0], changed = after, len(training.taken)
    training.run_checkpoints(30)
    assert training.share(training.taken[changed + SETTLED]) <= budget
    now[0], over = before, len(training.taken)
    training.run_checkpoints(SETTLED)
    assert training.decision.interval_steps <= 1.5 * first, "it comes down again"
    training.run_checkpoints(20)
    assert training.share(training.taken[over + SETTLED]) <= budget


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("drive_noise", [0.0, 0.3])
@pytest.mark.parametrize("late_after", [1, 2, 3, 4, 6, 7, 8])
def test_the_budget_holds_where_each_checkpoint_makes_a_later_step_long(
    late_after: int, drive_noise: float, budget: float
) -> None:
    """It looks like an evaluation, but comes with each checkpoint: storage is busy all the time, at first.

    Writing ends after 6 steps, or where drives vary, now before the long step, now after it.
    """
    world = World(
        step_s=0.02,
        copy_s=0.01,
        eager_s=0.002,
        persist_s=0.1,
        late_s=0.2,
        late_after=late_after,
        drive_noise=drive_noise,
    )
    training = Training(lambda _: world, Limits(budget=budget)).run_checkpoints(40)
    assert training.share(training.taken[SETTLED]) <= budget


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("times_shorter", [10, 20])
def test_the_budget_holds_where_steps_become_much_shorter_and_storage_is_always_busy(
    times_shorter: int, budget: float, lookahead: int
) -> None:
    """So many of the old steps as a checkpoint waits for quiet ones are over long before storage is idle."""
    now = [replace(NORMAL, noise=0.05)]
    training = Training(lambda _: now[0], Limits(budget=budget), lookahead=lookahead).run_checkpoints(30)
    now[0], changed = replace(now[0], step_s=NORMAL.step_s / times_shorter), len(training.taken)
    training.run_checkpoints(40)
    assert training.share(training.taken[changed + SETTLED]) <= budget


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_holds_where_steps_become_shorter_and_none_is_quiet_any_more(
    budget: float, noise: float
) -> None:
    """Waiting for a quiet step is in vain: what is known of them is of the past, as the busy ones show."""
    now = [replace(NORMAL, noise=noise, slower=0.0)]
    training = Training(lambda _: now[0], Limits(budget=budget)).run_checkpoints(30)
    now[0], changed = replace(now[0], step_s=NORMAL.step_s / 3, always_busy=True), len(training.taken)
    training.run_checkpoints(40)
    assert training.share(training.taken[changed + SETTLED]) <= budget


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("once_count", [1, 2])
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_the_first_checkpoints_pay_once_is_repaid_once(
    budget: float, once_count: int, noise: float, lookahead: int
) -> None:
    """10 s that no later one takes: each that took them is repaid within the budget, and then all is as usual.

    With noise, slower steps count by the upper end of what is known of them: another bound, the same for all.
    """
    usual = Training(lambda _: NORMAL, Limits(budget=budget)).run_checkpoints(SETTLED)
    most = 0.5 / budget / NORMAL.step_s if noise else 1.5 * usual.decision.interval_steps
    world = replace(NORMAL, noise=noise, once_s=10.0, once_count=once_count)
    training = Training(lambda _: world, Limits(budget=budget), lookahead=lookahead)
    training.run_checkpoints(once_count + 1)
    repaid_s = sum(training.base_s[training.taken[0] + 1 : training.taken[-1] + 1])
    assert repaid_s * budget >= 10.0 * once_count
    assert repaid_s * budget <= 12.5 * once_count
    training.run_checkpoints(SETTLED - once_count)
    assert training.decision.interval_steps <= most
    assert training.taken[-1] - training.taken[once_count] <= SETTLED * most


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_the_first_checkpoint_of_a_restart_pays_once_changes_nothing(budget: float) -> None:
    world = replace(NORMAL, once_s=10.0)
    training = Training(lambda _: world, Limits(budget=budget)).run_checkpoints(20)
    training.run(training.decision.interval_steps)
    learnt = training.decision.interval_steps
    training.restart()
    for _ in range(2 * SETTLED):
        training.run_checkpoints(1)
        assert training.decision.interval_steps == learnt


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("stalls_s", [(10.0, 0.005), (0.005, 10.0), (10.0, 10.0, 0.005)])
def test_stalls_that_are_dear_again_and_again_are_believed_at_the_next_one(
    stalls_s: tuple[float, ...], budget: float
) -> None:
    """A cheap one among them is followed once: by the tenth checkpoint at the latest the budget holds."""
    now = [replace(NORMAL, eager_s=stalls_s[0])]
    training = Training(lambda _: now[0], Limits(budget=budget))
    for number in range(1, 60):
        training.run_checkpoints(1)
        now[0] = replace(NORMAL, eager_s=stalls_s[number % len(stalls_s)])
    assert training.share(training.taken[SETTLED]) <= budget


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("drive_noise", [0.0, 0.3])
def test_a_device_that_recovers_takes_the_interval_along_though_its_speed_varies(
    drive_noise: float, seed: int
) -> None:
    """A fall to a fifth is no noise: waiting until its samples outweigh the slow ones' took up to 17 checkpoints."""
    now = [replace(NORMAL, step_s=0.015, copy_s=0.005, persist_s=0.1, drive_noise=drive_noise)]
    training = Training(lambda _: now[0], Limits(budget=0.9), seed=seed).run_checkpoints(20)
    now[0] = replace(now[0], persist_s=0.5)
    slow = training.run_checkpoints(SETTLED).decision.interval_steps
    assert slow * 0.015 >= 0.4
    now[0] = replace(now[0], persist_s=0.1)
    assert training.run_checkpoints(SETTLED).decision.interval_steps <= slow / 2


@pytest.mark.parametrize(("seed", "slow_count"), [(108, 10), (31, 12)])
def test_a_fall_by_old_and_new_writes_together_does_not_hold_up_the_one_that_is_due(
    slow_count: int, seed: int
) -> None:
    """A fall that had to be taken back, then one by a mean of slow and fast writes: the next waited ten checkpoints."""
    now = [replace(NORMAL, step_s=0.015, noise=0.05, copy_s=0.005, persist_s=0.1, drive_noise=0.3)]
    training = Training(lambda _: now[0], Limits(budget=0.9), seed=seed).run_checkpoints(10)
    now[0] = replace(now[0], persist_s=0.5)
    slow = training.run_checkpoints(slow_count).decision.interval_steps
    now[0], recovered = replace(now[0], persist_s=0.1), len(training.taken)
    assert training.run_checkpoints(SETTLED).decision.interval_steps <= slow / 2
    falls = [change for change in training.changes if change.checkpoint >= recovered]
    assert len(falls) == 2, "else the test has lost its subject"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "world",
    [NORMAL, replace(NORMAL, copy_s=0.5), replace(NORMAL, slower=0.3), replace(NORMAL, step_s=2.0)],
    ids=["normal", "long copy", "writing slows steps", "long steps"],
)
def test_with_noise_the_budget_holds_once_it_is_decided(world: World, budget: float, seed: int) -> None:
    noisy = replace(world, noise=0.3)
    training = Training(lambda _: noisy, Limits(budget=budget), seed=seed)
    assert share_once_decided(training) <= budget
    assert_calm(training, SETTLED)


@pytest.mark.timeout(600)  # up to a minute of computing each, and others compute beside it
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_with_noise_the_budget_holds_again_after_a_change_and_after_its_end(
    before: World, after: World, budget: float
) -> None:
    """What is sure by 95 % may miss once in so many runs, not twice."""
    missed = 0
    for seed in range(NOISY_RUNS):
        missed += not holds_again(before, after, budget, seed)
        assert missed <= 1, seed


def holds_again(before: World, after: World, budget: float, seed: int) -> bool:
    """A change must be clear by DRIFT_Z deviations, an interval by SURE_Z: that takes so many times as many steps."""
    now = [replace(before, noise=0.3)]
    training = Training(lambda _: now[0], Limits(budget=budget), seed=seed)
    until_decided(training)
    shares: list[float] = []
    for world in (after, before):
        noisy = now[0] = replace(world, noise=0.3)
        begins_so = Training(lambda _, noisy=noisy: noisy, Limits(budget=budget), seed=seed + 1)
        training.run(math.ceil((DRIFT_Z / SURE_Z) ** 2 * until_decided(begins_so)))
        shares.append(share_once_decided(training))
    return max(shares) <= budget


def test_the_interval_of_confidence_holds_what_a_checkpoint_really_costs() -> None:
    """In most runs of steps that vary by 30 %, each cycle of which has quiet ones; one in twenty may be outside."""
    world = replace(NORMAL, noise=0.3, slower=0.1)
    held, runs = 0, 8
    for seed in range(runs):
        training = Training(lambda _: world, seed=seed)
        until_decided(training)
        decision, since = training.decision, len(training.taken)
        assert decision.cost_share is not None
        assert decision.cost_half_width is not None
        interval_s = decision.interval_steps * world.step_s
        first = training.taken[-1] + 1
        training.run_checkpoints(100)
        true_s = sum(training.excess_s[first : training.taken[-1] + 1]) / (len(training.taken) - since)
        held += abs(decision.cost_share - true_s / interval_s) <= decision.cost_half_width
    assert held >= runs - 1


def test_steady_noise_changes_the_interval_less_and_less() -> None:
    noisy = replace(NORMAL, noise=0.3, slower=0.1)
    training = Training(lambda _: noisy, seed=3).run(9000)
    assert_calm(training, SETTLED)
    late = [change for change in training.changes if change.step > 6000]
    assert len(late) <= 1


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("burst_s", [0.1, 0.3, 1.0, 3.0])
def test_a_neighbour_that_comes_in_bursts_does_not_make_the_interval_flap(burst_s: float, seed: int) -> None:
    """A processor that is shared and then is not again, for about as long as checkpoints are apart: no steady noise.

    At most one change per five checkpoints on the whole, and in no twenty of them more than five.
    """
    alone = World(step_s=0.01, eager_s=0.002, copy_s=0.05, persist_s=0.02, slower=0.0, noise=0.1)
    beside = replace(alone, step_s=0.02)
    draw = random.Random(seed)
    bursts: list[World] = []
    while len(bursts) < 20_000:
        now = alone if draw.random() < 0.5 else beside
        bursts += [now] * math.ceil(draw.expovariate(1 / burst_s) / now.step_s)
    training = Training(lambda step: bursts[step], Limits(budget=0.2), seed=seed).run_checkpoints(100)
    changed_at = [change.checkpoint for change in training.changes if change.checkpoint >= SETTLED]
    assert len(changed_at) <= (100 - SETTLED) / CALM_CHECKPOINTS
    for first in changed_at:
        assert sum(first <= each < first + 4 * CALM_CHECKPOINTS for each in changed_at) <= 5, training.changes
    assert training.share(training.taken[SETTLED]) <= 0.2


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("budget", BUDGETS)
def test_evaluations_are_no_cost(budget: float, noise: float) -> None:
    world = replace(NORMAL, copy_s=0.3, pause_s=60.0, pause_every=37, noise=noise)
    training = Training(lambda _: world, Limits(budget=budget))
    undisturbed = Training(lambda _: replace(world, pause_s=0.0), Limits(budget=budget))
    if not noise:
        training.run_checkpoints(40)
        assert training.share(training.taken[SETTLED]) <= budget, "from the tenth checkpoint on"
    assert share_once_decided(training) <= budget
    assert share_once_decided(undisturbed) <= budget
    intervals = training.decision.interval_steps, undisturbed.decision.interval_steps
    assert intervals[0] == pytest.approx(intervals[1], rel=0.35 if noise else 0)


@pytest.mark.parametrize(
    ("budget", "persist_s", "every"),
    [(0.01, 0.8, 15), (0.01, 3.0, 19), (0.01, 3.0, 36)]
    + [(budget, 3.0, every) for budget in (0.035, 0.1) for every in (18, 19, 36)],
)
def test_evaluations_in_step_with_checkpoints_hold_them_up_for_a_moment_only(
    budget: float, persist_s: float, every: int
) -> None:
    """Nearly all steps are busy, and each evaluation comes as many steps after a checkpoint: it looks like its cost.

    The interval that follows from that shows that it is none: evaluations go on to come as often.
    """
    steps = 20_000
    world = replace(NORMAL, persist_s=persist_s)
    usual = Training(lambda _: world, Limits(budget=budget)).run_checkpoints(40).decision.interval_steps
    evaluates = replace(world, pause_s=60.0, pause_every=every)
    training = Training(lambda _: evaluates, Limits(budget=budget)).run(steps)
    assert training.share(training.taken[SETTLED]) <= budget
    assert len(training.taken) >= 0.75 * steps / usual


@pytest.mark.parametrize("every", [20, 37, 100])
@pytest.mark.parametrize("late_after", [1, 3, 8])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_holds_where_both_checkpoints_and_evaluations_make_steps_long(
    budget: float, late_after: int, every: int
) -> None:
    """However many more evaluations than checkpoints there are: few of those are near one."""
    world = World(
        step_s=0.02,
        copy_s=0.01,
        eager_s=0.002,
        persist_s=0.1,
        late_s=0.2,
        late_after=late_after,
        pause_s=2.0,
        pause_every=every,
    )
    training = Training(lambda _: world, Limits(budget=budget)).run(40_000)
    assert training.share(training.taken[SETTLED]) <= budget


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_holds_after_restarts(budget: float, noise: float) -> None:
    """Each goes on with what was known: what it may cost is known from its first checkpoint on."""
    world = replace(NORMAL, copy_s=0.3, noise=noise)
    training = Training(lambda _: world, Limits(budget=budget))
    share_once_decided(training)
    for kind in FailureKind:
        training.run(training.decision.interval_steps // 2)
        training.restart(kind)
        restarted = training.step
        assert training.run_checkpoints(25).share(restarted) <= budget


def test_a_restart_goes_on_with_what_was_learnt() -> None:
    training = Training(lambda _: replace(NORMAL, copy_s=0.5), Limits(budget=0.01)).run_checkpoints(20)
    training.run(training.decision.interval_steps // 2)  # until it is durable
    interval, step = training.decision.interval_steps, training.taken[-1]
    training.restart()
    assert training.step == step
    training.run_checkpoints(1)
    assert training.taken[-1] - step == interval, "no second profile"
    training.run(interval // 2)
    training.restart(FailureKind.NODE)
    assert training.machine.memory.meter.trainer_failures == 1
    assert training.machine.memory.meter.node_failures == 1


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("count", [2, 3, 4, CALM_CHECKPOINTS])
def test_the_interval_comes_down_though_each_attempt_takes_few_checkpoints(count: int, budget: float) -> None:
    now = [replace(NORMAL, eager_s=0.5)]
    training = Training(lambda _: now[0], Limits(budget=budget)).run_checkpoints(20)
    cheap = Training(lambda _: NORMAL, Limits(budget=budget)).run_checkpoints(20).decision.interval_steps
    now[0] = NORMAL
    for _ in range(math.ceil(2 * CALM_CHECKPOINTS / count)):
        training.run_checkpoints(count).run(8)  # until it is durable
        training.restart(None)
    assert training.run_checkpoints(1).decision.interval_steps <= 1.5 * cheap


@pytest.mark.parametrize("longer", [3.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_attempts_shorter_than_an_interval_of_longer_steps_get_their_checkpoint(
    longer: float, noise: float
) -> None:
    """The interval that is known is one of steps: what was 20 s may be an hour now, and all attempts die before."""
    now = [replace(NORMAL, noise=noise, eager_s=0.5)]
    training = Training(lambda _: now[0], Limits(budget=0.01)).run_checkpoints(20).run(10)
    interval = training.decision.interval_steps
    now[0] = replace(now[0], step_s=longer * NORMAL.step_s)
    anew = Training(lambda _: now[0], Limits(budget=0.01)).run_checkpoints(20).decision.interval_steps
    training.restart(FailureKind.NODE)
    step = training.step
    training.run(24)
    assert training.decision.interval_steps <= 1.5 * anew
    first = training.run_checkpoints(1).taken[-1] - step
    assert first <= max(24, 1.5 * anew) + 4 < interval


def test_longer_steps_after_a_restart_leave_the_least_interval_in_steps() -> None:
    world = replace(NORMAL, step_s=0.2)
    now = [world]
    training = Training(lambda _: now[0], Limits(budget=0.9, least_steps=10)).run_checkpoints(20).run(9)
    assert training.decision.interval_steps == 10
    now[0] = replace(world, step_s=1.3 * world.step_s)
    training.restart(FailureKind.NODE)
    assert training.run(30).decision.interval_steps == 10


def test_a_neighbour_in_bursts_before_the_first_checkpoint_of_an_attempt_changes_the_interval_once() -> None:
    """And what it changed is no fall that was taken back, after which real ones would have to wait."""
    alone = World(step_s=0.01, eager_s=0.5, copy_s=0.05, persist_s=0.02, slower=0.0, noise=0.1)
    now = [alone]
    training = Training(lambda _: now[0], Limits(budget=0.01)).run_checkpoints(20).run(50)
    training.restart(None)
    changed = len(training.changes)
    for _ in range(5):
        now[0] = replace(alone, step_s=0.02)
        training.run(150)
        now[0] = alone
        training.run(150)
    assert len(training.changes) - changed <= 2
    training.run_checkpoints(2)
    now[0] = replace(alone, eager_s=0.05)
    dear = training.decision.interval_steps
    assert training.run_checkpoints(12).decision.interval_steps < dear / 2


def test_limits_that_rank_0_hears_of_before_the_other_ranks_figures_are_followed_later() -> None:
    """Its own checkpoints are cheap, another rank's dear: the interval is that one's."""
    slow = Figures(step=exactly(0.2), stall=exactly(10.0), persist=exactly(0.8), held=exactly(1.0))
    training = Training(lambda _: NORMAL, lookahead=8)
    training.machine.hear([slow])
    training.run_checkpoints(20, steps_max=10**6).run(30)
    interval = training.decision.interval_steps
    training.limits = Limits(budget=0.03)
    training.restart(None)
    training.run(min(12, interval // 8))
    assert training.decision.interval_steps == interval


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Limits(budget=0.01), Limits(budget=0.1)),
        (Limits(mtbf_s=1e6), Limits(mtbf_s=1e6, most_s=10.0)),
        (Limits(mtbf_s=1e6), Limits(mtbf_s=1e3)),
        (Limits(mtbf_s=1e3), Limits(mtbf_s=1e6)),
        (Limits(least_steps=2000), Limits()),
        (Limits(), Limits(least_s=400.0)),
    ],
)
def test_a_restart_with_other_limits_follows_them_without_any_calm(before: Limits, after: Limits) -> None:
    training = Training(lambda _: NORMAL, before).run_checkpoints(20).run(10)
    interval, step = training.decision.interval_steps, training.taken[-1]
    asked = Training(lambda _: NORMAL, after).run_checkpoints(20).decision.interval_steps
    training.limits = after
    training.restart(None)
    training.run_checkpoints(1)
    assert training.decision.interval_steps == pytest.approx(asked, rel=0.05)
    assert training.taken[-1] - step <= max(asked, interval // 8 + 2)


def test_the_profile_comes_first() -> None:
    training = Training(lambda _: NORMAL).run(PROFILE_STEPS)
    assert training.taken == []
    assert training.decision.kind is BoundKind.PROFILE
    assert training.decision.reason.startswith("profile: ")
    training.run(10)
    assert len(training.taken) == 1


def test_a_profile_that_has_all_its_steps_is_said_to_be_complete() -> None:
    machine = FrequencyMachine(Limits())
    said: list[str] = []
    for number in range(3 * PROFILE_STEPS):
        machine.observe(StepEnded(at_s=float(number), step_s=1.0, is_busy=False))
        said.append(machine.decision.reason)
    begun = [text for text in said if "before the first checkpoint" in text]
    assert begun == said[: len(begun)]
    assert f"{PROFILE_STEPS - 1} of {PROFILE_STEPS} quiet steps" in begun[-1]
    assert all("profile: complete after" in text for text in said[len(begun) :])


def test_the_profile_of_long_steps_is_short() -> None:
    training = Training(lambda _: replace(NORMAL, step_s=30.0)).run(PROFILE_STEPS // 2)
    assert training.taken != []


@pytest.mark.parametrize("limits", [Limits(most_steps=5), Limits(most_s=5.0)])
def test_the_profile_is_over_when_as_much_is_done_as_may_be_lost(limits: Limits) -> None:
    training = Training(lambda _: replace(NORMAL, step_s=1.0), limits).run_checkpoints(1)
    assert training.taken == [PROFILE_STEPS_MIN]


def test_what_nobody_could_write_is_not_tried_at_each_step() -> None:
    training = Training(lambda _: replace(NORMAL, persist_s=1e9), slots=64).run(1000)
    assert 5 <= len(training.taken) <= 12


def test_each_decision_says_why_and_what_it_costs() -> None:
    training = Training(lambda _: replace(NORMAL, copy_s=0.5)).run_checkpoints(20)
    decision = training.decision
    assert decision.reason == "bound by the budget: 321 ms stall + 20 ms slower steps / 3.5 %"
    assert decision.cost_share == pytest.approx(0.341 / (decision.interval_steps * 0.2), rel=0.01)
    assert decision.cost_share is not None
    assert decision.cost_share <= 0.035
    assert decision.steps_undecided == 0
    waiting = Training(lambda _: replace(NORMAL, commit_s=3.095, slower=0.0)).run_checkpoints(20)
    assert waiting.decision.reason == "bound by persist bandwidth: 4 s / 2 slots"
    assert waiting.skipped == []


@pytest.mark.parametrize(
    ("world", "limits"),
    [
        (World(step_s=40.0, eager_s=1.75, slower=0.0), Limits(most_s=60.0)),
        (World(step_s=1.0, eager_s=0.001, copy_s=0.1, persist_s=2.4, slower=0.0), Limits(most_s=5.4)),
    ],
    ids=["budget", "bandwidth"],
)
def test_where_no_whole_number_of_steps_keeps_both_the_goal_is_said_to_be_missed(
    world: World, limits: Limits
) -> None:
    """Between 50 and 55 s lies no step of 40 s; one of them was broken without a word."""
    training = Training(lambda _: world, limits).run_checkpoints(15)
    begin = training.step
    training.run_checkpoints(10)
    assert training.decision.goal_missed
    assert training.share(begin) <= limits.budget
    assert not [step for step in training.skipped if step > begin]


def test_the_least_and_the_most_of_the_user() -> None:
    training = Training(lambda _: NORMAL, Limits(least_steps=50)).run_checkpoints(15)
    assert training.decision.interval_steps == 50
    assert training.decision.kind is BoundKind.LEAST
    missed = Training(lambda _: NORMAL, Limits(most_steps=5)).run_checkpoints(15).decision
    assert "not possible, persist bandwidth" in missed.goal_missed
    capped = Training(lambda _: NORMAL, Limits(mtbf_s=1e6, most_s=20.0)).run_checkpoints(15).decision
    assert capped.kind is BoundKind.MOST
    assert capped.interval_steps == int((20.0 - 0.905) / 0.2)


BUSY = replace(NORMAL, persist_s=2.0, commit_s=1.9, slower=0.001)
"""With two slots something is written all the time."""


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_hardly_any_checkpoint_waits_for_quiet_steps_longer_than_work_may_be_lost(lookahead: int) -> None:
    training = Training(lambda _: BUSY, Limits(most_s=7.0), lookahead=lookahead).run_checkpoints(400)
    settled = training.taken[2 * SETTLED :]
    waits = [later - earlier for earlier, later in itertools.pairwise(settled)]
    assert training.decision.goal_missed == ""
    assert sum(wait * BUSY.step_s > 7.0 - 4.0 for wait in waits) <= len(waits) / 100


@pytest.mark.parametrize("slower", [0.05, 0.1, 0.3])
def test_the_budget_holds_where_quiet_steps_take_longer_than_work_may_be_lost(slower: float) -> None:
    world = replace(BUSY, slower=slower, noise=0.1)
    training = Training(lambda _: world, Limits(most_s=7.0))
    assert share_once_decided(training) <= Limits().budget
    assert "not possible, the budget" in training.decision.goal_missed


def test_every_n_is_every_n() -> None:
    fixed = FixedInterval(5)
    fixed.observe(CheckpointStalled(stall_s=100.0))
    assert [step for at in range(1, 25, 8) for step in fixed.due(at, at + 8)] == [5, 10, 15, 20]
    assert fixed.decision.reason == "every=5, as asked"
    assert FixedInterval(1).due(3, 5) == (3, 4)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.booleans(), st.floats(0, 5)), min_size=40, max_size=120),
    st.integers(1, 8),
)
def test_any_times_give_boundaries_in_order_and_an_interval(
    steps: Sequence[tuple[float, bool, float]], lookahead: int
) -> None:
    """Whatever is measured: each boundary is decided once, the least is kept, the decision can be explained."""
    machine = FrequencyMachine(Limits(least_steps=3))
    now_s, horizon = 0.0, 1
    listed: list[int] = []
    for number, (step_s, is_busy, stall_s) in enumerate(steps, start=1):
        now_s += step_s
        machine.observe(StepEnded(at_s=now_s, step_s=step_s, is_busy=is_busy))
        if number >= horizon - lookahead // 2:
            begin = max(horizon, number)
            horizon = begin + lookahead
            due = machine.due(begin, horizon)
            assert all(begin <= step < horizon for step in due)
            listed += due
        if number in listed:
            machine.observe(CheckpointStalled(stall_s=stall_s))
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(listed))
    assert machine.decision.interval_steps >= 1
    assert machine.decision.reason


def test_steps_that_take_no_time_leave_the_decision_as_it_was() -> None:
    """A clock that stands still; what was decided before it did goes on to be told."""
    machine = FrequencyMachine(Limits())
    for number in range(1, 2 * PROFILE_STEPS):
        machine.observe(StepEnded(at_s=float(number), step_s=1.0, is_busy=False))
    machine.observe(CheckpointStalled(stall_s=0.1))
    machine.due(1, 2)
    before = machine.decision
    machine.hear([Figures(step=exactly(0.0))])
    machine.due(2, 1000)
    assert machine.decision == before


def test_a_failure_that_is_told_is_counted() -> None:
    machine = FrequencyMachine(Limits(), memory=FrequencyMemory(meter=MeterMemory(trained_s=10.0)))
    machine.observe(Failed(kind=FailureKind.NODE))
    assert machine.memory.meter.node_failures == 1


def test_what_could_not_be_taken_is_tried_again_soon() -> None:
    training = Training(lambda _: replace(NORMAL, copy_s=0.5), Limits(budget=0.01)).run_checkpoints(20)
    interval, machine = training.decision.interval_steps, training.machine
    due = training.taken[-1] + interval
    assert machine.due(due, due + 1) == (due,)
    machine.observe(CheckpointSkipped(step=due))
    again = next(step for step in range(due + 1, due + interval) if machine.due(step, step + 1))
    assert again - due == interval // 8


@pytest.mark.parametrize("is_begun", [True, False], ids=["another rank had no room", "no room"])
def test_what_is_tried_in_vain_again_and_again_is_tried_once_an_interval(is_begun: bool) -> None:
    """The ranks that could begin their part pay for it each time."""
    training = Training(lambda _: replace(NORMAL, copy_s=0.5), Limits(budget=0.01)).run_checkpoints(20)
    interval, machine = training.decision.interval_steps, training.machine
    fails = [True] * 6 + [False] + [True] * 4
    tried = [training.taken[-1]]
    for step in range(tried[0] + 1, tried[0] + 8 * interval):
        at_s = training.now_s + step * NORMAL.step_s
        machine.observe(StepEnded(at_s=at_s, step_s=NORMAL.step_s, is_busy=False))
        if not machine.due(step, step + 1):
            continue
        tried.append(step)
        is_vain = fails.pop(0)
        if is_begun or not is_vain:
            machine.observe(CheckpointTaken(step=step))
        if is_vain:
            machine.observe(CheckpointSkipped(step=step))
        if not fails:
            break
    at_first = [interval, interval // 8, interval // 4, interval // 2]
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [
        *[*at_first, interval, interval, interval],
        *at_first,
    ]


def test_while_nothing_becomes_durable_the_reason_says_so_and_a_goal_is_missed() -> None:
    """It named the budget, by which a checkpoint would have been due long before."""
    never = replace(NORMAL, persist_s=1e9)
    found = Training(lambda _: never, Limits(budget=0.1, most_s=4.0)).run(1000).decision
    assert found.kind is BoundKind.PROFILE, "nothing that was measured binds it"
    assert found.reason == "no checkpoint has become durable yet: they are tried less often meanwhile"
    assert found.interval_steps * NORMAL.step_s > 4.0
    assert "not possible" in found.goal_missed
    well = Training(lambda _: NORMAL, Limits(budget=0.1, most_s=60.0)).run(1000).decision
    assert (well.reason[:8], well.goal_missed) == ("bound by", "")


def test_a_cost_is_never_told_below_the_stalls() -> None:
    """What others stall longer is taken from this rank's slower steps, which are less than nothing then."""
    training = Training(lambda _: replace(NORMAL, noise=0.1)).run_checkpoints(20)
    stall = Spread(mean=0.5, deviation=0.05, count=50)
    training.machine.hear([Figures(stall=stall)])
    found = training.run(3000).decision
    interval_s = found.interval_steps * NORMAL.step_s
    assert found.cost_share == pytest.approx(0.5 / interval_s, rel=0.05)
    assert found.cost_least == pytest.approx(stall.low / interval_s, rel=0.05)


def test_peers_are_heard() -> None:
    training = Training(lambda _: NORMAL).run_checkpoints(20)
    alone = training.decision.interval_steps
    slow = replace(training.machine.figures, stall=exactly(0.2))
    training.machine.hear([slow])
    training.run_checkpoints(5)
    assert training.decision.interval_steps > 4 * alone
    assert training.decision.reason.startswith("bound by the budget: 200 ms stall")
