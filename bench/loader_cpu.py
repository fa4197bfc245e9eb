"""Processor time that a batch costs the training process: everstep's loader against torch's, warm, same workers.

    python bench/loader_cpu.py [--pairs 11] [--workers 2]

Each pair is one epoch of both loaders, one after the other, with persistent workers that have run an epoch before; the
order within a pair changes each time. Processor time is that of the whole process, torch's feeder threads included.
The A/A row is torch against torch. The dataset costs nothing: what is measured is the loader.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.data

from everstep.dataloader import DataLoader


class Images(torch.utils.data.Dataset[Any]):
    """Samples of this shape, all the same tensor."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._count = count
        self._sample = torch.zeros(shape, dtype=dtype)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a sample and its label."""
        return self._sample, index


CASES: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "8 numbers, batch 32": ((8,), torch.float32, 32),
    "1024 tokens, batch 16": ((1024,), torch.int64, 16),
    "3x64x64 floats, batch 64": ((3, 64, 64), torch.float32, 64),
    "3x224x224 bytes, batch 64": ((3, 224, 224), torch.uint8, 64),
}


def epoch(loader: Iterable[Any], *, touch: bool) -> tuple[float, float, int]:
    """Return processor seconds, wall seconds and batches of one epoch; `touch` reads every batch once."""
    count, cpu, wall = 0, time.process_time(), time.perf_counter()
    for images, _ in loader:
        if touch:
            images.view(-1).view(torch.uint8)[::4096].sum()
        count += 1
    return time.process_time() - cpu, time.perf_counter() - wall, count


def compare(
    left: Callable[[], Iterable[Any]], right: Callable[[], Iterable[Any]], pairs: int, touch: bool
) -> None:
    """Print the medians of both, and of the ratios of pairs."""
    loaders = (left(), right())
    for loader in loaders:
        epoch(loader, touch=touch)
    cpus: list[tuple[float, float]] = []
    walls: list[float] = []
    for pair in range(pairs):
        results = {}
        for side in (0, 1) if pair % 2 else (1, 0):
            results[side] = epoch(loaders[side], touch=touch)
        cpus.append((results[0][0] / results[0][2], results[1][0] / results[1][2]))
        walls.append(results[0][1] / results[1][1])
    ratios = sorted(a / b for a, b in cpus)
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
    ours, other = (statistics.median(side) * 1e6 for side in zip(*cpus, strict=True))
    print(
        f"  {ours:7.0f} us / {other:7.0f} us   cpu {middle:.3f} [{low:.3f} {high:.3f}]"
        f"   wall {statistics.median(walls):.3f} [{min(walls):.3f} {max(walls):.3f}]"
    )


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, (shape, dtype, batch) in CASES.items():
        data = Images(arguments.batches * batch, shape, dtype)
        common: dict[str, Any] = {
            "batch_size": batch, "num_workers": arguments.workers, "persistent_workers": True, "shuffle": True,
        }  # fmt: skip

        def torchs(data: Images = data, common: dict[str, Any] = common) -> Iterable[Any]:
            return torch.utils.data.DataLoader(data, **common)

        def ours(data: Images = data, common: dict[str, Any] = common) -> Iterable[Any]:
            return DataLoader(data, augment_seed=False, **common)

        for touch in (False, True):
            print(f"{name}{', every page read' if touch else ''}")
            print("  A/A    ", end="")
            compare(torchs, torchs, arguments.pairs, touch)
            print("  ours   ", end="")
            compare(ours, torchs, arguments.pairs, touch)


if __name__ == "__main__":
    main()
