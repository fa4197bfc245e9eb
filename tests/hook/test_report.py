"""The cost book: what a step took, what stood still, and what it makes of both."""

import logging
import math
from typing import Any

import pytest

from everstep.checkpoint.frequency_machine import FixedInterval
from everstep.checkpoint.frequency_types import (
    BUDGET_DEFAULT,
    BoundKind,
    Decision,
    Limits,
    SlowerSteps,
    StepEnded,
)
from everstep.core.ids import CheckpointId
from everstep.hook.pace import Pace
from everstep.hook.report import BOUNDARIES_NEEDED, FAILURES_KEPT, STEPS_KEPT, CostBook, Report, Skipped
from everstep.hook.run_messages import say_closed
from everstep.hook.skip_reasons import NO_SLOT, skip_reason
from everstep.proto.frames import SkipReason
from everstep.proto.wire import decode_request, pack

LENGTH_BYTES = 4


def report_of(book: CostBook, slower: SlowerSteps | None = None) -> Report:
    return book.report(FixedInterval(10).decision, slower or SlowerSteps())


def pass_boundary(
    book: CostBook,
    arrived_s: float,
    left_s: float,
    *,
    opens_busy: bool,
    guard_s: float,
    only_memory: bool = False,
) -> None:
    book.arrived(arrived_s, guard_s=guard_s)
    book.left(left_s, opens_busy=opens_busy, only_memory=only_memory)


def walked(book: CostBook, steps: list[tuple[float, bool]], stall_s: float = 0.0) -> None:
    """Pass a first boundary, then one after each (seconds, busy); each but the first takes `stall_s`."""
    now_s, opens = 100.0, [busy for _, busy in steps] + [False]
    pass_boundary(book, now_s, now_s, opens_busy=opens[0], guard_s=0.0)
    for (step_s, _), opens_busy in zip(steps, opens[1:], strict=True):
        now_s += step_s
        pass_boundary(book, now_s, now_s + stall_s, opens_busy=opens_busy, guard_s=0.0)
        now_s += stall_s


def test_before_anything_happened_all_is_zero() -> None:
    report = report_of(CostBook())
    assert (report.steps, report.stall_s, report.stall_per_checkpoint_s, report.slowdown) == (
        0,
        0.0,
        0.0,
        0.0,
    )
    assert (report.skipped, report.failures, report.last_complete) == ({}, (), "")


def test_the_last_complete_is_the_newest_whichever_ended_last() -> None:
    book = CostBook()
    for step in (9, 12, 10):
        book.completed(CheckpointId(2, step))
    assert (report_of(book).checkpoints_complete, report_of(book).last_complete) == (3, "2.12")


def test_busy_and_quiet_steps_are_told_apart() -> None:
    book = CostBook()
    walked(book, [(1.0, False), (1.0, False), (9.0, False), (1.5, True), (1.5, True)])
    report = report_of(book, SlowerSteps(steps=1, total_s=0.5))
    assert report.steps == 6
    assert report.step_quiet_s == pytest.approx(1.0)
    assert report.step_busy_s == pytest.approx(1.5)
    assert (report.quiet_steps, report.busy_steps) == (3, 2)
    assert report.compared_steps == 1
    assert report.slower_steps_s == pytest.approx(2 * 0.5), "the other one was like the one that was compared"
    assert report.train_s == pytest.approx(14.0)
    assert report.slowdown == pytest.approx(1.0 / 13.0)


def test_steps_beside_the_allocation_of_memory_cost_no_more_than_is_known() -> None:
    """Nobody has compared them: what steps beside copies take longer was counted for them, too."""
    book = CostBook()
    pass_boundary(book, 100.0, 100.0, opens_busy=True, guard_s=0.0, only_memory=True)
    for at_s in (103.0, 106.0):
        pass_boundary(book, at_s, at_s, opens_busy=True, guard_s=0.0, only_memory=at_s < 106.0)
    pass_boundary(book, 107.5, 107.5, opens_busy=False, guard_s=0.0)
    pass_boundary(book, 108.5, 108.5, opens_busy=False, guard_s=0.0)
    report = report_of(book, SlowerSteps(steps=1, total_s=0.5))
    assert (report.quiet_steps, report.busy_steps, report.saving_steps) == (1, 3, 1)
    assert report.slower_steps_s == pytest.approx(0.5)
    assert "not known of 2 beside the allocation of memory" in str(report)


def test_all_failures_count_though_the_newest_alone_are_kept() -> None:
    book = CostBook()
    for step in range(FAILURES_KEPT + 5):
        book.fail(f"1.{step}: no room")
    book.take_back(f"1.{FAILURES_KEPT}: no room")
    report = report_of(book)
    assert (report.failed_count, len(report.failures)) == (FAILURES_KEPT + 4, FAILURES_KEPT - 1)
    assert f"{FAILURES_KEPT + 4} in all, of the newest {FAILURES_KEPT - 1}: 99 x 1.104: no room" in str(
        report
    )


def test_the_guards_wait_is_stall_and_no_part_of_the_step() -> None:
    book = CostBook()
    pass_boundary(book, 0.0, 0.0, opens_busy=True, guard_s=0.0)
    book.guard_s = 0.25
    pass_boundary(book, 1.25, 1.25, opens_busy=False, guard_s=0.25)
    report = report_of(book)
    assert report.step_busy_s == pytest.approx(1.0)
    assert report.stall_s == pytest.approx(0.25)
    assert report.train_s == pytest.approx(1.25)


def test_all_time_at_boundaries_is_stall_and_no_part_of_a_step() -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * 4, stall_s=0.5)
    report = report_of(book)
    assert report.step_quiet_s == pytest.approx(1.0)
    assert report.train_s == pytest.approx(6.0)
    assert report.stall_s == report.boundary_s == pytest.approx(2.0)
    assert report.slowdown == pytest.approx(0.5)


def test_the_first_boundary_counts_like_any_other() -> None:
    book = CostBook()
    pass_boundary(book, 10.0, 10.5, opens_busy=False, guard_s=0.0)
    pass_boundary(book, 11.5, 11.5, opens_busy=False, guard_s=0.0)
    assert report_of(book).train_s == pytest.approx(1.5)
    assert report_of(book).slowdown == pytest.approx(0.5)


def of_steps(step_s: float, *, boundary_s: float, checkpoint_s: float = 0.0, steps: int = 1000) -> Report:
    """Return what is said where each tenth boundary gets a checkpoint, and all others take `boundary_s`."""
    book, now_s = CostBook(), 0.0
    for number in range(steps):
        now_s += step_s
        book.arrived(now_s, guard_s=0.0)
        is_due = number % 10 == 9
        now_s += checkpoint_s if is_due else boundary_s
        book.left(now_s, opens_busy=False, due=is_due)
    return report_of(book)


def test_what_checkpoints_cost_and_what_boundaries_without_one_cost_are_told_apart() -> None:
    """The interval keeps the first within the budget; nothing but longer steps makes the second less."""
    report = of_steps(0.0003, boundary_s=0.00008, checkpoint_s=0.00003)
    assert report.checkpoint_share == pytest.approx(0.01, rel=0.01)
    assert report.plain_share == pytest.approx(0.9 * 8 / 30, rel=0.01)
    assert report.slowdown == pytest.approx(report.checkpoint_share + report.plain_share)
    assert report.as_frame().added_share == pytest.approx(report.checkpoint_share)
    assert ": checkpoints 1.00 %, boundaries without one 24.02 %" in str(report)


def test_steps_too_short_for_a_boundary_after_each_are_told_with_what_to_do() -> None:
    told = lines_of(of_steps(0.0003, boundary_s=0.00008))["steps too short"]
    assert told == (
        "run.step() takes 80 us without a checkpoint, 26.7 % of a step of 300 us, whatever the interval; "
        "call it once in 16 such steps"
    )
    followed = of_steps(16 * 0.0003, boundary_s=0.00008)
    assert followed.plain_share < BUDGET_DEFAULT / 2
    assert followed.steps_too_short == ""


def test_of_few_boundaries_nothing_is_said() -> None:
    assert of_steps(0.0003, boundary_s=0.00008, steps=BOUNDARIES_NEEDED).steps_too_short == ""


class Loop:
    """A training loop whose truth is known: what its steps beside a checkpoint take longer."""

    def __init__(self, every: int | None) -> None:
        self.pace = Pace(every=every, limits=Limits(least_steps=10, mtbf_s=None))
        self.pace.begin(0, devices=[])
        self.book = CostBook()
        self.step, self.now_s, self.busy_for, self.slower_s = 0, 0.0, 0, 0.0
        self.was_busy = False

    def run(
        self, steps: int, *, step_s: float, slower: float, busy_steps: int = 3, after_s: float = 0.0
    ) -> None:
        """`after_s`: what the first step after the busy ones takes longer."""
        for _ in range(steps):
            self.step += 1
            is_busy = self.busy_for > 0
            added_s = slower * step_s if is_busy else after_s * self.was_busy
            self.was_busy = is_busy
            self.slower_s += added_s
            self.busy_for = max(0, self.busy_for - 1)
            self.now_s += step_s + added_s
            self.pace.arrived(self.book.arrived(self.now_s, guard_s=0.0), guard_s=0.0, copying=False)
            if due := bool(self.pace.due(self.step, self.step + 1)):
                self.busy_for = busy_steps
                self.pace.taken(CheckpointId(1, self.step))
            self.book.left(self.now_s, opens_busy=self.busy_for > 0)
            self.pace.left(0.0, taken=due)

    @property
    def report(self) -> Report:
        return self.book.report(self.pace.decision, self.pace.slower_steps)


@pytest.mark.parametrize("every", [10, None], ids=["every=10", "adaptive"])
@pytest.mark.parametrize("steps_s", [(0.02, 0.005), (0.003, 0.03)], ids=["shorter", "longer"])
def test_slower_steps_are_told_across_a_change_of_steps(
    steps_s: tuple[float, float], every: int | None
) -> None:
    loop = Loop(every)
    for step_s in steps_s:
        loop.run(400, step_s=step_s, slower=0.2)
        assert loop.report.slower_steps_s == pytest.approx(loop.slower_s, rel=0.1)


@pytest.mark.parametrize("busy_steps", [1, 3])
def test_what_checkpoints_make_the_steps_after_their_busy_ones_slower_is_told(busy_steps: int) -> None:
    loop = Loop(every=20)
    loop.run(800, step_s=0.1, slower=0.0, busy_steps=busy_steps, after_s=1.0)
    assert loop.report.slower_steps_s == pytest.approx(loop.slower_s, rel=0.1)
    assert loop.report.compared_steps <= loop.report.busy_steps


def test_steps_that_became_slower_are_no_cost_of_checkpoints() -> None:
    loop = Loop(10)
    loop.run(400, step_s=0.01, slower=0.0)
    loop.run(400, step_s=0.05, slower=0.0)
    assert loop.report.slower_steps_s == pytest.approx(0.0, abs=0.2), "at most one cycle holds both"
    assert loop.report.slowdown < 0.01


def test_while_only_one_kind_of_step_is_known_nothing_is_made_up() -> None:
    book = CostBook()
    walked(book, [(1.0, True)] * 3)
    assert report_of(book).slower_steps_s == 0.0
    assert (report_of(book).quiet_steps, report_of(book).busy_steps) == (0, 3)


def test_steps_that_were_faster_beside_a_copy_do_not_make_training_faster() -> None:
    book = CostBook()
    walked(book, [(2.0, False), (1.0, True)])
    report = report_of(book, SlowerSteps(steps=1, total_s=-1.0))
    assert report.slower_steps_s < 0
    assert report.slowdown == 0.0


def test_stall_per_checkpoint_is_of_those_sealed_and_not_of_boundaries_without_one() -> None:
    book = CostBook()
    book.boundary_s, book.plain_s, book.guard_s, book.sealed = 4.5, 3.0, 0.5, 4
    assert report_of(book).stall_per_checkpoint_s == pytest.approx(0.5)


def test_where_all_time_was_cost_the_share_is_without_bound_and_said_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    book = CostBook()
    pass_boundary(book, 0.0, 0.0, opens_busy=False, guard_s=0.0)
    pass_boundary(book, 0.0, 2.0, opens_busy=False, guard_s=0.0)
    report = report_of(book)
    assert (report.slowdown, report.plain_share) == (math.inf, math.inf)
    assert "cost            all of 2 s of training" in str(report)
    say_closed("small", 2, report)
    assert "slowdown_percent=unknown boundaries_percent=unknown" in caplog.text


def test_what_optimizers_have_waited_since_the_last_boundary_is_time_of_training() -> None:
    book = CostBook()
    pass_boundary(book, 0.0, 0.0, opens_busy=False, guard_s=0.0)
    pass_boundary(book, 1.0, 1.0, opens_busy=False, guard_s=0.0)
    book.guard_s += 3.0
    report = report_of(book)
    assert (report.train_s, report.slowdown) == (4.0, 3.0)
    assert "300.00 % on top of 1 s of training" in str(report)
    pass_boundary(book, 5.0, 5.0, opens_busy=False, guard_s=3.0)
    assert report_of(book).train_s == 5.0


def test_the_checkpoint_after_the_last_boundary_is_in_all_of_which_it_is_a_part() -> None:
    book = CostBook()
    pass_boundary(book, 0.0, 0.0, opens_busy=False, guard_s=0.0)
    pass_boundary(book, 1.0, 1.0, opens_busy=False, guard_s=0.0)
    book.eager_s += 0.5
    book.beyond(0.5)
    report = report_of(book)
    assert (report.eager_s, report.boundary_s, report.train_s) == (0.5, 0.5, 1.5)


def test_a_report_is_a_picture_of_its_moment() -> None:
    book = CostBook()
    book.skip(SkipReason.DAEMON, "no daemon")
    book.failures.append("1.5: full")
    report = report_of(book)
    book.skip(SkipReason.DAEMON, "no daemon")
    book.failures.append("1.6: full")
    assert report.skipped == {SkipReason.DAEMON: Skipped(count=1, example="no daemon")}
    assert report.failures == ("1.5: full",)


def test_texts_that_differ_by_their_figures_are_one_reason() -> None:
    """They made a key each, and a report of thousands of lines."""
    book = CostBook()
    for free in range(1000):
        text = f"an arena of 8 GiB was refused: {free} MiB are free"
        book.skip(skip_reason(text), text)
    example = "an arena of 8 GiB was refused: 999 MiB are free"
    assert report_of(book).skipped == {SkipReason.ERROR: Skipped(count=1000, example=example)}


def test_the_daemon_is_told_the_parts_of_the_cost_and_few_reasons_of_skips() -> None:
    book = CostBook(boundary_s=3.0, eager_s=2.0, wait_s=0.5)
    for text in (NO_SLOT, NO_SLOT, "1.2 GB do not fit", *["no arena: 3 GiB are too much"] * 4):
        book.skip(skip_reason(text), text)
    told = report_of(book).as_frame()
    assert (told.boundary_s, told.eager_s, told.wait_s) == (3.0, 2.0, 0.5)
    assert told.skipped == {SkipReason.SLOT: 2, SkipReason.ERROR: 5}
    assert decode_request(pack(told)[LENGTH_BYTES:]) == told


def test_a_long_run_keeps_a_bounded_past() -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * STEPS_KEPT + [(3.0, False)] * STEPS_KEPT)
    for number in range(FAILURES_KEPT + 5):
        book.failures.append(str(number))
    report = report_of(book)
    assert report.step_quiet_s == pytest.approx(3.0)
    assert report.steps == 2 * STEPS_KEPT + 1
    assert len(report.failures) == FAILURES_KEPT
    assert report.failures[-1] == str(FAILURES_KEPT + 4)


def test_people_read_what_it_cost_and_why() -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * 9 + [(1.5, True)] * 2, stall_s=0.1)
    book.completed(CheckpointId(1, 10))
    for free_mib in (7, 6):
        book.skip(SkipReason.ERROR, f"no memory: {free_mib} MiB are free")
    book.failures.append("1.5: full")
    assert str(report_of(book, SlowerSteps(steps=1, total_s=0.5))).splitlines() == [
        "checkpoints     1 complete, the newest is 1.10",
        "interval        10 steps, every=10, as asked",
        "cost            19.09 % on top of 11 s of training: checkpoints 9.09 %, boundaries without one 10.00 %",
        "  boundaries    1.1 s, of it eager copies 0 us",
        "  guard         0 us in optimizers",
        "  slower steps  1 s in 2 of 12 steps, 1 compared with quiet ones of their time",
        "copy thread     0 us, sealing 0 us, beside training",
        "skipped         2 x no memory: 6 MiB are free",
        "failed          1.5: full",
    ]


def lines_of(report: Report) -> dict[str, str]:
    return {line[:15].strip(): line[16:] for line in str(report).splitlines()}


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, "checkpoints take 1.71 % of training"),
        (
            {"cost_half_width": 0.004},
            "checkpoints take 1.71 % of training, by 95 % confidence 1.31 to 2.11 %",
        ),
        (
            {"cost_half_width": 0.03, "steps_undecided": 2258},
            (
                "checkpoints take 1.71 % of training, by 95 % confidence 0.00 to 4.71 %; "
                "whether slower steps keep the budget is known in about 2258 steps"
            ),
        ),
        (
            {"cost_half_width": 0.03, "cost_least": 0.0165},
            "checkpoints take 1.71 % of training, by 95 % confidence 1.65 to 4.71 %",
        ),
    ],
)
def test_what_the_interval_costs_is_told_with_its_confidence_and_when_more_is_known(
    known: dict[str, Any], said: str
) -> None:
    decided = Decision(
        interval_steps=40, kind=BoundKind.BUDGET, reason="bound by the budget", cost_share=0.0171, **known
    )
    lines = lines_of(CostBook().report(decided, SlowerSteps()))
    assert lines["at this rate"] == said
    assert "at this rate" not in lines_of(report_of(CostBook())), "of a fixed interval nothing is reckoned"


def test_a_paused_run_says_no_interval() -> None:
    paused = Decision(
        interval_steps=22,
        kind=BoundKind.PAUSED,
        reason="paused until 2026-11-28 07:51:18 UTC, as asked",
        paused_until_unix_s=1795852278.0,
    )
    lines = lines_of(CostBook().report(paused, SlowerSteps()))
    assert lines["interval"] == "no checkpoint, paused until 2026-11-28 07:51:18 UTC, as asked"


def test_other_ranks_are_told_of_where_there_are_some() -> None:
    book = CostBook(world_size=2, wait_s=0.25)
    walked(book, [(1.0, False)], stall_s=0.5)
    assert lines_of(report_of(book))["boundaries"] == "500 ms, of it eager copies 0 us, other ranks 250 ms"


def test_a_run_that_trained_nothing_has_no_cost_to_tell() -> None:
    lines = lines_of(report_of(CostBook()))
    assert lines["cost"] == "not known: nothing was trained yet"
    assert lines["slower steps"] == "not known: there was no whole step yet"


@pytest.mark.parametrize("total_s", [-0.171, 0.0])
def test_busy_steps_that_were_no_slower_cost_nothing_that_stands_out(total_s: float) -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * 9 + [(1.0, True)] * 2)
    said = lines_of(report_of(book, SlowerSteps(steps=1, total_s=total_s)))["slower steps"]
    assert said.startswith("none that stands out from the noise in 2 of 12 steps")


def test_what_cuda_devices_waited_is_a_part_of_the_stall() -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * 9 + [(1.5, True)] * 2)
    without = report_of(book)
    assert not any(line.startswith("CUDA") for line in str(without).splitlines())
    book.cuda_wait_s, book.device_first = 0.75, 3
    book.cuda_copies = "copied on the device first: because"
    report = report_of(book)
    assert (report.cuda_wait_s, report.copied_on_device_first) == (0.75, 3)
    assert report.stall_s == without.stall_s + 0.75
    assert report.slowdown > without.slowdown
    assert report.as_frame().cuda_wait_s == 0.75
    assert report.as_frame().added_s == without.as_frame().added_s + 0.75
    assert str(report).splitlines()[-1] == (
        "CUDA            copied on the device first: because; 3 snapshots went over the device so far; "
        "optimizers waited 750 ms on devices"
    )


def test_what_cuda_devices_waited_is_taken_from_the_steps_that_it_made_longer() -> None:
    """The host sees it at once where it waits for its devices in each step, else when it waits next."""
    book = CostBook()
    book.arrived(0.0, guard_s=0.0)
    book.left(0.0, opens_busy=True)
    at_once = book.arrived(1.5, guard_s=0.25, cuda_wait_s=0.5)
    assert at_once is not None
    assert at_once.step_s == 0.75
    book.left(1.5, opens_busy=True)
    ahead = book.arrived(1.75, guard_s=0.0, cuda_wait_s=0.5)
    assert ahead is not None
    assert ahead.step_s == 0.0
    book.left(1.75, opens_busy=True)
    later = book.arrived(3.0, guard_s=0.0)
    assert later is not None
    assert later.step_s == 1.0


def test_steps_that_still_pay_for_what_cuda_devices_waited_are_busy() -> None:
    """Each alone is too short, down to nothing: taken for quiet ones, they would make what was learnt useless."""
    book = CostBook()
    book.arrived(0.0, guard_s=0.0)
    book.left(0.0, opens_busy=True)
    steps: list[StepEnded | None] = []
    for number in range(1, 5):
        steps.append(book.arrived(float(number), guard_s=0.0, cuda_wait_s=2.25 if number == 1 else 0.0))
        book.left(float(number), opens_busy=False)
    told = [(step.step_s, step.is_busy) for step in steps if step is not None]
    assert told == [(0.0, True), (0.0, True), (0.75, True), (1.0, False)]


def test_what_a_host_ahead_waited_is_a_part_of_the_step_that_begins_and_not_of_the_boundary() -> None:
    """A wait at a boundary that failed before its end is none of the next one's."""
    book = CostBook()
    book.arrived(0.0, guard_s=0.0)
    book.left(0.0, opens_busy=True)
    book.arrived(1.0, guard_s=0.0)
    book.was_ahead(0.5)
    assert book.left(1.75, opens_busy=True, due=True) == 0.25
    step = book.arrived(3.0, guard_s=0.0)
    assert step is not None
    assert step.step_s == 1.75
    book.was_ahead(0.5)
    book.arrived(4.0, guard_s=0.0)
    assert book.left(4.25, opens_busy=True, due=True) == 0.25
    assert (book.ahead_s, book.boundary_s, book.train_s) == (1.0, 0.5, 4.25)
