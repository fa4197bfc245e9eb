"""What page-locking an arena for a GPU takes, and what training notices meanwhile: `python bench/pinning.py`.

As `hook/cuda_pinning.py` does it, in short calls with rests between them, over pages that are mapped before; beside
other ways (ADR 0087). A step is a short kernel and waiting for it, as training that reads its loss does. The memory is
allocated before, as the daemon does.
"""

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from paired import Row, publish, row

from everstep.core.huge_pages import take_huge_pages
from everstep.core.mapping import map_shared
from everstep.hook.cuda_batch import SPAN_BYTES
from everstep.hook.cuda_pinning import REST, cuda_runtime
from everstep.hook.mapped_arena import MappedArena

MIB = 2**20
WHOLE = 2**60


@dataclass(frozen=True, slots=True)
class Way:
    """How an arena is pinned."""

    name: str
    span_bytes: int
    populates: bool
    rest: float
    pages: str = "huge"


WAYS = (
    Way("in one call", WHOLE, populates=False, rest=0.0),
    Way("in one call, pages mapped before", WHOLE, populates=True, rest=0.0),
    Way(f"{SPAN_BYTES // MIB} MiB at a time, without rests", SPAN_BYTES, populates=True, rest=0.0),
    Way(f"{SPAN_BYTES // MIB} MiB at a time", SPAN_BYTES, populates=True, rest=REST),
    Way("in one call, pages mapped before", WHOLE, populates=True, rest=0.0, pages="ordinary"),
    Way(f"{SPAN_BYTES // MIB} MiB at a time", SPAN_BYTES, populates=True, rest=REST, pages="ordinary"),
)


def make_arena(size_bytes: int, pages: str) -> MappedArena:
    """Return memory as the daemon allocates it, in huge pages where the kernel has them, or in ordinary ones."""
    fd = os.memfd_create("bench")
    os.truncate(fd, size_bytes)
    if pages == "huge":
        view = map_shared(fd, size_bytes, is_writable=True, is_inherited=False)
        if not take_huge_pages(fd, view, 0, size_bytes):
            print("not all of it came in huge pages")
        view.release()
    os.posix_fallocate(fd, 0, size_bytes)
    return MappedArena(1, fd, size_bytes, 1)


def pin_s(arena: MappedArena, way: Way) -> float:
    """Return the seconds of locking all of an arena."""
    runtime = cuda_runtime()
    began_s = time.perf_counter()
    for begin in range(0, arena.size_bytes, way.span_bytes):
        size_bytes = min(way.span_bytes, arena.size_bytes - begin)
        if way.populates:
            arena.populate(begin, size_bytes)
        call_s = time.perf_counter()
        code = int(runtime.cudaHostRegister(arena.address + begin, size_bytes, 0))
        assert code == 0, f"cudaHostRegister: {code}"
        time.sleep(way.rest * (time.perf_counter() - call_s))
    return time.perf_counter() - began_s


def unpin_s(arena: MappedArena, way: Way) -> float:
    """Return the seconds of unlocking it."""
    began_s = time.perf_counter()
    for begin in range(0, arena.size_bytes, way.span_bytes):
        cuda_runtime().cudaHostUnregister(arena.address + begin)
    return time.perf_counter() - began_s


def step_s(matrix: torch.Tensor) -> float:
    """Return the seconds of one short kernel, the launch and waiting for it included."""
    began_s = time.perf_counter()
    torch.mm(matrix, matrix, out=matrix)
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def measure(gib: int, way: Way, alone_s: float) -> tuple[float, float, float, float]:
    """Return the seconds of pinning, the longest step beside it, what all steps lost, and the seconds of unpinning."""
    arena = make_arena(gib * 1024 * MIB, way.pages)
    matrix = torch.zeros(1024, 1024, device="cuda")
    took_s: list[float] = []
    thread = threading.Thread(target=lambda: took_s.append(pin_s(arena, way)))
    steps_s: list[float] = []
    thread.start()
    while thread.is_alive():
        steps_s.append(step_s(matrix))
    unpinned_s = unpin_s(arena, way)
    arena.close()
    return took_s[0], max(steps_s), sum(steps_s) - len(steps_s) * alone_s, unpinned_s


def rows_of(gib: int, way: Way, alone_s: float, repeats: int) -> list[Row]:
    """Return the rows of one way to pin so much."""
    found = [measure(gib, way, alone_s) for _ in range(repeats)]
    what = f"{gib} GiB in {way.pages} pages pinned {way.name}"
    return [
        row(f"{what}: time", [each[0] for each in found], goal=None, unit="s"),
        row(f"{what}: longest step", [1e3 * each[1] for each in found], goal=None, unit="ms"),
        row(f"{what}: all steps lost", [each[2] for each in found], goal=None, unit="s"),
        row(f"{what}: unpinned again", [each[3] for each in found], goal=None, unit="s"),
    ]


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("build/bench/pinning.json"))
    options = parser.parse_args()
    matrix = torch.zeros(1024, 1024, device="cuda")
    alone_s = [step_s(matrix) for _ in range(2000)][100:]
    rows = [
        row("step alone", [1e3 * each for each in alone_s], goal=None, unit="ms"),
        row("step alone: longest", [1e3 * max(alone_s)], goal=None, unit="ms"),
    ]
    for way in WAYS:
        rows += rows_of(options.gib, way, statistics.median(alone_s), options.repeats)
    publish("everstep bench: pinning", rows, options.output)


if __name__ == "__main__":
    main()
