"""Bounds on what one user does: counted, given back, and nobody else's matter."""

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import ConfigError, QuotaError
from everstep.daemon.access.quota_plan import CALLS_CROWDED, CALLS_IN_CROWD, Limits, QuotaPlan
from everstep.daemon.access.section import QuotaSection

LIMITS = Limits(
    connections=3, descriptors=100, calls=2, calls_per_s=10.0, frames_per_s=100.0, connects_per_s=5.0
)
A, B = 1, 2


@pytest.fixture
def plan() -> QuotaPlan:
    return QuotaPlan(limits=LIMITS)


def test_connections(plan: QuotaPlan) -> None:
    for _ in range(3):
        plan.connect(A, 0.0)
    with pytest.raises(QuotaError, match="uid 1 has 3 connections"):
        plan.connect(A, 0.0)
    plan.connect(B, 0.0)
    plan.disconnect(A)
    plan.connect(A, 0.0)
    assert plan.uses[A].refused == 1


def test_who_comes_too_often_is_heard_later_and_who_left_unheard_owes_nothing(plan: QuotaPlan) -> None:
    for _ in range(10):  # twice as many as in a second, after a rest
        assert plan.connect(A, 0.0) == 0.0
        plan.disconnect(A)
    assert plan.connect(A, 0.0) == pytest.approx(0.2)
    assert plan.connect(A, 0.0) == pytest.approx(0.4)
    assert plan.connect(B, 0.0) == 0.0
    plan.disconnect(A, unread=True)
    assert plan.connect(A, 0.0) == pytest.approx(0.4)
    plan.disconnect(A)
    assert plan.connect(A, 1.0) == 0.0


def test_descriptors_count_what_else_is_held(plan: QuotaPlan) -> None:
    plan.connect(A, 0.0, descriptors=98)
    with pytest.raises(QuotaError, match=r"holds 100 descriptors.*quota\.descriptors"):
        plan.connect(A, 0.0, descriptors=98)


def test_calls_at_once_and_in_a_second(plan: QuotaPlan) -> None:
    plan.begin_call(A, 0.0)
    plan.begin_call(A, 0.0)
    with pytest.raises(QuotaError, match="2 calls running"):
        plan.begin_call(A, 0.0)
    plan.begin_call(B, 0.0)
    plan.end_call(A)
    for _ in range(18):  # 20 may come at once
        plan.begin_call(A, 0.0)
        plan.end_call(A)
    with pytest.raises(QuotaError, match="10 times a second"):
        plan.begin_call(A, 0.0)
    plan.begin_call(A, 0.11)


def test_frames_are_slowed_down_and_never_refused(plan: QuotaPlan) -> None:
    assert plan.frames_delay_s(A, 200, 0.0) == 0.0
    assert plan.frames_delay_s(A, 50, 0.0) == pytest.approx(0.5)
    assert plan.frames_delay_s(B, 10, 0.0) == 0.0
    assert plan.frames_delay_s(A, 0, 0.5) == 0.0


def test_who_has_nothing_is_forgotten(plan: QuotaPlan) -> None:
    for uid in range(1000):
        plan.connect(uid, float(uid * 100))
        plan.disconnect(uid)
    assert len(plan.uses) < 5


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 3)), max_size=60))
def test_nobody_has_more_than_allowed_and_one_users_doing_is_not_anothers(
    events: list[tuple[int, bool, float]],
) -> None:
    plan, now_s, alone = QuotaPlan(limits=LIMITS), 0.0, QuotaPlan(limits=LIMITS)
    for uid, begins, after_s in events:
        now_s += after_s
        for each in (plan, *([alone] if uid == 0 else [])):
            use = each.uses.get(uid)
            if begins:
                with contextlib.suppress(QuotaError):
                    each.connect(uid, now_s)
            elif use and use.connections:
                each.disconnect(uid)
        assert all(use.connections <= 3 for use in plan.uses.values())
    mine, same = plan.uses.get(0), alone.uses.get(0)
    assert (mine.connections if mine else 0) == (same.connections if same else 0)


@pytest.mark.parametrize(
    "key", ["memory_bytes", "slots", "connections", "calls", "calls_per_s", "frames_per_s", "connects_per_s"]
)
def test_a_bound_of_nothing_is_no_bound(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"quota\.{key} is 0"):
        QuotaSection(**{key: 0}).check()
    QuotaSection(descriptors=0).check()


def test_in_a_crowd_the_room_is_for_those_who_have_few_calls() -> None:
    plan = QuotaPlan(limits=dataclasses.replace(LIMITS, calls=48, calls_per_s=1e6))
    for uid in [1] * 48 + [2] * (CALLS_CROWDED - 48):
        plan.begin_call(uid, 0.0)
    with pytest.raises(QuotaError, match=f"{CALLS_CROWDED} calls run, and uid 2 has 16"):
        plan.begin_call(2, 0.0)
    for _ in range(CALLS_IN_CROWD):
        plan.begin_call(3, 0.0)
    with pytest.raises(QuotaError, match="the rest of the room is for others"):
        plan.begin_call(3, 0.0)
    for _ in range(48):
        plan.begin_call(0, 0.0, is_operator=True)
        plan.end_call(1)
    for _ in range(48):
        plan.end_call(0)
    plan.begin_call(2, 0.0)
