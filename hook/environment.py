"""What a checkpoint notes about the process that took it, and whether that process's daemon would outlive its job."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..core.version import VERSION
from ..proto.frames import Welcome
from .module_state import own_buffers


def environment_notes() -> dict[str, str]:
    """Return versions and the thread count that bit-identical continuation depends on."""
    return {
        "everstep": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "torch_threads": str(torch.get_num_threads()),
        "machine": platform.machine(),
    }


def notes_on_own_buffers(objects: Mapping[str, object]) -> dict[str, str]:
    """Return, as `own_buffers`, which buffers DistributedDataParallel leaves each rank of its own; else nothing."""
    modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
    own = [f"{name}.{buffer}" for name, module in modules.items() for buffer in own_buffers(module)]
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return {"own_buffers": own[0] + more} if own else {}


def killed_with_the_job() -> str:
    """Return why a private daemon would die together with the job, or an empty string.

    A batch system or container ends every process of the job's cgroup; then only a node's daemon keeps memory.
    """
    if os.environ.get("SLURM_JOB_ID"):
        return "Slurm ends all processes of a job"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes ends all processes of a container"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "a container ends with all its processes"
    return ""


_newest: dict[str, int] = {}
"""By control socket, the pid of the newest private daemon that this process was said to lose with its job."""


def news_of_its_end(daemon: Welcome) -> str:
    """Return why a private daemon would die together with the job; once for each daemon, else an empty string.

    A pid alone tells no daemon: the kernel gives it to the next one.
    """
    reason = killed_with_the_job() if daemon.private else ""
    if not reason or _newest.get(daemon.control_socket) == daemon.pid:
        return ""
    _newest[daemon.control_socket] = daemon.pid
    return reason
