"""The parts of a step sum up to it, and the three runs say what DS-Analyzer says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.analysis.stall_plan import WorkerTimes, split_step, stalls_of

seconds = st.floats(0.0, 1e3)


@st.composite
def work(draw: st.DrawFn) -> WorkerTimes:
    busy_s = draw(seconds)
    fetch_s = draw(st.floats(0.0, 1.0)) * busy_s
    return WorkerTimes(
        samples=draw(st.integers(0, 100)), busy_s=busy_s, fetch_s=fetch_s, queued_s=draw(seconds)
    )


@given(seconds, seconds, seconds, work())
def test_the_parts_of_a_step_sum_up_to_it(
    step_s: float, wait_s: float, copy_s: float, work: WorkerTimes
) -> None:
    split = split_step(step_s=step_s, wait_s=wait_s, copy_s=copy_s, work=work)
    assert split.step_s == pytest.approx(step_s)
    assert min(split.fetch_s, split.preparation_s, split.copy_s, split.compute_s) >= -1e-9
    assert 0.0 <= split.stall_share <= 1.0 + 1e-9


def test_the_wait_is_shared_as_the_workers_time_was() -> None:
    work = WorkerTimes(samples=10, busy_s=4.0, fetch_s=3.0, queued_s=0.5)
    split = split_step(step_s=1.0, wait_s=0.4, copy_s=0.1, work=work)
    assert (split.fetch_s, split.preparation_s) == pytest.approx((0.3, 0.1))
    assert (split.copy_s, split.compute_s) == pytest.approx((0.1, 0.5))
    assert work.preparation_s == pytest.approx(0.5)


def test_without_workers_numbers_the_wait_is_preparation() -> None:
    split = split_step(step_s=1.0, wait_s=0.4, copy_s=0.0, work=WorkerTimes())
    assert (split.fetch_s, split.preparation_s) == (0.0, 0.4)


def test_stalls_are_differences_of_the_runs() -> None:
    stalls = stalls_of(synthetic_s=1.0, warm_s=1.5, cold_s=3.0)
    assert (stalls.compute_s, stalls.preparation_stall_s, stalls.fetch_stall_s) == (1.0, 0.5, 1.5)
    assert stalls.preparation_share == pytest.approx(1 / 3)
    assert stalls.fetch_share == pytest.approx(0.5)


@given(seconds, seconds, seconds)
def test_noise_makes_no_negative_stall(synthetic_s: float, warm_s: float, cold_s: float) -> None:
    stalls = stalls_of(synthetic_s=synthetic_s, warm_s=warm_s, cold_s=cold_s)
    assert stalls.preparation_stall_s >= 0.0
    assert stalls.fetch_stall_s >= 0.0
    assert stalls.compute_s == synthetic_s
