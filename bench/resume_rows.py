"""How long a loader takes from `load_state_dict` to the first samples' numbers, and how much memory, far into 10^9."""

import re
import time
from collections.abc import Generator
from pathlib import Path

from child import child
from paired import Row, row

from everstep.dataloader import DataLoader

SAMPLES, CURSOR, BATCH = 10**9, 900_000_000, 256
TIME_GOAL_MS, MEMORY_GOAL_MB = 50.0, 50.0
MB = 10**6


class Numbers:
    """Samples that are their numbers."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        """Return its number."""
        return index


def resume_rows(pairs: int) -> list[Row]:
    """Return time and memory, each sample in a process of its own."""
    times_ms: list[float] = []
    added_mb: list[float] = []
    for _ in range(pairs):
        with child(_resumed) as process:
            took_s, added_bytes, first = process.next()
        assert len(first) == BATCH, first
        times_ms.append(took_s * 1e3)
        added_mb.append(added_bytes / MB)
    name = f"resume at sample {CURSOR:,} of {SAMPLES:,}"
    return [
        row(f"{name}: to the first numbers", times_ms, goal=TIME_GOAL_MS, at_most=True, unit="ms"),
        row(f"{name}: memory added, peak", added_mb, goal=MEMORY_GOAL_MB, at_most=True, unit="MB"),
    ]


def _resumed() -> Generator[tuple[float, int, list[int]]]:
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True, seed=0, collate_fn=list)  # pyright: ignore[reportArgumentType]
    state = {**loader.state_dict(), "cursor": CURSOR}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory_bytes("VmRSS")
    began_s = time.perf_counter()
    loader.load_state_dict(state)
    first = next(iter(loader))
    took_s = time.perf_counter() - began_s
    yield took_s, _memory_bytes("VmHWM") - before, first


def _memory_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
