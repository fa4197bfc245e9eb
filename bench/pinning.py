"""What page-locking an arena for a GPU takes, and what training notices meanwhile: `python bench/pinning.py`.

One call for all of it, as `hook/cuda_pinning.py` makes it, beside one call per chunk (ADR 0037). A step is a short
kernel and waiting for it, as training that reads its loss does.
"""

import argparse
import os
import statistics
import threading
import time
from pathlib import Path

import torch
from paired import Row, publish, row

from everstep.hook.cuda_pinning import cuda_runtime
from everstep.hook.mapped_arena import MappedArena

MIB = 2**20
CHUNK_BYTES = 256 * MIB
SIZES_GIB = (1, 8)
REPEATS = 3


def pin_s(arena: MappedArena, chunk_bytes: int) -> float:
    """Return the seconds of locking all of an arena; it is unlocked again."""
    runtime = cuda_runtime()
    begins = range(0, arena.size_bytes, chunk_bytes)
    began_s = time.perf_counter()
    for begin in begins:
        size_bytes = min(chunk_bytes, arena.size_bytes - begin)
        code = int(runtime.cudaHostRegister(arena.address + begin, size_bytes, 0))
        assert code == 0, f"cudaHostRegister: {code}"
    took_s = time.perf_counter() - began_s
    for begin in begins:
        runtime.cudaHostUnregister(arena.address + begin)
    return took_s


def step_s(matrix: torch.Tensor) -> float:
    """Return the seconds of one short kernel, the launch and waiting for it included."""
    began_s = time.perf_counter()
    torch.mm(matrix, matrix, out=matrix)
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def measure(gib: int, chunk_bytes: int) -> tuple[float, list[float]]:
    """Return the seconds that pinning took, and those of each step beside it."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, gib * 1024 * MIB)
    arena = MappedArena(1, fd, gib * 1024 * MIB, 1, "")
    matrix = torch.zeros(1024, 1024, device="cuda")
    took_s: list[float] = []
    thread = threading.Thread(target=lambda: took_s.append(pin_s(arena, chunk_bytes)))
    steps_s: list[float] = []
    thread.start()
    while not took_s:
        steps_s.append(step_s(matrix))
    thread.join()
    arena.close()
    return took_s[0], steps_s


def rows_of(gib: int, name: str, chunk_bytes: int) -> list[Row]:
    """Return the rows of one way to pin so much."""
    found = [measure(gib, chunk_bytes) for _ in range(REPEATS)]
    what = f"{gib} GiB pinned {name}"
    return [
        row(f"{what}: time", [took_s for took_s, _ in found], goal=None, unit="s"),
        row(
            f"{what}: median step beside it",
            [1e3 * statistics.median(steps) for _, steps in found],
            goal=None,
            unit="ms",
        ),
        row(
            f"{what}: longest step beside it", [1e3 * max(steps) for _, steps in found], goal=None, unit="ms"
        ),
    ]


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/bench/pinning.json"))
    output = parser.parse_args().output
    matrix = torch.zeros(1024, 1024, device="cuda")
    alone_ms = [1e3 * step_s(matrix) for _ in range(2000)][100:]
    rows = [
        row("step alone: median", alone_ms, goal=None, unit="ms"),
        row("step alone: longest", [max(alone_ms)], goal=None, unit="ms"),
    ]
    for gib in SIZES_GIB:
        rows += rows_of(gib, "in one call", gib * 1024 * MIB)
        rows += rows_of(gib, "in chunks of 256 MiB", CHUNK_BYTES)
    publish("everstep bench: pinning", rows, output)


if __name__ == "__main__":
    main()
