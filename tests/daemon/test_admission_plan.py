"""Admission: the tightest of node and cgroups decides, before anything is allocated."""

import pytest

from everstep.core.errors import MemoryRefusedError
from everstep.daemon.admission_plan import (
    MemoryBound,
    admit,
    cgroup_bound,
    cgroup_directories,
    parse_cgroup_mounts,
    parse_meminfo,
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
