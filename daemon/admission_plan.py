"""How much memory an arena may take: the least of what the node and every ancestor cgroup have left. Pure.

Going over a cgroup's limit is a SIGKILL, not an error, so the answer is asked before every 256 MiB that are touched.
"""

from dataclasses import dataclass

from ..core.errors import MemoryRefusedError

ALLOCATION_STEP_BYTES = 256 * 1024 * 1024
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """One thing that limits the arena, with what it has left."""

    source: str
    """/proc/meminfo or the cgroup's directory."""
    available_bytes: int


def parse_meminfo(text: str) -> MemoryBound:
    """Return MemAvailable of /proc/meminfo."""
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return MemoryBound(source="/proc/meminfo", available_bytes=int(line.split()[1]) * 1024)
    raise MemoryRefusedError("/proc/meminfo has no MemAvailable", hint="everstep needs Linux 3.14 or newer")


def cgroup_bound(directory: str, limit_text: str, usage_text: str, stat_text: str) -> MemoryBound | None:
    """Return what a cgroup has left, or None when it sets no limit.

    Clean page cache (inactive_file) is given back under pressure and counts as available.
    """
    limit = limit_text.strip()
    if limit in ("", "max") or int(limit) >= _UNLIMITED_BYTES:
        return None
    fields = dict(line.split() for line in stat_text.splitlines() if len(line.split()) == 2)
    reclaimable = int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))
    return MemoryBound(source=directory, available_bytes=int(limit) - int(usage_text) + reclaimable)


def admit(size_bytes: int, bounds: list[MemoryBound], *, reserve_bytes: int, what: str) -> None:
    """Return when `size_bytes` more fit under every bound with the reserve left.

    Raises:
        MemoryRefusedError: naming the tightest bound.
    """
    tightest = min(bounds, key=lambda bound: bound.available_bytes)
    if size_bytes + reserve_bytes > tightest.available_bytes:
        raise MemoryRefusedError(
            f"{what} needs {size_bytes / 2**20:.0f} MiB, but {tightest.source} has "
            f"{tightest.available_bytes / 2**20:.0f} MiB left of which {reserve_bytes / 2**20:.0f} MiB are kept free",
            hint="free memory, raise the limit, or lower memory.reserve_bytes",
        )


def cgroup_directories(proc_cgroup: str, mounts: dict[str, str]) -> list[tuple[str, bool]]:
    """Return (directory, is_v2) of the process's memory cgroup and all its ancestors, innermost first.

    `mounts` maps "cgroup2" and "memory" (v1) to their mount points; what is not mounted is left out.
    """
    found: list[tuple[str, bool]] = []
    for line in proc_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and "cgroup2" in mounts:
            found += [(directory, True) for directory in _ancestors(mounts["cgroup2"], path)]
        elif "memory" in controllers.split(",") and "memory" in mounts:
            found += [(directory, False) for directory in _ancestors(mounts["memory"], path)]
    return found


def parse_cgroup_mounts(proc_mounts: str) -> dict[str, str]:
    """Return where cgroup v2 and the v1 memory controller are mounted, from the text of /proc/self/mounts."""
    mounts: dict[str, str] = {}
    for line in proc_mounts.splitlines():
        fields = line.split()
        if fields[2] == "cgroup2":
            mounts.setdefault("cgroup2", fields[1])
        elif fields[2] == "cgroup" and "memory" in fields[3].split(","):
            mounts.setdefault("memory", fields[1])
    return mounts


def _ancestors(mount: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return [mount + "".join(f"/{part}" for part in parts[:length]) for length in range(len(parts), -1, -1)]
