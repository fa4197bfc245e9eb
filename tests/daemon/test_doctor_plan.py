"""What the doctor thinks of facts: each check on its own, without a machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.admission_plan import MemoryBound
from everstep.daemon.cli.doctor_plan import (
    DIRECTORY_CHECKS,
    NODE_CHECKS,
    DirectoryFacts,
    Finding,
    Health,
    Mount,
    NodeFacts,
    judge,
    mount_of,
    worst,
)

GIB = 2**30
NODE = NodeFacts(
    directory_count=2,
    requests_per_device=1024,
    aio_used=0,
    aio_max=65536,
    uring_refusal="",
    pin_limit_bytes=None,
    pinned_max_bytes=0,
    memfd_problem="",
    has_huge_pages=True,
    not_compiled=(),
    memory=(MemoryBound(source="/proc/meminfo", available_bytes=64 * GIB),),
    socket_path="/run/everstep/1000/data.sock",
    socket_problem="",
    daemon="",
    temporary_directory="/tmp",
)
DIRECTORY = DirectoryFacts(
    path="/nvme0/everstep",
    engine="aio",
    engine_reason="direct I/O in multiples of 512 bytes; kernel AIO",
    alignment_bytes=512,
    free_bytes=900 * GIB,
    total_bytes=1000 * GIB,
    mount=Mount(kind="xfs", options=("rw", "noatime")),
)


def found(check: str, findings: list[Finding]) -> Finding:
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


@pytest.mark.parametrize(
    ("limit_bytes", "pinned_max_bytes", "health", "words"),
    [
        (8 << 20, 0, Health.OK, "8388608 bytes may be locked (RLIMIT_MEMLOCK); only io.register_arenas needs"),
        (8 << 20, 4 << 60, Health.WARN, "8388608 bytes may be locked (RLIMIT_MEMLOCK), and io.register_arenas is on"),
        (GIB - 1, GIB, Health.WARN, "pinned anew for each block"),
        (GIB, GIB, Health.OK, "enough for all arenas"),
        (None, 4 << 60, Health.OK, "any amount"),
        (None, 0, Health.OK, "any amount"),
    ],
)  # fmt: skip
def test_a_limit_of_locked_memory_matters_to_who_pins_arenas(
    limit_bytes: int | None, pinned_max_bytes: int, health: Health, words: str
) -> None:
    facts = replace(NODE, pin_limit_bytes=limit_bytes, pinned_max_bytes=pinned_max_bytes)
    finding = found("locked memory", judge(facts, [DIRECTORY]))
    assert finding.health is health
    assert words in finding.found
    assert ("LimitMEMLOCK=infinity" in finding.advice) == (health is Health.WARN)


@pytest.mark.parametrize(
    ("cache", "fsync_s", "text"),
    [
        ("write back", 900e-6, "write back; fsync of 4 KiB takes 900 µs"),
        ("write through", 20e-6, "write through; fsync of 4 KiB takes 20 µs"),
        ("unknown", 20e-6, "unknown; fsync of 4 KiB takes 20 µs"),
        ("write back", None, "write back"),
    ],
)
def test_a_write_cache_that_is_flushed_or_not_volatile_is_well(
    cache: str, fsync_s: float | None, text: str
) -> None:
    finding = found("write cache", judge(NODE, [replace(DIRECTORY, write_cache=cache, fsync_s=fsync_s)]))
    assert (finding.health, finding.found) == (Health.OK, text)


def test_devices_that_a_daemon_holds_need_no_more_requests() -> None:
    almost_all = replace(NODE, aio_used=65536 - 1024)
    assert found("kernel AIO", judge(almost_all, [])).advice.startswith("each device reserves 1024:")
    assert found("kernel AIO", judge(replace(almost_all, directory_count=1), [])).health is Health.OK
    assert (
        found("kernel AIO", judge(replace(NODE, directory_count=0, aio_used=65536), [])).health is Health.OK
    )


def test_a_good_node_has_nothing_to_do() -> None:
    findings = judge(NODE, [DIRECTORY])
    assert worst(findings) is Health.OK
    assert not [finding for finding in findings if finding.advice]
    assert len(findings) == len(NODE_CHECKS) + len(DIRECTORY_CHECKS)


@pytest.mark.parametrize(
    ("check", "change", "health", "advice"),
    [
        ("kernel AIO", {"aio_used": 65536 - 2047}, Health.WARN, "fs.aio-max-nr="),
        ("kernel AIO", {"aio_max": -1}, Health.WARN, "io_uring"),
        ("io_uring", {"uring_refusal": "seccomp"}, Health.WARN, "kernel AIO"),
        ("shared memory", {"memfd_problem": "memfd_create failed"}, Health.FAIL, "seccomp"),
        ("compiled parts", {"not_compiled": ("copies",)}, Health.WARN, "C compiler"),
        ("huge pages", {"has_huge_pages": False}, Health.WARN, "Linux 6.1 or newer"),
        (
            "memory",
            {"memory": (*NODE.memory, MemoryBound(source="/sys/fs/cgroup/x", available_bytes=GIB))},
            Health.WARN,
            "two slots",
        ),
        ("socket", {"socket_path": "/" + 107 * "s"}, Health.FAIL, "EVERSTEP_SOCKET"),
        ("socket", {"socket_problem": "/tmp/everstep-1 belongs to uid 2"}, Health.FAIL, "EVERSTEP_SOCKET"),
        ("temporary directory", {"temporary_directory": "/" + 60 * "t"}, Health.WARN, "TMPDIR"),
    ],
)
def test_what_is_wrong_with_a_node(
    check: str, change: dict[str, object], health: Health, advice: str
) -> None:
    finding = found(check, judge(replace(NODE, **change), []))
    assert finding.health is health
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("check", "change", "health", "advice"),
    [
        ("directory", {"mode": 0o755}, Health.WARN, "chmod 0700"),
        ("engine", {"engine": "plain"}, Health.WARN, "page cache"),
        ("direct I/O", {"alignment_bytes": 0}, Health.WARN, "XFS"),
        ("direct I/O", {"alignment_bytes": 65536}, Health.WARN, "sectors"),
        ("file system", {"mount": Mount(kind="tmpfs", options=("rw",))}, Health.WARN, "loss of power"),
        ("file system", {"mount": Mount(kind="nfs4", options=("rw",))}, Health.WARN, "drives of this node"),
        ("file system", {"mount": Mount(kind="btrfs", options=("rw",))}, Health.WARN, "ext4 and XFS"),
        (
            "mount options",
            {"mount": Mount(kind="ext4", options=("rw", "nobarrier"))},
            Health.FAIL,
            "barriers",
        ),
        (
            "mount options",
            {"mount": Mount(kind="ext4", options=("rw", "barrier=0"))},
            Health.FAIL,
            "barriers",
        ),
        ("mount options", {"mount": Mount(kind="xfs", options=("ro",))}, Health.FAIL, "dmesg"),
        (
            "mount options",
            {"mount": Mount(kind="xfs", options=("rw", "strictatime"))},
            Health.WARN,
            "noatime",
        ),
        (
            "mount options",
            {"mount": Mount(kind="ext4", options=("rw", "discard"))},
            Health.WARN,
            "fstrim.timer",
        ),
        ("write cache", {"write_cache": "write back", "fsync_s": 20e-6}, Health.WARN, "volatile cache"),
        ("free space", {"free_bytes": 40 * GIB}, Health.WARN, "keep_last"),
        ("free space", {"free_bytes": GIB - 1}, Health.WARN, "keep_last"),
        ("free space", {"free_bytes": 16 * 2**20}, Health.FAIL, "16.0 MiB stay free"),
        ("drive", {"shares_with": "/nvme0"}, Health.WARN, "each drive"),
    ],
)
def test_what_is_wrong_with_a_directory(
    check: str, change: dict[str, object], health: Health, advice: str
) -> None:
    finding = found(check, judge(NODE, [replace(DIRECTORY, **change)]))
    assert (finding.health, finding.place) == (health, DIRECTORY.path)
    assert advice in finding.advice


def test_of_a_directory_that_cannot_be_looked_at_only_that_is_said() -> None:
    findings = judge(NODE, [DirectoryFacts(path="/gone", problem="No such file or directory"), DIRECTORY])
    assert [finding.check for finding in findings if finding.place == "/gone"] == ["directory"]
    assert worst(findings) is Health.FAIL
    assert len(findings) == len(NODE_CHECKS) + 1 + len(DIRECTORY_CHECKS)


@given(
    st.builds(
        DirectoryFacts,
        path=st.text(min_size=1),
        problem=st.sampled_from(["", "gone"]),
        mode=st.integers(0, 0o7777),
        engine=st.sampled_from(["aio", "uring", "plain"]),
        alignment_bytes=st.sampled_from([0, 512, 4096, 65536]),
        free_bytes=st.integers(0, 2**50),
        total_bytes=st.integers(0, 2**50),
        mount=st.builds(Mount, kind=st.text(), options=st.lists(st.text()).map(tuple)),
        shares_with=st.text(),
    )
)
def test_whatever_is_wrong_comes_with_advice(facts: DirectoryFacts) -> None:
    for finding in judge(NODE, [facts]):
        assert bool(finding.advice) == (finding.health is not Health.OK)


MOUNTS = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,discard
22 21 259:1 / /data rw,noatime shared:2 - xfs /dev/nvme0n1 rw,attr2
23 22 259:2 / /data/my\\040drive rw - ext4 /dev/nvme1n1 rw,barrier=0
24 21 0:30 / /data rw - tmpfs tmpfs rw,size=1g
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "option"),
    [
        ("/home/x", "ext4", "discard"),
        ("/data", "tmpfs", "size=1g"),
        ("/database", "ext4", "relatime"),
        ("/data/my drive/everstep", "ext4", "barrier=0"),
    ],
)
def test_the_innermost_and_last_mount_counts(path: str, kind: str, option: str) -> None:
    mount = mount_of(MOUNTS, path)
    assert mount.kind == kind
    assert option in mount.options


@given(st.text(), st.text())
def test_any_text_is_read(text: str, path: str) -> None:
    assert isinstance(mount_of(text, path), Mount)
