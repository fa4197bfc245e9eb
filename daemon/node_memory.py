"""Reads what is left of the node's memory and of every ancestor cgroup's limit (v1 and v2)."""

from collections.abc import Iterable
from pathlib import Path

import aiofiles

from .admission_plan import MemoryBound, cgroup_bound, cgroup_directories, parse_cgroup_mounts, parse_meminfo

_V2 = ("memory.max", "memory.current", "memory.stat")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


async def read_memory_bounds() -> list[MemoryBound]:
    """Return every bound that an allocation of this process must fit under; at least the node's own."""
    bounds = [parse_meminfo(await _read("/proc/meminfo"))]
    mounts = parse_cgroup_mounts(await _read("/proc/self/mounts"))
    for directory, is_v2 in cgroup_directories(await _read("/proc/self/cgroup"), mounts):
        texts = await _read_present(Path(directory) / name for name in (_V2 if is_v2 else _V1))
        if texts is not None:
            bound = cgroup_bound(directory, *texts)
            if bound is not None:
                bounds.append(bound)
    return bounds


async def _read(path: str | Path) -> str:
    async with aiofiles.open(path, encoding="utf-8") as file:
        return await file.read()


async def _read_present(paths: Iterable[Path]) -> list[str] | None:
    """Return the files' texts, or None where one is absent: a root cgroup has no limit, a container hides parents."""
    texts: list[str] = []
    for path in paths:
        if not path.exists():
            return None
        texts.append(await _read(path))
    return texts


def memory_bounds_now() -> list[MemoryBound]:
    """Return the same without an event loop, for a thread that may block for a moment."""
    bounds = [parse_meminfo(_read_now("/proc/meminfo"))]
    mounts = parse_cgroup_mounts(_read_now("/proc/self/mounts"))
    for directory, is_v2 in cgroup_directories(_read_now("/proc/self/cgroup"), mounts):
        paths = [Path(directory) / name for name in (_V2 if is_v2 else _V1)]
        if all(path.exists() for path in paths):
            bound = cgroup_bound(directory, *map(_read_now, paths))
            if bound is not None:
                bounds.append(bound)
    return bounds


def _read_now(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8")
