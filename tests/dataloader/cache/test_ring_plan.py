"""Places in a staging never overlap while they are in use, in any order of taking and freeing."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.cache.ring_plan import Ring


@given(st.integers(0, 60), st.lists(st.one_of(st.integers(0, 40), st.just(None)), max_size=60))
def test_places_are_apart_and_inside(size: int, steps: list[int | None]) -> None:
    ring, used = Ring(size), deque[range]()
    for length in steps:
        if length is None:
            if used:
                ring.free(1)
                used.popleft()
            continue
        begin = ring.take(length)
        if begin is None:
            assert used or max(length, 1) > size, "an empty ring has room for all that it is as large as"
            continue
        place = range(begin, begin + max(length, 1))
        assert place.start >= 0
        assert place.stop <= size
        assert all(place.stop <= other.start or other.stop <= place.start for other in used)
        used.append(place)
        assert len(ring) == len(used)


def test_it_goes_round() -> None:
    ring = Ring(100)
    assert [ring.take(40), ring.take(40), ring.take(40)] == [0, 40, None]
    ring.free(1)
    assert [ring.take(41), ring.take(40), ring.take(1)] == [None, 0, None]
    ring.free(1)
    assert ring.take(60) == 40
