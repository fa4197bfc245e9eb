"""The real commit, completion, collection and recovery on every kind of crash, many thousand times."""

import os
from collections.abc import Callable

import pytest
from crash_explorer import Effort, Exploration, Summary, explore
from workloads import WORKLOADS, Workload

SEED = 20261121
STATES_MIN = 50_000
JOBS = max(1, len(os.sched_getaffinity(0)) // 2)
"""The other tests run beside this one."""
CI = Effort(losses_max=5, process_share=0.15)
"""Less than `make soak` tries at each cut, and at fewer of them a daemon dies alone: all are reached in minutes."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_crash_breaks_a_promise(tell: Callable[[str], None]) -> None:
    summary = explore(None, SEED, jobs=JOBS, effort=CI)
    tell(f"{summary.line}, recoveries {summary.check_count}, seconds {summary.duration_s:.0f}")
    assert not summary.violations, "\n".join((summary.line, *summary.violations))
    assert summary.violation_count == 0
    assert summary.state_count >= STATES_MIN


SMALL = Effort(lanes_max=3, losses_max=2, process_share=0.1)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_each_workload_goes_as_it_says_and_is_explored(workload: Workload) -> None:
    summary = Exploration(workload, SMALL).run(SEED)
    assert summary.state_count > 20
    assert summary.violations == []


def test_a_seed_draws_the_same_states_again() -> None:
    def counts(seed: int) -> Summary:
        found = Exploration(WORKLOADS[0], SMALL).run(seed)
        found.duration_s = 0.0
        return found

    assert counts(1) == counts(1)
