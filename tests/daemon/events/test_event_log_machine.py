"""The last events, their numbers, and how many are gone."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.events.event_log_machine import EventLog
from everstep.daemon.events.event_types import Event, EventKind, EventQuery


def event(text: str, **facts: str) -> Event:
    return Event(kind=EventKind.DRAINING, unix_s=1.0, text=text, **facts)  # pyright: ignore[reportArgumentType]


@given(size=st.integers(1, 8), count=st.integers(0, 30), since=st.integers(0, 30), batch=st.integers(1, 40))
def test_every_event_is_given_once_or_counted_as_missed(
    size: int, count: int, since: int, batch: int
) -> None:
    log = EventLog("l", size=size)
    for number in range(1, count + 1):
        log.append(event(f"number {number}"))
    since = min(since, log.last)
    last, told, gone = since, [], 0
    while last < log.last:
        found = log.after(last, count_max=batch)
        assert len(found.events) <= batch
        told += found.events
        gone += found.missed_count
        last = found.last
    assert gone + len(told) == count - since
    assert [each.text for each in told] == [f"number {each.sequence}" for each in told]
    assert [each.sequence for each in told] == list(range(count - len(told) + 1, count + 1))
    assert len(told) == min(count - since, size)
    assert {each.log_id for each in told} <= {"l"}


def test_a_run_is_wanted_by_name_and_by_id_and_a_gap_by_everybody() -> None:
    mine = event("x", run_name="a", run_id="0" * 32)
    assert EventQuery(run="a").wants(mine)
    assert EventQuery(run="0" * 32).wants(mine)
    assert not EventQuery(run="b").wants(mine)
    assert not EventQuery(run="a").wants(event("of the node"))
    assert not EventQuery(kinds=frozenset({EventKind.RESTORED})).wants(mine)
    gap = Event(kind=EventKind.MISSED, unix_s=0.0, text="")
    assert EventQuery(run="b", kinds=frozenset({EventKind.RESTORED})).wants(gap)
