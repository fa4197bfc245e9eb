"""A memory cgroup whose page cache is held to a size, whatever else its processes need.

The limit of a cgroup covers everything, workers' heaps and the kernel's own included, and these change while workers
run. So it is set again several times a second: to what is not page cache now, plus the wanted page cache.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

from rig import MB, RigError

MEMORY = Path("/sys/fs/cgroup/memory")
PREFIX = "everstep-bench-"
PERIOD_S = 0.05
STEP_BYTES = MB
"""Smaller changes of the limit are not worth a call."""
CORRECTION = 8
LEAST_BYTES = 64 * MB
"""What processes take between two settings comes out of the page cache: with less of it they would be killed."""
UNLIMITED = -1
END_S = 30.0


class PageCacheGroup:
    """A group below this process's own; processes are put in by their pid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: list[int] = []

    def add(self, pid: int) -> None:
        """Count what this process and its later children take from now on as the group's."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def cached_bytes(self) -> int:
        """Return the page cache of the group's processes; memory shared in tmpfs is none."""
        stat = dict(line.split() for line in (self._path / "memory.stat").read_text().splitlines())
        return int(stat["total_active_file"]) + int(stat["total_inactive_file"])

    def held_bytes(self) -> list[int]:
        """Return what the page cache was, several times a second, since the last call."""
        held, self._held = self._held, []
        return held

    @contextlib.contextmanager
    def holding(self, cache_bytes: int) -> Generator[None]:
        """Keep the page cache at so many bytes at most while the block runs, at LEAST_BYTES if that is more."""
        ended = threading.Event()
        arguments = (max(cache_bytes, LEAST_BYTES), ended)
        thread = threading.Thread(target=self._hold, args=arguments, name="page-cache-group")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._limit(UNLIMITED)

    def _hold(self, cache_bytes: int, ended: threading.Event) -> None:
        limit = spare = 0
        while not ended.wait(PERIOD_S):
            cached = self.cached_bytes()
            self._held.append(cached)
            # The kernel reclaims some more than it must: what was short is added bit by bit, and taken away again.
            spare = min(max(0, spare + (cache_bytes - cached) // CORRECTION), cache_bytes // CORRECTION)
            other = max(0, int((self._path / "memory.usage_in_bytes").read_text()) - cached)
            wanted = other + cache_bytes + spare
            if abs(wanted - limit) >= STEP_BYTES and self._limit(wanted):
                limit = wanted

    def _limit(self, size_bytes: int) -> bool:
        """Set the limit, and say whether the kernel could: not where it finds too little to reclaim just now."""
        try:
            (self._path / "memory.limit_in_bytes").write_text(str(size_bytes))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True


@contextlib.contextmanager
def page_cache_group() -> Generator[PageCacheGroup]:
    """Make a group; removed afterwards, when its processes must have ended. What an earlier one left goes, too.

    Raises:
        RigError: no memory controller of cgroup v1, or no rights.
    """
    parent = MEMORY / _own().lstrip("/")
    if not (parent / "memory.limit_in_bytes").exists():
        raise RigError(
            f"no memory controller of cgroup v1 at {MEMORY}: no page cache can be held to a size here"
        )
    for left in parent.glob(f"{PREFIX}*"):
        if not Path("/proc", left.name.removeprefix(PREFIX)).exists():  # who made it is gone
            left.rmdir()
    path = parent / f"{PREFIX}{os.getpid()}"
    try:
        try:
            path.mkdir()
        except PermissionError as error:
            raise RigError("a memory cgroup needs root") from error
        yield PageCacheGroup(path)
    finally:
        if path.exists():  # a signal may end the process as soon as it does
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a group whose last processes are ending."""
    until_s = time.monotonic() + END_S
    while True:
        try:
            path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
        else:
            return
        time.sleep(PERIOD_S)


def _own() -> str:
    return next(
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if "memory" in line.split(":")[1].split(",")
    )
