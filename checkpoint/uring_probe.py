"""Whether this process may use io_uring, and if not, why: asked of the kernel by making a ring."""

import errno
import resource
from contextlib import ExitStack
from pathlib import Path

from .uring import Ring

_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")
_CAP_IPC_LOCK = 14


def uring_refusal(depth: int, ring_count: int = 1) -> str:
    """Return why there are not so many io_urings of this depth for this process; empty when there are."""
    with ExitStack() as made:
        try:
            for _ in range(ring_count):
                made.callback(Ring(depth).close)
        except OSError as exc:
            return refusal_text(exc, disabled=_sysctl())
    return ""


def refusal_text(error: OSError, *, disabled: str) -> str:
    """Return what an error of making a ring means; `disabled` is kernel.io_uring_disabled, empty if unknown."""
    match error.errno:
        case errno.EPERM if disabled in {"1", "2"}:
            return f"kernel.io_uring_disabled is {disabled}"
        case errno.EPERM:
            return "not permitted, though the kernel has it on: a seccomp filter, as container runtimes set, forbids it"
        case errno.ENOSYS:
            return "this kernel has no io_uring, or a seccomp filter hides it"
        case errno.EINVAL:
            return "this kernel's io_uring is older than Linux 5.19"
        case errno.ENOMEM:
            return "no memory for the ring: RLIMIT_MEMLOCK (Linux before 5.12) or the cgroup's limit"
        case _:
            return error.strerror or str(error)


def pin_limit_bytes(pid: int = 0) -> int | None:
    """Return how much memory a process may register with a ring: RLIMIT_MEMLOCK; None for any amount.

    `pid` 0: this process.

    Raises:
        OSError: there is no such process, or it is somebody else's.
    """
    limit_bytes = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)[0]
    return None if limit_bytes == resource.RLIM_INFINITY or _may_lock_memory(pid) else limit_bytes


def _may_lock_memory(pid: int) -> bool:
    text = Path(f"/proc/{pid or 'self'}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines())
    return bool(int(fields["CapEff"], 16) >> _CAP_IPC_LOCK & 1)


def _sysctl() -> str:
    try:
        return _SYSCTL.read_text().strip()
    except OSError:  # before Linux 6.6
        return ""
