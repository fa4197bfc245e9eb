"""The budget of a cache and what goes first, over arbitrary samples and caches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.cache.space_plan import IdleCache, Refusal, Space, caches_to_drop
from everstep.dataloader.cache.arena_format import base_bytes, budget_for, record_bytes

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


@given(LENGTHS, st.integers(0, 60_000), st.integers(1, 5000))
def test_admits_what_fits_and_never_a_byte_more(lengths: list[int], more_bytes: int, step: int) -> None:
    space = Space(sample_count=len(lengths), limit_bytes=base_bytes(len(lengths)) + more_bytes)
    expected_bytes = space.base_bytes
    space.allocated_bytes = space.base_bytes
    for length in lengths:
        refusal = space.refusal(length)
        fits = expected_bytes + record_bytes(length) <= space.limit_bytes
        assert (refusal is None) == fits
        assert (refusal is Refusal.OVERSIZED) == (record_bytes(length) > more_bytes)
        if refusal is not None:
            continue
        while not space.is_allocated_for(length):
            grown_bytes = space.next_step_bytes(step, length)
            assert grown_bytes > 0
            space.allocated_bytes += grown_bytes
        assert space.admit(length) == expected_bytes
        expected_bytes += record_bytes(length)
        assert space.used_bytes == expected_bytes <= space.allocated_bytes <= space.limit_bytes


@given(LENGTHS)
def test_the_budget_for_a_dataset_holds_it_to_the_byte(lengths: list[int]) -> None:
    budget = budget_for(lengths)
    for limit_bytes, everything in ((budget, True), (budget - 1, False)):
        space = Space(sample_count=len(lengths), limit_bytes=limit_bytes, allocated_bytes=limit_bytes)
        admitted = [space.refusal(length) is None and space.admit(length) for length in lengths]
        assert (False not in admitted) is everything
    assert space.used_bytes < budget


@pytest.mark.parametrize(("short", "expected"), [(False, None), (True, Refusal.MEMORY)])
def test_where_memory_is_short_the_pages_are_the_bound(*, short: bool, expected: Refusal | None) -> None:
    space = Space(sample_count=0, limit_bytes=10_000, allocated_bytes=4096, is_short=short)
    assert space.refusal(8000) is expected
    assert space.free_bytes == (4096 - 64 if short else 10_000 - 64)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000)), max_size=10), st.integers(0, 4000))
def test_the_oldest_go_first_and_no_more_than_needed(idle: list[tuple[float, int]], needed: int) -> None:
    caches = [
        IdleCache(number=number, idle_since_s=since_s, size_bytes=size)
        for number, (since_s, size) in enumerate(idle)
    ]
    chosen = caches_to_drop(caches, needed)
    by_age = [each.number for each in sorted(caches, key=lambda each: (each.idle_since_s, each.number))]
    assert chosen == by_age[: len(chosen)]
    sizes = [caches[number].size_bytes for number in chosen]
    assert sum(sizes) >= needed or len(chosen) == len(caches)
    assert not chosen or sum(sizes[:-1]) < needed
