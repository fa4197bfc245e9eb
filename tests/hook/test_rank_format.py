"""What ranks tell each other comes back as it was, and nothing else is taken for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.drift_machine import Spread
from everstep.checkpoint.frequency_machine import FixedInterval
from everstep.checkpoint.frequency_types import Figures
from everstep.core.errors import CorruptDataError
from everstep.hook.horizon_machine import Plan
from everstep.hook.rank_format import (
    Beat,
    PlanMessage,
    RankState,
    dump_beat,
    dump_plan,
    dump_state,
    load_beat,
    load_plan,
    load_state,
)
from everstep.hook.steering_machine import Steering
from everstep.hook.sweep_machine import Mark

NEEDED_S = st.none() | st.floats(0, 1e9)


@given(
    start=st.integers(0, 2**40),
    covered=st.integers(1, 8),
    every=st.integers(1, 9),
    end=st.text(max_size=40),
    times_s=st.tuples(NEEDED_S, NEEDED_S),
)
def test_a_plan_comes_back(
    start: int, covered: int, every: int, end: str, times_s: tuple[float | None, float | None]
) -> None:
    fixed = FixedInterval(every)
    plan = Plan(
        number=7, start=start, horizon=start + covered, steps=fixed.due(start, start + covered), end=end
    )
    message = PlanMessage(plan=plan, decision=fixed.decision, needed_s=times_s[0], left_s=times_s[1])
    assert load_plan(dump_plan(message).encode()) == message


@given(plan=st.integers(0, 2**40), step=st.integers(0, 2**40), mean=NEEDED_S)
def test_a_state_comes_back(plan: int, step: int, mean: float | None) -> None:
    stall = None if mean is None else Spread(mean=mean, deviation=0.5, count=3)
    figures = Figures(
        step=None, stall=stall, slower=None, persist=None, held=stall, slot_count=2, fill={"node": 0.25}
    )
    steering = Steering(budget=0.5, budget_asked_unix_s=float(plan), paused_until_unix_s=2.5)
    mark = Mark(plan=plan, step=step)
    state = RankState(figures=figures, needed_s=mean, mark=mark, steering=steering)
    assert load_state(dump_state(state).encode()) == state


@given(number=st.integers(0, 2**40), silent=st.lists(st.integers(0, 2**20), max_size=5))
def test_a_beat_comes_back(number: int, silent: list[int]) -> None:
    beat = Beat(number=number, silent=tuple(silent))
    assert load_beat(dump_beat(beat).encode()) == beat


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[1, 2]",
        b'{"plan": {"number": 0, "start": 5, "horizon": 5, "steps": [], "end": ""}, "decision": {}}',
        b'{"plan": {"number": 0, "start": 5, "horizon": 6, "steps": [], "end": ""}, "decision": {"kind": 3}}',
        b'{"figures": {"step": "fast"}, "mark": {"plan": 0, "step": 0}}',
    ],
)
def test_what_is_something_else_is_refused(text: bytes) -> None:
    for load in (load_plan, load_state, load_beat):
        with pytest.raises(CorruptDataError):
            load(text)
