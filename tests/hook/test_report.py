"""The cost of checkpoints: what is measured, and what it adds up to."""

import pytest

from everstep.hook.report import CostBook


def test_slower_steps_are_the_difference_of_medians_times_their_count() -> None:
    book, now_s = CostBook(), 0.0
    book.boundary(now_s, now_s, busy=False, guard_s=0.0)
    for number in range(100):
        now_s += 0.12 if number % 4 == 0 else 0.10
        book.boundary(now_s, now_s, busy=number % 4 == 0, guard_s=0.0)
    report = book.report()
    assert report.step_quiet_s == pytest.approx(0.10)
    assert report.step_busy_s == pytest.approx(0.12)
    assert report.slower_steps_s == pytest.approx(25 * 0.02)
    assert report.slowdown == pytest.approx(0.5 / (report.train_s - 0.5))


def test_the_guards_wait_is_no_slower_step() -> None:
    book = CostBook()
    book.boundary(0.0, 0.0, busy=False, guard_s=0.0)
    book.boundary(1.0, 1.0, busy=False, guard_s=0.0)
    book.guard_s += 0.5
    book.boundary(2.5, 2.5, busy=True, guard_s=0.5)
    report = book.report()
    assert report.slower_steps_s == pytest.approx(0.0)
    assert report.stall_s == pytest.approx(0.5)


def test_a_run_without_boundaries_costs_nothing() -> None:
    report = CostBook().report()
    assert report.slowdown == 0.0
    assert report.stall_per_checkpoint_s == 0.0


def test_skips_and_failures_are_kept_with_their_reasons() -> None:
    book = CostBook()
    book.skipped["no free slot"] += 2
    book.failures.append("1.5: rank 1: full")
    report = book.report()
    assert report.skipped == {"no free slot": 2}
    assert report.failures == ("1.5: rank 1: full",)
