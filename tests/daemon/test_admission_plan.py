"""Admission: the tightest of budget, node and cgroups decides, before anything is allocated."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.core.errors import MemoryRefusedError
from everstep.daemon.admission_plan import (
    Grant,
    MemoryBound,
    Room,
    Wish,
    admit,
    cgroup_bound,
    cgroup_directories,
    grant,
    parse_cgroup_mounts,
    parse_meminfo,
    room_left,
)

MIB = 1024**2


def test_meminfo_gives_what_is_available_in_bytes() -> None:
    text = "MemTotal: 24000 kB\nMemFree: 100 kB\nMemAvailable:   2048 kB\n"
    assert parse_meminfo(text).available_bytes == 2 * MIB


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", ""])
def test_a_cgroup_without_a_limit_is_no_bound(limit: str) -> None:
    assert cgroup_bound("/cg", limit, "100", "") is None


def test_clean_page_cache_of_a_cgroup_counts_as_available() -> None:
    bound = cgroup_bound("/cg", str(100 * MIB), str(90 * MIB), f"anon 1\ninactive_file {30 * MIB}\n")
    assert bound == MemoryBound(source="/cg", available_bytes=40 * MIB)


def test_the_tightest_bound_is_named_with_its_figures() -> None:
    bounds = [
        MemoryBound(source="/proc/meminfo", available_bytes=1000 * MIB),
        MemoryBound(source="/cg", available_bytes=70 * MIB),
    ]
    admit(60 * MIB, bounds, reserve_bytes=10 * MIB, what="an arena")
    with pytest.raises(
        MemoryRefusedError, match="an arena needs 61 MiB, but /cg has 70 MiB left of which 10 MiB"
    ):
        admit(61 * MIB, bounds, reserve_bytes=10 * MIB, what="an arena")


def test_every_ancestor_of_both_cgroup_versions_is_asked() -> None:
    mounts = parse_cgroup_mounts(
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    )
    found = cgroup_directories("4:memory:/job/a\n0::/user.slice\n", mounts)
    assert found == [
        ("/sys/fs/cgroup/memory/job/a", False),
        ("/sys/fs/cgroup/memory/job", False),
        ("/sys/fs/cgroup/memory", False),
        ("/sys/fs/cgroup/unified/user.slice", True),
        ("/sys/fs/cgroup/unified", True),
    ]


NODE = MemoryBound(source="/proc/meminfo", available_bytes=1000 * MIB)


def room(size_bytes: int) -> Room:
    return Room(size_bytes=size_bytes, why="it is full", hint="free some")


def test_the_room_is_what_the_tightest_bound_leaves() -> None:
    by_budget = room_left(64 * MIB, [NODE], reserve_bytes=100 * MIB, promised_bytes=0)
    assert (by_budget.size_bytes, by_budget.why) == (64 * MIB, "the daemon's budget has 64 MiB left")
    assert "memory.arena_max_bytes" in by_budget.hint
    by_node = room_left(900 * MIB, [NODE], reserve_bytes=100 * MIB, promised_bytes=50 * MIB)
    assert by_node.size_bytes == 850 * MIB
    assert by_node.why == "/proc/meminfo has 950 MiB left of which 100 MiB are kept free"
    assert "memory.reserve_bytes" in by_node.hint


def test_where_no_slot_fits_the_bound_is_named() -> None:
    wish = Wish(slot_size_bytes=8 * MIB, slot_count=2)
    expected = "an arena of 2 slots of 8 MiB needs at least 8 MiB, but it is full"
    with pytest.raises(MemoryRefusedError, match=expected):
        grant(wish, room(8 * MIB - 1))
    with pytest.raises(MemoryRefusedError, match=f"{expected}, and 3 ranks share it"):
        grant(wish, room(23 * MIB), sharers=3)
    with pytest.raises(MemoryRefusedError):
        grant(wish, room(-MIB))


@given(st.integers(1, 50), st.integers(1, 64), st.integers(-10, 5000), st.integers(1, 16), st.integers(0, 60))
def test_nobody_gets_more_than_fits_or_less_than_could_be(
    size: int, count: int, left: int, sharers: int, spare: int
) -> None:
    wish = Wish(slot_size_bytes=size * 4096, slot_count=count, spare_size_bytes=spare * 4096)
    try:
        found = grant(wish, room(left * 4096), sharers=sharers)
    except MemoryRefusedError:
        assert left < size * sharers
        return
    fitting = left * 4096 // sharers // found.slot_count // 4096 * 4096
    assert found.slot_size_bytes == min((size + spare) * 4096, fitting)
    assert found.slot_size_bytes >= wish.slot_size_bytes
    assert 1 <= found.slot_count <= count
    assert found.size_bytes * sharers <= left * 4096
    assert (found.reason == "") == (found.slot_count == count)
    if found.slot_count < count:
        assert (found.slot_count + 1) * size * sharers > left


@given(st.integers(1, 5 * 4096), st.integers(-10, 5 * 4096), st.integers(1, 16))
@example(4096 + 64, 4096 + 100, 1)
def test_a_ring_is_as_large_as_fits_and_no_smaller_than_was_asked_for(
    least_bytes: int, share_bytes: int, sharers: int
) -> None:
    """Else it would be given up as it comes, and asked for again, for ever."""
    wish = Wish(slot_size_bytes=5 * 4096 + MIB, slot_count=2, ring_size_bytes=least_bytes)
    try:
        found = grant(wish, room(share_bytes * sharers), sharers=sharers)
    except MemoryRefusedError:
        assert share_bytes // 4096 * 4096 < least_bytes
        return
    assert found.is_ring
    assert least_bytes <= found.slot_size_bytes == share_bytes // 4096 * 4096


def test_all_get_all_where_that_fits() -> None:
    wish = Wish(slot_size_bytes=4096, slot_count=2)
    assert grant(wish, room(4 * 4096), sharers=2) == Grant(slot_size_bytes=4096, slot_count=2)
