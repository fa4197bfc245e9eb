"""What a checkpoint notes about the process that took it, and whether that process's daemon would outlive its job."""

import os
import platform
from pathlib import Path

import torch

from ..core.version import VERSION


def environment_notes() -> dict[str, str]:
    """Return versions and the thread count that bit-identical continuation depends on."""
    return {
        "everstep": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "torch_threads": str(torch.get_num_threads()),
        "machine": platform.machine(),
    }


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
