"""One checkpoint far dearer than all others is no reason to take them rarely; those that come again and again are."""

import itertools
from dataclasses import replace

import pytest
from training_simulator import Training, World

from everstep.checkpoint.frequency_types import Limits

NORMAL = World(slower=0.0)


@pytest.mark.parametrize("before", [3, 30, 200, 2000])
@pytest.mark.parametrize(
    "once",
    [replace(NORMAL, eager_s=600.0), replace(NORMAL, persist_s=600.0), replace(NORMAL, persist_s=60.0)],
    ids=["the trainer was stopped", "the drive hung", "the drive hung a little"],
)
def test_what_takes_minutes_once_keeps_nobody_from_checkpoints(once: World, before: int) -> None:
    now = [NORMAL]
    training = Training(lambda _: now[0]).run_checkpoints(before)
    usual = training.decision.interval_steps
    now[0] = once
    training.run_checkpoints(1)
    now[0] = NORMAL
    assert (
        training.run_checkpoints(2).run_checkpoints(20).interval_since(training.taken[before + 2])
        <= 2 * usual
    )


def test_the_budget_holds_where_one_stall_in_twenty_takes_a_minute() -> None:
    dear = itertools.cycle([False] * 19 + [True])
    now = [NORMAL]

    def world(_: int) -> World:
        if training.taken and training.taken[-1] == training.step - 1:
            now[0] = replace(NORMAL, eager_s=60.0 if next(dear) else NORMAL.eager_s)
        return now[0]

    training = Training(world)
    training.run_checkpoints(200)
    assert training.share(training.taken[40]) <= Limits().budget
