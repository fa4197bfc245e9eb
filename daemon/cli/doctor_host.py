"""Looking at the machine and at the daemon's surroundings for `everstep doctor`. Changes nothing."""

import contextlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from cffi import FFI

from ...core.errors import EverstepError
from ...core.paths import data_socket_path
from .doctor_host_plan import HostFacts

GPU_DEADLINE_S = 30.0
CONNECT_DEADLINE_S = 2.0
_CAP_IPC_LOCK = 14
_TIME_ERROR = 5
"""What adjtimex(2) returns while the clock is not synchronized."""


def look_at_host(*, memfd_problem: str, control_problem: str) -> HostFacts:
    """Return what is found here; `control_problem`: why a daemon that listens did not answer."""
    uname, status = os.uname(), _status("self")
    pid = daemon_pid()
    environment = _environment(pid)
    shm_total, shm_free = _shm()
    gpu_problem, gpu_tried = _gpu()
    port = _metrics_port()
    return HostFacts(
        kernel_release=uname.release,
        architecture=platform.machine(),
        descriptor_limit=_descriptor_limit(pid),
        memfd_noexec=_number("/proc/sys/vm/memfd_noexec"),
        memfd_problem=memfd_problem,
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        clock_unix_s=time.time(),
        is_clock_synchronized=_is_clock_synchronized(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        gpu_problem=gpu_problem,
        gpu_tried=gpu_tried,
        seccomp_mode=int(status.get("Seccomp", "0")),
        uid=os.geteuid(),
        may_lock_memory=bool(int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1),
        daemon_pid=pid,
        manager_address=environment.get("NOTIFY_SOCKET", ""),
        fd_store_max=int(environment.get("FDSTORE", "0") or "0"),
        metrics_port=port if pid else 0,
        metrics_problem=_refusal(port) if pid and port else "",
        control_problem=control_problem,
    )


def _status(process: str) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def daemon_pid() -> int:
    """Return the process that listens on the user's socket; 0: nobody does."""
    from .bundle_sources import daemon_process  # noqa: PLC0415  it reads much else

    with contextlib.suppress(OSError, EverstepError, ValueError, KeyError):
        found = daemon_process(data_socket_path())
        os.close(found.pidfd)
        return found.pid
    return 0


def _environment(pid: int) -> dict[str, str]:
    """Return a process's variables; nothing of one that is somebody else's."""
    if not pid:
        return {}
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (pair.partition("=") for pair in content.decode(errors="replace").split("\0") if pair)
    return {name: value for name, _, value in pairs}


def _descriptor_limit(pid: int) -> int:
    with contextlib.suppress(OSError):
        if pid:
            return resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _number(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except OSError:
        return -1


def _shm() -> tuple[int, int]:
    try:
        space = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size, nothing is put there
    except OSError:
        return 0, 0
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def _is_clock_synchronized() -> bool | None:
    ffi = FFI()
    ffi.cdef("int adjtimex(void *);")
    asked = ffi.new("char[512]")  # struct timex has 208 bytes; modes 0 at its beginning: only ask
    library = cast(Any, ffi.dlopen(None))
    state = int(library.adjtimex(asked))
    return None if state < 0 else state != _TIME_ERROR


def _gpu() -> tuple[str, bool]:
    """Return why memory cannot be registered with a GPU (empty: it can), and whether it was tried.

    In a process of its own: a CUDA context takes some 300 MiB and does not go away.
    """
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU here", False
    command = [sys.executable, "-P", "-m", "everstep.daemon.cli.gpu_child"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GPU_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"the driver did not answer within {GPU_DEADLINE_S:.0f} s", True
    said = (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2])[:200]
    return (
        ("", True)
        if done.returncode == 0
        else (said or f"exit status {done.returncode}", done.returncode != 3)
    )


def _metrics_port() -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads(data_socket_path().with_name("daemon.json").read_bytes())["metrics_port"])
    return 0


def _refusal(port: int) -> str:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=CONNECT_DEADLINE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
