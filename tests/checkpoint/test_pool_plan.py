from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.pool_plan import FITTING_SHARE, best_fit, count_reaching, surplus_count

SIZES = st.lists(st.integers(1, 1000), max_size=8)


@given(SIZES, st.integers(1, 1200))
def test_the_nearest_size_is_chosen_if_it_is_near_enough(sizes: list[int], wanted: int) -> None:
    index = best_fit(sizes, wanted)
    near = [size for size in sizes if abs(size - wanted) * FITTING_SHARE <= wanted]
    if index is None:
        assert near == []
    else:
        assert abs(sizes[index] - wanted) == min(abs(size - wanted) for size in near)
        assert sizes.index(sizes[index]) == index


@given(SIZES, st.integers(0, 5000))
def test_the_oldest_go_until_the_rest_is_within_the_bound(sizes: list[int], bound: int) -> None:
    count = surplus_count(sizes, bound)
    assert sum(sizes[count:]) <= bound
    assert count == 0 or sum(sizes[count - 1 :]) > bound


@given(SIZES, st.integers(-10, 9000))
def test_no_more_is_given_back_than_is_needed(sizes: list[int], needed: int) -> None:
    count = count_reaching(sizes, needed)
    assert sum(sizes[:count]) >= needed or count == len(sizes)
    assert count == 0 or sum(sizes[: count - 1]) < needed
