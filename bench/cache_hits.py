"""What one hit of the node's cache costs, and how many a process has in a second: `python bench/cache_hits.py`.

A hit is `CachedDataset.__getitem__` of a sample of 100 KB in random order, warm; beside it, in turns, a memcpy of the
same bytes from the same arena into a buffer that is there, plus 5 us: what cannot be saved, and what Python may cost.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from node import hook_daemon
from paired import Row, publish, row
from persist_rows import scratch

from everstep.dataloader import CachedDataset

SAMPLE_BYTES = 100_000
SAMPLES = 3000
ALLOWANCE_S = 5e-6
PAIRS = 21


class Blocks:
    """Samples of random bytes, made when they are asked for."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._count, self._size_bytes = count, size_bytes

    def __len__(self) -> int:
        return self._count

    def get_bytes(self, index: int) -> bytes:
        return random.Random(index).randbytes(self._size_bytes)

    def fingerprint(self) -> str:
        return f"bench-{self._count}-{self._size_bytes}"


def filled(count: int, size_bytes: int) -> CachedDataset[bytes]:
    """Return a dataset with all samples in the cache."""
    dataset = CachedDataset[bytes](Blocks(count, size_bytes), budget=count * (size_bytes + 64) + (1 << 20))
    while dataset.cache_info().cached_count < count:
        for index in range(count):
            dataset[index]
        if not dataset.flush():
            sys.exit("the daemon takes no samples")
    return dataset


def hits_s(dataset: CachedDataset[bytes], order: list[int]) -> float:
    """Return the seconds that one hit took, on average over all samples."""
    began_s = time.perf_counter()
    for index in order:
        dataset[index]
    return (time.perf_counter() - began_s) / len(order)


def copies_s(sources: list[memoryview], target: memoryview, order: list[int]) -> float:
    """Return the seconds that one memcpy of a sample took, on average over all samples."""
    began_s = time.perf_counter()
    for index in order:
        target[:] = sources[index]
    return (time.perf_counter() - began_s) / len(order)


def measured(count: int, size_bytes: int, pairs: int) -> list[Row]:
    """Return the rows; samples come in another order in each pair, the same for both sides."""
    dataset = filled(count, size_bytes)
    sources = [found for index in range(count) if (found := dataset.peek(index)) is not None]
    target = memoryview(bytearray(size_bytes))
    ratios: list[float] = []
    rates: list[float] = []
    costs: list[float] = []
    copies: list[float] = []
    for pair in range(-1, pairs):
        order = random.Random(pair).sample(range(count), count)
        if pair % 2:
            hit_s, copy_s = hits_s(dataset, order), copies_s(sources, target, order)
        else:
            copy_s, hit_s = copies_s(sources, target, order), hits_s(dataset, order)
        if pair >= 0:  # the first one warms up
            ratios.append(hit_s / (copy_s + ALLOWANCE_S))
            rates.append(1 / hit_s)
            costs.append(hit_s * 1e6)
            copies.append(copy_s * 1e6)
    sources.clear()
    dataset.close()
    print(f"one hit {statistics.median(costs):.1f} us, one memcpy {statistics.median(copies):.1f} us")
    size = f"{size_bytes / 1000:.0f} KB"
    return [
        row(f"one hit ({size}) / (memcpy + 5 us)", ratios, goal=1.5, at_most=True),
        row(f"hits per second, one process ({size})", rates, goal=20_000, unit="/s"),
    ]


def main() -> int:
    """Run it; exit code 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--sample-bytes", type=int, default=SAMPLE_BYTES)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path, default=Path("build/bench/cache_hits.json"))
    arguments = parser.parse_args()
    with scratch() as folder, hook_daemon(folder):
        rows = measured(arguments.samples, arguments.sample_bytes, arguments.pairs)
    return 0 if publish("hits of the node's cache", rows, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
