"""A peer that fails costs one deadline, and ever fewer of them."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.nodes.breaker_machine import PAUSE_MAX_S, PAUSE_S, Breaker, State


def test_one_failure_is_enough_and_a_probe_brings_it_back() -> None:
    breaker = Breaker()
    assert breaker.allows
    assert breaker.failed(10.0)
    assert not breaker.allows
    assert not breaker.failed(10.1), "calls that were under way are not counted again"
    assert not breaker.probe(10.0 + PAUSE_S - 0.01)
    assert breaker.probe(10.0 + PAUSE_S)
    assert not breaker.allows, "readers wait for the probe's answer"
    assert not breaker.probe(10.0 + PAUSE_S), "one probe at a time"
    breaker.answered(11.2)
    assert breaker.allows


def test_a_peer_that_answers_probes_only_is_left_alone_ever_longer() -> None:
    breaker, now_s, pauses = Breaker(), 0.0, list[float]()
    for _ in range(9):
        assert breaker.failed(now_s)
        pauses.append(breaker.pause_s)
        now_s = breaker.until_s
        assert breaker.probe(now_s)
        breaker.answered(now_s)
        now_s += 0.5
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, PAUSE_MAX_S, PAUSE_MAX_S, PAUSE_MAX_S]
    breaker.failed(now_s + PAUSE_MAX_S)
    assert breaker.pause_s == PAUSE_S, "it has served for as long as the last pause was"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["fail", "probe", "answer"]), st.floats(0, 40)), min_size=1, max_size=200
)


@given(EVENTS)
def test_any_order_of_events_keeps_the_bounds(events: list[tuple[str, float]]) -> None:
    """Readers pay only when it was closed; between two payments lies a pause, and it never allows while it is open."""
    breaker, now_s, last_paid_s = Breaker(), 0.0, -1e9
    for what, after_s in events:
        now_s += after_s
        before = breaker.state
        if what == "fail":
            opened = breaker.failed(now_s)
            assert opened == (before is not State.OPEN)
            if before is State.CLOSED:
                assert now_s - last_paid_s >= PAUSE_S
                last_paid_s = now_s
        elif what == "probe":
            assert breaker.probe(now_s) == (before is State.OPEN and now_s >= breaker.until_s)
        else:
            breaker.answered(now_s)
            assert breaker.allows == (before is not State.OPEN)
        assert breaker.pause_s == 0 or PAUSE_S <= breaker.pause_s <= PAUSE_MAX_S
        assert breaker.allows == (breaker.state is State.CLOSED)
