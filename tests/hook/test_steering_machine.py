"""The newest wish holds, whichever way and in whatever order it comes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from everstep.hook.steering_machine import Steering

times = st.floats(0, 100)
wishes = st.builds(
    Steering,
    budget=st.none() | st.floats(0.001, 0.999),
    budget_asked_unix_s=times,
    paused_until_unix_s=times,
    pause_asked_unix_s=times,
)


@given(st.lists(wishes, min_size=1, max_size=4))
def test_every_order_gives_the_same(steerings: list[Steering]) -> None:
    found: set[Steering] = set()
    for order in itertools.permutations(steerings):
        known = Steering()
        for each in order:
            known = known.with_newer(each).with_newer(known)
        found.add(known)
    assert len(found) == 1


@given(wishes, wishes)
def test_of_each_wish_the_one_asked_last_holds(a: Steering, b: Steering) -> None:
    both = a.with_newer(b)
    newest = max(a, b, key=lambda each: each.pause_asked_unix_s)
    assert both.pause_asked_unix_s == newest.pause_asked_unix_s
    if a.pause_asked_unix_s != b.pause_asked_unix_s:
        assert both.paused_until_unix_s == newest.paused_until_unix_s
    assert both.is_paused(0.0) == (both.paused_until_unix_s > 0)
