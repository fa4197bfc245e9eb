"""Who is not waited for any longer: the verdict, without a clock."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.late_plan import LATE_CALL_S, LATE_FACTOR, LATE_WRITE_S, Call, late_device


def writing(running_s: float, expected_s: float = 0.5) -> Call:
    return Call(what="writing", running_s=running_s, expected_s=expected_s, patience_s=LATE_WRITE_S)


LATE, TIMELY = writing(3.1), writing(2.9)


def test_one_that_takes_six_times_as_long_is_late_where_another_could_write_instead() -> None:
    assert late_device([[], [TIMELY, LATE], []]) == (1, LATE)
    assert late_device([[], [TIMELY]]) is None
    assert "writing has taken 3.1 s, expected 0.5 s" in LATE.text


def test_nothing_is_lost_by_waiting_while_another_one_writes() -> None:
    assert late_device([[], [LATE], [TIMELY]]) is None
    assert late_device([[], [LATE], [LATE]]) == (1, LATE), "one after the other"


def test_where_all_stand_still_it_is_the_machine() -> None:
    assert late_device([[LATE], [LATE]]) is None
    assert late_device([[LATE]]) is None
    assert late_device([]) is None


def test_a_pause_is_no_delay() -> None:
    assert late_device([[], [writing(LATE_WRITE_S, expected_s=0.001)]]) is None
    assert late_device([[], [Call(what="fsync", running_s=LATE_CALL_S)]]) is None
    assert late_device([[], [Call(what="fsync", running_s=LATE_CALL_S + 0.1)]]) is not None


calls = st.builds(writing, st.floats(0, 100), st.floats(0, 100))


@given(st.lists(st.lists(calls, max_size=3), max_size=6))
def test_a_verdict_always_leaves_somebody_who_can_write(devices: list[list[Call]]) -> None:
    found = late_device(devices)
    if found is not None:
        index, call = found
        assert call in devices[index]
        assert call.running_s > max(LATE_FACTOR * call.expected_s, LATE_WRITE_S)
        assert any(not mine for mine in devices)
