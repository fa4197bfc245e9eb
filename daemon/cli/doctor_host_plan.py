"""What `everstep doctor` thinks of the machine and of the daemon's surroundings: more checks of the node. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from ...core.sizes import size_text
from .opinions import Opinion, fail_opinion, no_opinion, ok_opinion, warn_opinion

KERNEL_LEAST = (5, 10)
"""pidfds for poll() and openat2; older ones are not tried."""
KERNEL_GOOD = (6, 5)
"""STATX_DIOALIGN (6.1) and SO_PEERPIDFD (6.5)."""
DESCRIPTORS_LOW = 4096
"""Each device takes up to two for each shard that is written, each rank four."""
SHM_LOW_BYTES = 1024**3
CLOCK_LEAST_UNIX_S = 1_767_225_600
"""2026-01-01: a clock before this version was written is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What was found."""

    kernel_release: str
    architecture: str
    descriptor_limit: int
    """RLIMIT_NOFILE, the hard one, of the daemon that answers, else of this process."""
    memfd_noexec: int
    """vm.memfd_noexec; -1: the kernel does not have it."""
    memfd_problem: str
    """Why a memfd cannot be made here; empty: it can."""
    shm_total_bytes: int
    """Of /dev/shm; 0: there is none."""
    shm_free_bytes: int
    clock_unix_s: float
    is_clock_synchronized: bool | None
    """None: the kernel does not say it to this process."""
    numa_nodes: int
    gpu_problem: str
    """Why memory cannot be registered with a GPU; empty: it can."""
    gpu_tried: bool
    """False: there is no GPU to try it with, or no driver."""
    seccomp_mode: int
    """0: no filter; 2: one."""
    uid: int
    may_lock_memory: bool
    """CAP_IPC_LOCK."""
    daemon_pid: int = 0
    """0: none answers."""
    manager_address: str = ""
    """$NOTIFY_SOCKET of the daemon."""
    fd_store_max: int = 0
    """$FDSTORE of the daemon: so many descriptors survive its end; 0: none."""
    metrics_port: int = 0
    """0: the daemon serves no metrics."""
    metrics_problem: str = ""
    """Why nothing answers there; empty: something does."""
    control_problem: str = ""
    """Why the control API does not answer; empty: it does, or there is no daemon."""


def _kernel(facts: HostFacts) -> Opinion:
    found = f"Linux {facts.kernel_release}, {facts.architecture}"
    if facts.architecture not in ("x86_64", "aarch64"):
        return fail_opinion(found, "everstep knows the system calls of x86_64 and aarch64 only")
    version = kernel_version(facts.kernel_release)
    if version < KERNEL_LEAST:
        return fail_opinion(found, f"use Linux {_dotted(KERNEL_GOOD)} or newer")
    if version < KERNEL_GOOD:
        return warn_opinion(
            found,
            f"from Linux {_dotted(KERNEL_GOOD)} on direct I/O says what it needs, and who a client is cannot be"
            " mistaken: upgrade when you can",
        )
    return ok_opinion(found)


def kernel_version(release: str) -> tuple[int, int]:
    """Return major and minor of `uname -r`; (0, 0) where it says nothing like that."""
    parts = release.split(".")
    digits = ["".join(each for each in part if each.isdigit()) for part in parts[:2]]
    return (int(digits[0]), int(digits[1])) if len(digits) == 2 and all(digits) else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _descriptors(facts: HostFacts) -> Opinion:
    found = f"{facts.descriptor_limit} may be open (RLIMIT_NOFILE, hard)"
    if facts.descriptor_limit < DESCRIPTORS_LOW:
        return warn_opinion(
            found, "raise it: LimitNOFILE=1048576 in the unit, or ulimit -Hn before the start"
        )
    return ok_opinion(found)


def _memfd_noexec(facts: HostFacts) -> Opinion:
    if facts.memfd_noexec < 0:
        return ok_opinion("vm.memfd_noexec: this kernel does not have it")
    found = f"vm.memfd_noexec is {facts.memfd_noexec}"
    if facts.memfd_noexec >= 2 and facts.memfd_problem:
        return fail_opinion(
            f"{found}, and {facts.memfd_problem}", "sysctl vm.memfd_noexec=1 is as safe for data"
        )
    return ok_opinion(found)


def _shm(facts: HostFacts) -> Opinion:
    if not facts.shm_total_bytes:
        return warn_opinion(
            "there is no /dev/shm", "everstep needs none; torch's DataLoader workers do: mount a tmpfs"
        )
    found = f"{size_text(facts.shm_free_bytes)} of {size_text(facts.shm_total_bytes)} free in /dev/shm"
    if facts.shm_total_bytes < SHM_LOW_BYTES:
        return warn_opinion(
            found,
            "everstep needs none of it; torch's DataLoader workers do: docker run --shm-size=8g, or in Kubernetes an"
            " emptyDir with medium: Memory",
        )
    return ok_opinion(found)


def _clock(facts: HostFacts) -> Opinion:
    if facts.clock_unix_s < CLOCK_LEAST_UNIX_S:
        return fail_opinion("the clock is in the past", "set it: retention and scrubs go by the wall clock")
    if facts.is_clock_synchronized is None:
        return ok_opinion("set; whether it is synchronized cannot be asked here")
    if not facts.is_clock_synchronized:
        return warn_opinion(
            "not synchronized",
            "start chrony or systemd-timesyncd: times of several nodes are compared in logs",
        )
    return ok_opinion("synchronized")


def _numa(facts: HostFacts) -> Opinion:
    if facts.numa_nodes > 1:
        return ok_opinion(
            f"{facts.numa_nodes} nodes: an arena lies on the node of the daemon's threads that touch it first"
        )
    return ok_opinion("one node")


def _gpu(facts: HostFacts) -> Opinion:
    if not facts.gpu_tried:
        return no_opinion(f"not tried: {facts.gpu_problem or 'no GPU here'}")
    if facts.gpu_problem:
        return warn_opinion(
            f"memory cannot be registered: {facts.gpu_problem}",
            "copies go through pageable memory, which is slower: raise RLIMIT_MEMLOCK (ulimit -l unlimited)",
        )
    return ok_opinion("a shared mapping can be registered (cuMemHostRegister)")


def _permissions(facts: HostFacts) -> Opinion:
    parts = [f"uid {facts.uid}"]
    parts.append("may lock memory" if facts.may_lock_memory else "no CAP_IPC_LOCK")
    parts.append("no seccomp filter" if not facts.seccomp_mode else "under a seccomp filter")
    return ok_opinion(", ".join(parts))


def _fd_store(facts: HostFacts) -> Opinion:
    if not facts.daemon_pid:
        return no_opinion("no daemon answers")
    if not facts.manager_address:
        return ok_opinion("the daemon is not under a service manager: what is only in memory ends with it")
    if not facts.fd_store_max:
        return warn_opinion(
            "the service manager keeps no descriptors for the daemon",
            "set FileDescriptorStoreMax= in the unit, so that snapshots in memory survive a restart of the daemon",
        )
    return ok_opinion(f"{facts.fd_store_max} descriptors survive the daemon")


def _ports(facts: HostFacts) -> Opinion:
    if facts.control_problem:
        return fail_opinion(
            f"the control API does not answer: {facts.control_problem}",
            "look at the daemon's log; `everstep debug bundle` takes its stacks",
        )
    if not facts.daemon_pid:
        return no_opinion("no daemon answers")
    if not facts.metrics_port:
        return ok_opinion("metrics are not served")
    if facts.metrics_problem:
        return warn_opinion(
            f"nothing answers on 127.0.0.1:{facts.metrics_port}: {facts.metrics_problem}",
            "look at the daemon's log; another network namespace has another loopback",
        )
    return ok_opinion(f"metrics answer on 127.0.0.1:{facts.metrics_port}")


HOST_CHECKS: tuple[tuple[str, Callable[[HostFacts], Opinion]], ...] = (
    ("kernel", _kernel),
    ("file descriptors", _descriptors),
    ("vm.memfd_noexec", _memfd_noexec),
    ("shm size", _shm),
    ("clock", _clock),
    ("NUMA", _numa),
    ("GPU registration", _gpu),
    ("permissions", _permissions),
    ("descriptor store", _fd_store),
    ("ports", _ports),
)
