"""Blocks of neighbouring samples that a two-level shuffle keeps near each other; plain Python, for the command line.

Tar files and Parquet row groups are read fast only from one end to the other. A block shuffle permutes the blocks of a
dataset, joins `window` blocks that follow each other in that order, and shuffles the samples inside each such window.
So at most one window has to be at hand, and the order is still a pure function of (seed, epoch): position -> window
-> place in the shuffled window -> block and offset, by sums of block sizes, each way.

Block sizes are kept as runs (how many blocks, how many samples each): equal blocks are one or two runs however large
the dataset. A state carries up to `RUNS_IN_STATE_MAX` runs; of more it carries their digest, and who has the dataset
has the sizes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..core.errors import UsageError

RUNS_IN_STATE_MAX = 8
WINDOW_DEFAULT = 16

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The blocks of a dataset and how many are shuffled together."""

    window: int
    """Blocks shuffled together."""
    count: int
    """Blocks in all."""
    digest: str
    """128 bits over all block sizes, as hex digits."""
    runs: Runs | None
    """(blocks, samples in each) in the order of ids; None where only the digest is known."""

    @property
    def sample_count(self) -> int:
        """Samples in all blocks; 0 where the sizes are not known."""
        return sum(count * size for count, size in self.runs or ())

    def is_like(self, other: "BlockSpec") -> bool:
        """Tell whether both give the same order; one of them may know only the digest."""
        return (self.window, self.count, self.digest) == (other.window, other.count, other.digest)

    def sizes(self) -> Iterator[int]:
        """Yield the size of each block."""
        for count, size in self.known_runs():
            for _ in range(count):
                yield size

    def known_runs(self) -> Runs:
        """Return the runs; UsageError where only their digest is known."""
        if self.runs is None:
            raise UsageError(
                f"the sizes of {self.count} blocks are not in the state, only their digest {self.digest}",
                hint="give the sizes: dataset.block_sizes()",
            )
        return self.runs


def equal_blocks(sample_count: int, size: int, window: int) -> BlockSpec:
    """Return blocks of `size` samples, the last one maybe shorter; O(1) whatever the number of samples."""
    if isinstance(size, bool) or size < 1:
        raise UsageError(f"a block holds at least one sample, got block={size!r}")
    full, rest = divmod(sample_count, size)
    runs = ((full, size),) * (full > 0) + ((1, rest),) * (rest > 0)
    return spec_of_runs(runs, window)


def listed_blocks(sizes: Iterable[int], window: int) -> BlockSpec:
    """Return blocks of these sizes, in the order of their samples' ids."""
    runs: list[tuple[int, int]] = []
    for size, group in groupby(int(size) for size in sizes):
        if size < 0:
            raise UsageError(f"a block size is a whole number from 0, got {size}")
        runs.append((sum(1 for _ in group), size))
    return spec_of_runs(tuple(runs), window)


def spec_of_runs(runs: Runs, window: int) -> BlockSpec:
    """Return the spec of these runs, whose neighbours must differ in size."""
    if isinstance(window, bool) or window < 1:
        raise UsageError(f"a window holds at least one block, got window={window!r}")
    return BlockSpec(
        window=window, count=sum(count for count, _ in runs), digest=digest_of(runs), runs=tuple(runs)
    )


def digest_of(runs: Sequence[tuple[int, int]]) -> str:
    """Return the 128-bit digest of the block sizes; equal exactly for equal lists of sizes."""
    text = ",".join(f"{count}x{size}" for count, size in runs)
    return hashlib.blake2b(f"everstep-blocks-1\0{text}".encode(), digest_size=16).hexdigest()
