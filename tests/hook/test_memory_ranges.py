"""Which ranges have memory in common: as if each were compared with each."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.hook.memory_ranges import RangeMap, Ranges

reaches = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(here=st.lists(reaches, max_size=8), other=reaches)
def test_those_that_touch_are_found(here: list[tuple[int, int]], other: tuple[int, int]) -> None:
    expected = {number for number, reach in enumerate(here) if {*range(*reach)} & {*range(*other)}}
    found = RangeMap((reach, number) for number, reach in enumerate(here)).touching(other)
    assert (len(found), set(found)) == (len(expected), expected)
    assert Ranges(here).touch(other) == bool(expected)
