"""How long a rank has been without a commit."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.commit_times import CommitTimes


def test_nobody_attached_waits_for_nothing() -> None:
    assert CommitTimes().age_s(100.0) == 0.0


def test_the_age_counts_from_attaching_and_then_from_each_commit() -> None:
    times = CommitTimes()
    times.attached(10.0)
    assert (times.age_s(15.0), times.interval_s) == (5.0, None)
    times.committed(20.0)
    assert (times.age_s(21.0), times.interval_s) == (1.0, None)
    times.committed(50.0)
    assert (times.age_s(50.0), times.interval_s) == (0.0, 30.0)


def test_a_restart_expects_nothing_of_the_time_before() -> None:
    times = CommitTimes()
    times.attached(0.0)
    times.committed(1.0)
    times.committed(2.0)
    times.attached(1000.0)
    assert (times.age_s(1001.0), times.interval_s) == (1.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=2))
def test_the_interval_is_that_of_the_two_newest_commits(moments: list[float]) -> None:
    times = CommitTimes()
    times.attached(0.0)
    for moment in sorted(moments):
        times.committed(moment)
    before, last = sorted(moments)[-2:]
    assert times.interval_s == last - before
