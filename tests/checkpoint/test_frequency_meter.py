"""What a rank makes of what it observes."""

import pytest

from everstep.checkpoint.drift_machine import Spread
from everstep.checkpoint.frequency_meter_machine import (
    FAILURES_NEEDED,
    UNPAIRED_MAX,
    WARMUP_STEPS,
    CostMeter,
    MeterMemory,
)
from everstep.checkpoint.frequency_types import (
    CheckpointPersisted,
    CheckpointStalled,
    CheckpointTaken,
    Failed,
    FailureKind,
    StepEnded,
    StorageKnown,
)

STEP_S = 0.2


class Meter(CostMeter):
    """Counts the clock and the steps by itself."""

    def __init__(self, memory: MeterMemory | None = None) -> None:
        super().__init__(memory)
        self.now_s = 0.0

    def steps_of(self, *times_s: float, busy: bool = False) -> "Meter":
        for step_s in times_s:
            self.now_s += step_s
            self.observe(StepEnded(at_s=self.now_s, step_s=step_s, is_busy=busy))
        return self

    def take(self) -> "Meter":
        self.observe(CheckpointTaken(step=0))
        return self


def warm() -> Meter:
    return Meter().steps_of(*[7.0] * WARMUP_STEPS).steps_of(*[STEP_S] * 20)


def slower_s(meter: CostMeter) -> float:
    slower = meter.figures.slower
    assert slower is not None
    return slower.mean


def step_s(meter: CostMeter) -> float:
    step = meter.figures.step
    assert step is not None
    return step.mean


def test_the_first_steps_are_not_measured() -> None:
    meter = Meter().steps_of(*[7.0] * WARMUP_STEPS)
    assert meter.figures.step is None
    assert step_s(meter.steps_of(STEP_S)) == STEP_S


def test_without_quiet_steps_the_mean_of_all_is_the_best_guess() -> None:
    meter = Meter().steps_of(*[7.0] * WARMUP_STEPS).steps_of(0.2, 0.4, busy=True)
    assert step_s(meter) == pytest.approx(0.3)
    assert meter.quiet_steps == 0


@pytest.mark.parametrize("pauses", [1, 2])
def test_an_evaluation_is_no_step(pauses: int) -> None:
    meter = warm().steps_of(*[30.0] * pauses).steps_of(STEP_S)
    assert step_s(meter) == pytest.approx(STEP_S)
    assert meter.pauses == pauses


@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_an_evaluation_among_the_first_steps_is_none(at: int) -> None:
    """Taken for a step, it would make all later ones look ordinary: its deviation is that of a pause."""
    meter = Meter().steps_of(7.0, *[STEP_S] * (WARMUP_STEPS - 1 + at)).steps_of(30.0)
    for _ in range(5):
        meter.steps_of(*[STEP_S] * 20, 30.0)
    assert step_s(meter.steps_of(STEP_S)) == pytest.approx(STEP_S)
    assert meter.pauses == 6


@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_an_evaluation_right_after_steps_became_others_is_none(at: int) -> None:
    meter = warm()
    while not meter.drifts:
        meter.steps_of(1.5 * STEP_S)
    meter.steps_of(*[1.5 * STEP_S] * at)
    for _ in range(5):
        meter.steps_of(30.0, *[1.5 * STEP_S] * 20)
    assert step_s(meter) == pytest.approx(1.5 * STEP_S)
    assert meter.pauses == 5


def test_many_long_steps_in_a_row_are_the_new_length() -> None:
    meter = warm().steps_of(*[30.0] * 3)
    assert step_s(meter) == pytest.approx(30.0)
    assert meter.pauses == 0


def test_busy_steps_are_compared_with_the_quiet_ones_of_their_cycle() -> None:
    meter = warm().take().steps_of(0.25, 0.25, busy=True).steps_of(0.2, 0.2).take()
    assert slower_s(meter) == pytest.approx(0.1)
    meter.steps_of(1.25, 1.25, busy=True).steps_of(1.2, 1.2).take()
    assert slower_s(meter) == pytest.approx(0.1), "all became longer: no cost of checkpoints"


def test_a_long_cycle_is_compared_before_it_ends() -> None:
    meter = warm().take().steps_of(0.3, busy=True).steps_of(*[0.2] * 10)
    assert slower_s(meter) == pytest.approx(0.1)


def test_a_pause_among_busy_steps_is_no_cost() -> None:
    meter = warm()
    for _ in range(4):
        meter.take().steps_of(0.25, busy=True).steps_of(*[0.2] * 10)
    meter.take().steps_of(30.0, busy=True).steps_of(*[0.2] * 10)
    meter.take().steps_of(0.25, busy=True).steps_of(*[0.2] * 10)
    assert slower_s(meter) == pytest.approx(0.05)
    assert meter.pauses == 1
    for _ in range(6):
        meter.take().steps_of(30.0, busy=True).steps_of(*[0.2] * 10)
    assert slower_s(meter) == pytest.approx(29.8), (
        "again and again right after a checkpoint: that is its cost"
    )


@pytest.mark.parametrize("after", [1, 2, 3, 4, 6])
def test_a_long_step_as_many_steps_after_each_checkpoint_is_its_cost(after: int) -> None:
    meter = warm()
    for _ in range(10):
        meter.take().steps_of(*[0.25] * (after - 1), 2.0, *[0.25] * (6 - after), busy=True).steps_of(0.2, 0.2)
    assert slower_s(meter.take()) == pytest.approx(5 * 0.05 + 1.8)


@pytest.mark.parametrize("busy", [(4, 4), (6, 4), (6, 6), (5, 3)], ids=str)
def test_a_long_step_soon_after_writing_ended_is_the_cost_of_checkpoints(busy: tuple[int, int]) -> None:
    """A commit, memory that is given back: the sixth step after each, whether or not something is still written."""
    meter = warm()
    for number in range(20):
        meter.take()
        for step in range(1, 17):
            meter.steps_of(2.0 if step == 6 else 0.2, busy=step <= busy[number % 2])
    meter.take()
    assert slower_s(meter) == pytest.approx(1.8)
    assert meter.compared.total_s == pytest.approx(1.8 * 20, rel=0.1), "the first one may be a pause"
    assert meter.compared.steps == sum(busy) * 10, "busy ones alone"


def test_long_steps_anywhere_among_busy_ones_are_a_cost_where_quiet_ones_have_none() -> None:
    meter = warm()
    for number in range(20):
        before = number % 6
        meter.take().steps_of(*[0.25] * before, 2.0, *[0.25] * (5 - before), busy=True).steps_of(*[0.2] * 20)
    assert slower_s(meter) == pytest.approx(5 * 0.05 + 1.8, rel=0.1), "one alone was taken for a pause"


def test_pauses_in_step_with_checkpoints_are_no_cost_where_quiet_steps_have_as_many() -> None:
    meter = warm()
    for _ in range(20):
        meter.take().steps_of(0.25, 0.25, 30.0, *[0.25] * 7, busy=True)
        meter.steps_of(*[0.2] * 4, 30.0, *[0.2] * 5)
    assert slower_s(meter) == pytest.approx(10 * 0.05)
    assert meter.pauses >= 38


def test_pauses_that_were_taken_for_a_cost_are_withdrawn_once_they_come_as_often_without() -> None:
    meter = warm()
    for _ in range(10):
        meter.take().steps_of(0.25, 0.25, 30.0, *[0.25] * 7, busy=True).steps_of(0.2, 0.2)
    assert slower_s(meter.take()) == pytest.approx(9 * 0.05 + 29.8)
    meter.steps_of(0.25, busy=True)
    for number in range(1, 10):
        assert meter.withdrawn == (number > 8)
        meter.steps_of(*[0.2] * 11, 30.0, 0.2)
    assert slower_s(meter) == pytest.approx(10 * 0.05, rel=0.1)
    assert meter.compared.total_s == pytest.approx(10 * 10 * 0.05, rel=0.1)


def test_pauses_that_were_taken_for_a_cost_are_withdrawn_by_a_later_attempt() -> None:
    """Some checkpoint comes before it is known, the last one of an attempt for example, and lasts in the next one."""
    before = warm()
    for _ in range(10):
        before.take().steps_of(0.25, 0.25, 30.0, *[0.25] * 7, busy=True).steps_of(0.2, 0.2)
    before.take()
    meter = Meter(Meter(before.memory).memory).steps_of(*[STEP_S] * WARMUP_STEPS)
    assert slower_s(meter) == slower_s(before)
    meter.take().steps_of(0.25, busy=True)
    for number in range(1, 10):
        assert meter.withdrawn == (number > 8)
        meter.steps_of(*[0.2] * 11, 30.0, 0.2)
    assert slower_s(meter) == pytest.approx(10 * 0.05, rel=0.2)


def with_a_long_step_each() -> Meter:
    """Return what ten checkpoints have taught that each make a step long, which few others are."""
    meter = warm()
    for number in range(10):
        meter.take().steps_of(0.25, 0.25, 30.0, *[0.25] * 7, busy=True)
        meter.steps_of(*[0.2] * 30, 30.0 if number % 5 == 4 else 0.2, *[0.2] * 30)
    return meter.take()


def pauses_far_from_checkpoints(meter: Meter, step_s: float) -> None:
    for _ in range(10):
        meter.steps_of(*[step_s] * 200, 30.0, step_s)


def test_long_steps_of_checkpoints_stay_their_cost_in_a_later_attempt_before_its_first_one() -> None:
    """All its pauses are far from checkpoints: that says how rare they are, and nothing of steps near one."""
    before = with_a_long_step_each()
    meter = Meter(Meter(before.memory).memory).steps_of(*[STEP_S] * WARMUP_STEPS)
    pauses_far_from_checkpoints(meter, 0.2)
    assert (meter.withdrawn, slower_s(meter)) == (0, slower_s(before))


def test_long_steps_of_checkpoints_stay_their_cost_when_steps_have_become_others() -> None:
    """What was counted before is of other steps; what comes until the next checkpoint is far from any."""
    meter = with_a_long_step_each().steps_of(*[0.25] * 10, busy=True)
    while not meter.drifts:
        meter.steps_of(0.3)
    pauses_far_from_checkpoints(meter, 0.3)
    for number in range(30):
        assert number > 10 or meter.withdrawn == 0
        meter.take().steps_of(*[0.35] * 10, busy=True).steps_of(*[0.3] * 10)
    assert meter.withdrawn == 1, (
        "as many steps near checkpoints as should have had a pause are no longer long"
    )


def test_pauses_that_fall_anywhere_among_busy_steps_are_no_cost() -> None:
    meter = warm()
    for number in range(20):
        meter.take().steps_of(*[0.25] * (3 + number % 4), busy=True).steps_of(30.0, busy=True)
        meter.steps_of(*[0.25] * 3, busy=True).steps_of(0.2, 0.2)
    assert slower_s(meter) == pytest.approx(0.05 * 8.5, rel=0.2)
    assert meter.pauses >= 19


def test_a_pause_after_the_busy_steps_hides_none_of_them() -> None:
    meter = warm()
    for number in range(30):
        pause_at = 0 if number % 3 == 2 else 6
        meter.take().steps_of(0.25, busy=True)
        meter.steps_of(*[0.2] * pause_at, 30.0, *[0.2] * (13 - pause_at))
    assert slower_s(meter.take()) == pytest.approx(0.05)
    assert (meter.compared.steps, meter.pauses) == (30, 30)


def test_a_cycle_in_which_all_steps_changed_is_not_compared() -> None:
    meter = warm()
    for _ in range(4):
        meter.take().steps_of(0.25, busy=True).steps_of(*[0.2] * 10)
    meter.take().steps_of(0.25, busy=True).steps_of(*[0.1] * 20)
    for _ in range(2):
        meter.take().steps_of(0.15, busy=True).steps_of(*[0.1] * 20)
    assert slower_s(meter) == pytest.approx(0.05)


def test_steps_that_are_always_busy_call_for_quiet_ones() -> None:
    meter = warm()
    for _ in range(2):
        meter.take().steps_of(0.25, busy=True).steps_of(0.2, 0.2)
    for _ in range(UNPAIRED_MAX):
        assert not meter.wants_quiet
        meter.take().steps_of(0.25, busy=True)
    assert meter.wants_quiet
    meter.steps_of(0.2, 0.2)
    assert not meter.wants_quiet
    assert slower_s(meter.take()) == pytest.approx(0.05)


def test_what_was_told_is_known() -> None:
    meter = CostMeter()
    meter.observe(StorageKnown(slot_count=3, node="a", capacity_bytes=1000))
    assert meter.figures.fill == {}
    meter.observe(CheckpointStalled(stall_s=0.02))
    meter.observe(CheckpointPersisted(size_bytes=10, persist_s=1.0, held_s=1.5))
    figures = meter.figures
    once = [Spread(mean=value, count=1) for value in (0.02, 1.0, 1.5)]
    assert [figures.stall, figures.persist, figures.held] == once
    assert (figures.slot_count, figures.fill) == (3, {"a": 0.01})


def test_the_time_between_failures_is_learnt_from_enough_of_them() -> None:
    meter = Meter().steps_of(*[100.0] * 9)
    for number in range(FAILURES_NEEDED):
        assert meter.mtbf_s is None
        meter.observe(Failed(kind=FailureKind.NODE if number else FailureKind.TRAINER))
    assert meter.mtbf_s == pytest.approx(900 / FAILURES_NEEDED)
    assert (meter.memory.trainer_failures, meter.memory.node_failures) == (1, FAILURES_NEEDED - 1)
    assert CostMeter(meter.memory).mtbf_s == meter.mtbf_s


def unpaired(busy_s: list[float]) -> Meter:
    """Return a meter that gave up waiting for quiet steps among busy ones that took so long."""
    meter = warm()
    for _ in range(UNPAIRED_MAX):
        meter.take().steps_of(*busy_s, busy=True)
    assert meter.wants_quiet
    meter.give_up_quiet()
    return meter


def test_quiet_steps_longer_than_all_that_is_seen_now_are_forgotten_when_none_comes() -> None:
    meter = unpaired([0.06, 0.08] * 4)
    assert step_s(meter) == pytest.approx(0.07), "a quiet one is no longer than the busy ones"
    assert (meter.quiet_steps, meter.drifts) == (0, 1)
    assert step_s(meter.steps_of(0.05, 0.05)) == pytest.approx(0.05), "the first quiet one is known better"


@pytest.mark.parametrize("busy_s", [[0.2], [0.25], [0.1, 0.3, 0.1, 0.25, 0.1, 0.2]], ids=str)
def test_quiet_steps_that_busy_ones_are_not_surely_shorter_than_stay_known(busy_s: list[float]) -> None:
    meter = unpaired(busy_s)
    assert step_s(meter) == pytest.approx(STEP_S)
    assert (meter.quiet_steps, meter.drifts) == (20, 0)
