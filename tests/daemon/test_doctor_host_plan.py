"""What the doctor thinks of the machine: each check on its own, without one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.daemon.cli.doctor_host_plan import HOST_CHECKS, HostFacts, kernel_version
from everstep.daemon.cli.doctor_plan import DIRECTORY_CHECKS, NODE_CHECKS, judge_host
from everstep.daemon.cli.opinions import Health

GIB = 2**30
HOST = HostFacts(
    kernel_release="6.8.0-45-generic",
    architecture="x86_64",
    descriptor_limit=1048576,
    memfd_noexec=1,
    memfd_problem="",
    shm_total_bytes=64 * GIB,
    shm_free_bytes=60 * GIB,
    clock_unix_s=1.8e9,
    is_clock_synchronized=True,
    numa_nodes=2,
    gpu_problem="",
    gpu_tried=True,
    seccomp_mode=2,
    uid=1000,
    may_lock_memory=False,
    daemon_pid=7,
    manager_address="/run/systemd/notify",
    fd_store_max=512,
    metrics_port=9464,
)


def test_a_good_host_has_nothing_to_do() -> None:
    findings = judge_host(HOST)
    assert [finding.check for finding in findings] == [name for name, _ in HOST_CHECKS]
    assert {finding.health for finding in findings} == {Health.OK}
    assert not [finding for finding in findings if finding.advice]


@pytest.mark.parametrize(
    ("check", "facts", "health", "words"),
    [
        ("kernel", {"kernel_release": "5.4.0"}, Health.FAIL, "6.5 or newer"),
        ("kernel", {"kernel_release": "6.1.0-18-amd64"}, Health.WARN, "6.5"),
        ("kernel", {"kernel_release": "rolling"}, Health.FAIL, "6.5"),
        ("kernel", {"architecture": "riscv64"}, Health.FAIL, "x86_64 and aarch64"),
        ("file descriptors", {"descriptor_limit": 1024}, Health.WARN, "LimitNOFILE"),
        (
            "vm.memfd_noexec",
            {"memfd_noexec": 2, "memfd_problem": "x"},
            Health.FAIL,
            "sysctl vm.memfd_noexec=1",
        ),
        ("vm.memfd_noexec", {"memfd_noexec": 2}, Health.OK, ""),
        ("vm.memfd_noexec", {"memfd_noexec": -1}, Health.OK, ""),
        ("shm size", {"shm_total_bytes": 64 << 20, "shm_free_bytes": 0}, Health.WARN, "--shm-size"),
        ("shm size", {"shm_total_bytes": 0}, Health.WARN, "mount a tmpfs"),
        ("clock", {"clock_unix_s": 0.0}, Health.FAIL, "set it"),
        ("clock", {"is_clock_synchronized": False}, Health.WARN, "chrony"),
        ("clock", {"is_clock_synchronized": None}, Health.OK, ""),
        ("GPU registration", {"gpu_problem": "CUDA error 1"}, Health.WARN, "RLIMIT_MEMLOCK"),
        ("GPU registration", {"gpu_problem": "no NVIDIA GPU here", "gpu_tried": False}, Health.UNKNOWN, ""),
        ("descriptor store", {"fd_store_max": 0}, Health.WARN, "FileDescriptorStoreMax"),
        ("descriptor store", {"manager_address": "", "fd_store_max": 0}, Health.OK, ""),
        ("ports", {"metrics_problem": "Connection refused"}, Health.WARN, "network namespace"),
        ("ports", {"control_problem": "it does not answer"}, Health.FAIL, "debug bundle"),
        ("ports", {"daemon_pid": 0, "metrics_problem": "x"}, Health.UNKNOWN, ""),
    ],
)
def test_what_is_bad_says_what_to_do(check: str, facts: dict[str, Any], health: Health, words: str) -> None:
    (finding,) = [each for each in judge_host(replace(HOST, **facts)) if each.check == check]
    assert finding.health is health
    assert words in finding.advice
    assert bool(finding.advice) == (health in {Health.WARN, Health.FAIL})


def test_a_gpu_that_is_not_there_is_said_as_not_tried() -> None:
    facts = replace(HOST, gpu_tried=False, gpu_problem="no NVIDIA GPU here")
    (finding,) = [each for each in judge_host(facts) if each.check == "GPU registration"]
    assert finding.found == "not tried: no NVIDIA GPU here"


@pytest.mark.parametrize(
    ("release", "version"), [("6.18.44-fc", (6, 18)), ("5.10", (5, 10)), ("6", (0, 0)), ("", (0, 0))]
)
def test_kernel_versions(release: str, version: tuple[int, int]) -> None:
    assert kernel_version(release) == version


def test_the_documents_table_has_every_check() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()
    section = text.split("## Doctor")[1].split("\n## ")[0]
    named = [name for row in re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE) for name in row.split(", ")]
    checks = [name for name, _ in (*HOST_CHECKS, *NODE_CHECKS, *DIRECTORY_CHECKS)]
    assert [name for name in named if name not in {"check", "---"}] == checks
