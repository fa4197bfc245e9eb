"""What a run's end takes from its script."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from everstep.checkpoint.frequency_types import Limits
from everstep.core.errors import UsageError
from everstep.hook.end_machine import LEASE_ENDS, Progress
from everstep.hook.notice import Preemption
from everstep.hook.one_rank import OneRank
from everstep.hook.pace import Pace
from everstep.hook.run_end import RunEnd


@pytest.fixture
def end() -> Iterator[RunEnd]:
    pace = Pace(every=1, limits=Limits())
    made = RunEnd("small", OneRank(pace), pace, Preemption(sigterm=False))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("seconds", "named"),
    [("3", "'3'"), (True, "True"), (None, "None"), (0, "0"), (-1.5, "-1.5"), (float("nan"), "nan")],
)
def test_a_lease_of_no_positive_number_is_refused_by_name(end: RunEnd, seconds: Any, named: str) -> None:
    with pytest.raises(UsageError, match=f"^a lease of {named}") as refused:
        end.lease(seconds, ends=True)
    assert refused.value.hint == "the seconds that are left: a number, more than 0"


@pytest.mark.parametrize("seconds", [3, 0.5, np.float32(3.0), np.int64(3)])
def test_a_lease_is_any_number(end: RunEnd, seconds: Any) -> None:
    end.lease(seconds, ends=True)


def test_an_end_that_was_not_asked_for_as_its_boundary_was_left_is_asked_for_at_the_next_one(
    end: RunEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, maybe, which the script catches to train on."""
    ranks = end._ranks

    def interrupted(left_s: float) -> None:
        raise KeyboardInterrupt

    def at_boundary(step: int) -> None:
        end.at_boundary(Progress(step=step, saved=0, tried=0, under_way=False, is_busy=False))

    end.lease(1e-9, ends=True)
    with monkeypatch.context() as patched:
        patched.setattr(ranks, "ends_in", interrupted)
        with pytest.raises(KeyboardInterrupt):
            at_boundary(1)
    at_boundary(2)
    assert (ranks.is_due(2), ranks.end_after(2)) == (True, LEASE_ENDS)
