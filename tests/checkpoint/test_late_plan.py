"""Who is not waited for any longer: the verdict, without a clock."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.late_plan import LATE_CALL_S, LATE_FACTOR, LATE_WRITE_S, Call, late_device


def writing(running_s: float, expected_s: float = 0.5) -> Call:
    return Call(what="writing", running_s=running_s, expected_s=expected_s, patience_s=LATE_WRITE_S)


LATE, TIMELY = writing(3.1), writing(2.9)
LONG_S = 100.0
"""Somebody has had nothing to do for as long as may be asked."""


def test_one_that_takes_six_times_as_long_is_late_where_another_could_write_instead() -> None:
    assert late_device([[], [TIMELY, LATE], []], LONG_S) == (1, LATE)
    assert late_device([[], [TIMELY]], LONG_S) is None
    assert "writing has taken 3.1 s, expected 0.5 s" in LATE.text


def test_nothing_is_lost_by_waiting_while_another_one_writes() -> None:
    assert late_device([[], [LATE], [TIMELY]], LONG_S) is None
    assert late_device([[], [LATE], [LATE]], LONG_S) == (1, LATE), "one after the other"


def test_where_all_stand_still_it_is_the_machine() -> None:
    assert late_device([[LATE], [LATE]], idle_s=0) is None
    assert late_device([[LATE], []], idle_s=0) is None


def test_a_pause_is_no_delay() -> None:
    assert late_device([[], [writing(LATE_WRITE_S, expected_s=0.001)]], LONG_S) is None
    assert late_device([[], [Call(what="fsync", running_s=LATE_CALL_S)]], LONG_S) is None
    assert late_device([[], [Call(what="fsync", running_s=LATE_CALL_S + 0.1)]], LONG_S) is not None


def test_what_stood_still_with_all_others_gets_its_time_once_they_are_done() -> None:
    """A machine that pauses for a while makes every call long: only who is waited for since is late."""
    assert late_device([[], [LATE]], idle_s=LATE_WRITE_S) is None
    assert late_device([[], [LATE]], idle_s=LATE_WRITE_S + 0.1) == (1, LATE)


calls = st.builds(writing, st.floats(0, 100), st.floats(0, 100))


@given(st.lists(st.lists(calls, max_size=3), max_size=6), st.floats(0, 100))
def test_a_verdict_is_of_a_call_for_which_somebody_has_waited(
    devices: list[list[Call]], idle_s: float
) -> None:
    found = late_device(devices, idle_s)
    if found is not None:
        index, call = found
        assert call in devices[index]
        assert call.running_s > max(LATE_FACTOR * call.expected_s, LATE_WRITE_S)
        assert idle_s > LATE_WRITE_S
