"""How many cores this process may use: fewer than the machine has, in a container or under taskset."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def usable_cores(root: Path = ROOT, own: Path = OWN) -> float:
    """Return the cores that this process may use: its affinity, or less by the CPU quota of a cgroup, v1 or v2."""
    return min(float(len(os.sched_getaffinity(0))), *_quotas(root, own))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    yield float("inf")
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        # In a container the path is often that of the host: then only the last one, the root itself, exists.
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            quota = _quota(base / str(folder).lstrip("/"))
            if quota is not None:
                yield quota


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota not in {"max", "-1"} else None
