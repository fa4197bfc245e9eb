"""The cost book: what a step took, what stood still, and what it makes of both."""

import pytest

from everstep.core.ids import CheckpointId
from everstep.hook.report import FAILURES_KEPT, STEPS_KEPT, CostBook


def walked(book: CostBook, steps: list[tuple[float, bool]], stall_s: float = 0.0) -> None:
    """Pass a first boundary, then one after each (seconds, busy); each but the first takes `stall_s`."""
    now_s, opens = 100.0, [busy for _, busy in steps] + [False]
    book.boundary(now_s, now_s, opens_busy=opens[0], guard_s=0.0)
    for (step_s, _), opens_busy in zip(steps, opens[1:], strict=True):
        now_s += step_s
        book.boundary(now_s, now_s + stall_s, opens_busy=opens_busy, guard_s=0.0)
        now_s += stall_s


def test_before_anything_happened_all_is_zero() -> None:
    report = CostBook().report()
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
    assert (book.report().checkpoints_complete, book.report().last_complete) == (3, "2.12")


def test_busy_and_quiet_steps_are_told_apart_by_their_medians() -> None:
    book = CostBook()
    walked(book, [(1.0, False), (1.0, False), (9.0, False), (1.5, True), (1.5, True)])
    report = book.report()
    assert report.steps == 6
    assert report.step_quiet_s == pytest.approx(1.0)
    assert report.step_busy_s == pytest.approx(1.5)
    assert (report.quiet_steps, report.busy_steps) == (3, 2)
    assert report.slower_steps_s == pytest.approx(2 * 0.5)
    assert report.train_s == pytest.approx(14.0)
    assert report.slowdown == pytest.approx(1.0 / 13.0)


def test_the_guards_wait_is_stall_and_no_part_of_the_step() -> None:
    book = CostBook()
    book.boundary(0.0, 0.0, opens_busy=True, guard_s=0.0)
    book.boundary(1.25, 1.25, opens_busy=False, guard_s=0.25)
    book.guard_s = 0.25
    report = book.report()
    assert report.step_busy_s == pytest.approx(1.0)
    assert report.stall_s == pytest.approx(0.25)
    assert report.train_s == pytest.approx(1.25)


def test_all_time_at_boundaries_is_stall_and_no_part_of_a_step() -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * 4, stall_s=0.5)
    report = book.report()
    assert report.step_quiet_s == pytest.approx(1.0)
    assert report.train_s == pytest.approx(6.0)
    assert report.stall_s == report.boundary_s == pytest.approx(2.0)
    assert report.slowdown == pytest.approx(0.5)


def test_the_first_boundary_counts_like_any_other() -> None:
    book = CostBook()
    book.boundary(10.0, 10.5, opens_busy=False, guard_s=0.0)
    book.boundary(11.5, 11.5, opens_busy=False, guard_s=0.0)
    assert book.report().train_s == pytest.approx(1.5)
    assert book.report().slowdown == pytest.approx(0.5)


def test_while_only_one_kind_of_step_is_known_nothing_is_made_up() -> None:
    book = CostBook()
    walked(book, [(1.0, True)] * 3)
    assert book.report().slower_steps_s == 0.0
    assert (book.report().quiet_steps, book.report().busy_steps) == (0, 3)


def test_steps_that_were_faster_beside_a_copy_do_not_make_training_faster() -> None:
    book = CostBook()
    walked(book, [(2.0, False), (1.0, True)])
    assert book.report().slower_steps_s < 0
    assert book.report().slowdown == 0.0


def test_stall_per_checkpoint_is_of_those_sealed() -> None:
    book = CostBook()
    book.boundary_s, book.guard_s, book.sealed = 1.5, 0.5, 4
    assert book.report().stall_per_checkpoint_s == pytest.approx(0.5)


def test_more_cost_than_time_is_no_slowdown_that_could_be_named() -> None:
    book = CostBook()
    book.boundary_s = 1.0
    assert book.report().slowdown == 0.0


def test_a_report_is_a_picture_of_its_moment() -> None:
    book = CostBook()
    book.skipped["no daemon"] += 1
    book.failures.append("1.5: full")
    report = book.report()
    book.skipped["no daemon"] += 1
    book.failures.append("1.6: full")
    assert report.skipped == {"no daemon": 1}
    assert report.failures == ("1.5: full",)


def test_a_long_run_keeps_a_bounded_past() -> None:
    book = CostBook()
    walked(book, [(1.0, False)] * STEPS_KEPT + [(3.0, False)] * STEPS_KEPT)
    for number in range(FAILURES_KEPT + 5):
        book.failures.append(str(number))
    report = book.report()
    assert report.step_quiet_s == pytest.approx(3.0)
    assert report.steps == 2 * STEPS_KEPT + 1
    assert len(report.failures) == FAILURES_KEPT
    assert report.failures[-1] == str(FAILURES_KEPT + 4)
