"""Processor time that a batch costs the training process: everstep's loader against torch's, warm, same workers.

    python bench/loader_cpu.py [--pairs 11] [--workers 2]      # a dataset that costs nothing: the loader alone

In each round every loader runs one epoch, in turn, with persistent workers that have run an epoch before; who begins
changes from round to round. Processor time is that of the whole process, torch's feeder threads included. Ratios are
taken within a round, to torch's loader; a second loader of torch's gives the A/A ratio. Every page of a batch is read
once, as training would.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from paired import Row, publish, row

from everstep.dataloader import DataLoader

PAGE_BYTES = 4096
CPU_GOAL = 1.02


class Images(torch.utils.data.Dataset[Any]):
    """Samples of this shape, all the same tensor."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._count = count
        self._sample = torch.zeros(shape, dtype=dtype)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sample."""
        return self._sample


CASES: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "8 numbers, batch 32": ((8,), torch.float32, 32),
    "1024 tokens, batch 16": ((1024,), torch.int64, 16),
    "3x64x64 floats, batch 64": ((3, 64, 64), torch.float32, 64),
    "3x224x224 bytes, batch 64": ((3, 224, 224), torch.uint8, 64),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one batch costs, on average over an epoch: seconds."""

    cpu_s: float
    """Of the training process."""
    wall_s: float


def epoch(loader: Iterable[Any], after_step: Callable[[], object] | None = None) -> Cost:
    """Run one epoch; every page of a batch is read, then `after_step` is called."""
    count, cpu_s, began_s = 0, time.process_time(), time.perf_counter()
    for batch in loader:
        batch.view(-1).view(torch.uint8)[::PAGE_BYTES].sum()
        if after_step is not None:
            after_step()
        count += 1
    return Cost((time.process_time() - cpu_s) / count, (time.perf_counter() - began_s) / count)


def rounds(sides: Mapping[str, Callable[[], Cost]], count: int) -> dict[str, list[Cost]]:
    """Return the costs of each side in so many rounds; before them each has run once to warm up."""
    found: dict[str, list[Cost]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(-1, count):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            cost = sides[name]()
            if turn >= 0:
                found[name].append(cost)
    return found


def ratio(ours: Sequence[Cost], theirs: Sequence[Cost], part: Callable[[Cost], float]) -> list[float]:
    """Return the ratio of each round."""
    return [part(left) / part(right) for left, right in zip(ours, theirs, strict=True)]


def cpu_s(cost: Cost) -> float:
    """Return the processor time."""
    return cost.cpu_s


def wall_s(cost: Cost) -> float:
    """Return the time on the wall."""
    return cost.wall_s


def compared(
    name: str, data: torch.utils.data.Dataset[Any], *, batch_size: int, workers: int, pairs: int
) -> list[Row]:
    """Return processor time and time of a batch beside DataLoader's, and what one DataLoader is beside another."""
    common: dict[str, Any] = {
        "batch_size": batch_size, "num_workers": workers, "persistent_workers": True, "shuffle": True,
    }  # fmt: skip
    loaders: dict[str, Iterable[Any]] = {
        "ours": DataLoader(data, **common),
        "theirs": torch.utils.data.DataLoader(data, **common),
        "again": torch.utils.data.DataLoader(data, **common),
    }
    found = rounds({side: lambda each=each: epoch(each) for side, each in loaders.items()}, pairs)
    ours, theirs, again = found["ours"], found["theirs"], found["again"]
    return [
        row(
            f"CPU of a batch / DataLoader's, {name}", ratio(ours, theirs, cpu_s), goal=CPU_GOAL, at_most=True
        ),
        row(f"A/A: DataLoader's / DataLoader's, CPU, {name}", ratio(again, theirs, cpu_s), goal=None),
        row(f"time of a batch / DataLoader's, {name}", ratio(ours, theirs, wall_s), goal=None, at_most=True),
        row(f"A/A: DataLoader's / DataLoader's, time, {name}", ratio(again, theirs, wall_s), goal=None),
        row(f"CPU of a batch, {name}", [cost.cpu_s * 1e6 for cost in ours], goal=None, unit="us"),
    ]


def main() -> int:
    """Print the rows of each case; exit status 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("build/bench/loader_cpu.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, (shape, dtype, batch) in CASES.items():
        data = Images(args.batches * batch, shape, dtype)
        rows += compared(name, data, batch_size=batch, workers=args.workers, pairs=args.pairs)
    return 0 if publish("what a batch costs the training process", rows, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
