"""Who does not beat is silent after the deadline, and nobody else, whatever the watcher itself slept through."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.hook.silence_machine import BEAT_S, Silence, Standstill

DEADLINE_S = 20.0


def watching(*ranks: int) -> Silence:
    made = Silence(ranks, deadline_s=DEADLINE_S)
    made.looked({}, 0.0)
    return made


def test_who_does_not_beat_is_silent_after_the_deadline_until_it_beats_again() -> None:
    silence = watching(1, 2)
    now_s = 0.0
    for number in range(1, int(DEADLINE_S / BEAT_S) + 1):
        assert silence.silent == []
        now_s += BEAT_S
        silence.looked({1: 7, 2: number}, now_s)
    assert silence.silent == []  # rank 1 was heard once
    silence.looked({1: 7, 2: 100}, now_s + BEAT_S)
    assert silence.silent == [1]
    silence.looked({1: 8, 2: 101}, now_s + 2 * BEAT_S)
    assert silence.silent == []


def test_who_never_beat_is_silent_too() -> None:
    silence = watching(3)
    for number in range(1, 1 + int(DEADLINE_S / BEAT_S)):
        silence.looked({}, number * BEAT_S)
    assert silence.silent == [3]


@given(pauses_s=st.lists(st.floats(0.0, 10_000.0), max_size=4))
def test_a_watcher_that_stood_still_accuses_nobody_for_that(pauses_s: list[float]) -> None:
    silence, now_s = watching(1), 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        silence.looked({1: 1}, now_s)
    assert silence.silent == []


def test_who_is_gone_is_silent_at_once_and_a_beat_from_before_does_not_bring_it_back() -> None:
    silence = watching(1)
    silence.looked({1: 1}, 1.0)
    silence.gone(1)
    assert silence.silent == [1]
    silence.looked({1: 2}, 3.0)  # it may have beaten before it died
    silence.looked({1: 2}, 5.0)
    assert silence.silent == [1]
    silence.looked({1: 3}, 7.0)  # it had only lost its daemon
    assert silence.silent == []


def test_a_rank_that_nobody_watched_is_watched_once_it_is_said_to_be_gone() -> None:
    silence = watching(0)
    silence.gone(5)
    assert (silence.watched, silence.silent) == ([0, 5], [5])


def test_a_turn_that_does_not_end_stands_still_once_it_was_seen_twice() -> None:
    turns = Standstill()
    turns.turned(100.0)
    limits = {"deadline_s": 60.0, "resumed_s": 5.0}
    assert turns.stands_s(160.0, **limits) == 0.0
    assert turns.stands_s(161.0, **limits) == 0.0  # as after a pause of both
    assert turns.stands_s(166.0, **limits) == 0.0
    assert turns.stands_s(167.0, **limits) == 67.0


@given(pauses_s=st.lists(st.floats(0.0, 10_000.0), max_size=6))
def test_who_turns_after_each_pause_of_both_does_not_stand_still(pauses_s: list[float]) -> None:
    turns, now_s = Standstill(), 0.0
    for pause_s in pauses_s:
        turns.turned(now_s)
        now_s += pause_s
        assert turns.stands_s(now_s, deadline_s=60.0, resumed_s=5.0) == 0.0
        assert turns.stands_s(now_s + 4.0, deadline_s=60.0, resumed_s=5.0) == 0.0
        now_s += 4.0
