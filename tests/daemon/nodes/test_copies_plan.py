"""Copies take only what the samples that a node owns will not need."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.nodes.copies_plan import EVIDENCE_COUNT, Holdings, copy_room_bytes, reserved_bytes


def test_nothing_is_copied_before_the_sizes_are_known() -> None:
    held = Holdings()
    for _ in range(EVIDENCE_COUNT):
        room = copy_room_bytes(held, capacity_bytes=10**9, sample_count=10_000, member_count=2)
        assert room == 0
        held.add(100, is_owned=True)
    assert copy_room_bytes(held, capacity_bytes=10**9, sample_count=10_000, member_count=2) > 0
    assert copy_room_bytes(held, capacity_bytes=10**9, sample_count=10_000, member_count=0) == 0


@pytest.mark.parametrize(("share", "some"), [(0.45, False), (0.65, True), (1.1, True)])
def test_half_of_a_dataset_leaves_room_only_above_it(share: float, some: bool) -> None:
    """2 nodes own 50 % each: with 65 % some copies fit, with 45 % none."""
    held = Holdings(owned_count=10_000, owned_bytes=10_000 * 1000)
    room = copy_room_bytes(held, capacity_bytes=int(share * 20_000_000), sample_count=20_000, member_count=2)
    assert (room > 0) == some
    assert room <= max(0.0, share - 0.5) * 20_000_000


@given(
    st.integers(2, 9),
    st.integers(1000, 20_000),
    st.floats(0.1, 1.0),
    st.integers(0, 2**32),
    st.integers(50, 5000),
)
def test_what_is_owned_is_never_kept_out(
    members: int, samples: int, share: float, seed: int, spread: int
) -> None:
    """Samples come in random order, owned ones by chance; if all owned ones would fit alone, they fit with copies."""
    draw = random.Random(seed)
    sizes = [1000 + draw.randrange(spread) for _ in range(samples)]
    owned = [draw.randrange(members) == 0 for _ in range(samples)]
    capacity = int(share * sum(sizes))
    held, kept_out = Holdings(), 0
    for size, is_owned in zip(sizes, owned, strict=True):
        if is_owned:
            if held.owned_bytes + held.copy_bytes + size <= capacity:
                held.add(size, is_owned=True)
            else:
                kept_out += 1
        else:
            room = copy_room_bytes(held, capacity_bytes=capacity, sample_count=samples, member_count=members)
            if size <= room:
                held.add(size, is_owned=False)
        assert held.owned_bytes + held.copy_bytes <= capacity
    needed = sum(size for size, is_owned in zip(sizes, owned, strict=True) if is_owned)
    if needed <= capacity:
        assert kept_out == 0, (needed, capacity, held)
    assert reserved_bytes(held, sample_count=samples, member_count=members) >= held.owned_bytes
