"""What a power-cut test writes and what it says: shared by the writing process and the one that checks it."""

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId

RUN_NAME = "power-cut"
WORLD_SIZE = 2
KEEP_LAST = 2
ATTEMPT_CYCLES = 12
"""So many cycles go on in one attempt."""

LEAVES = (
    whole_leaf("model.weight", "float32", (401, 257)),
    whole_leaf("model.bias", "float64", (11,)),
    whole_leaf("opt.state.weight.exp_avg", "bfloat16", (401, 257)),
    whole_leaf("opt.state.weight.step", "int64", ()),
    whole_leaf("flags", "bool", (4099,)),
)
"""About 600 KiB: several segments that end anywhere in a block."""


@functools.lru_cache(maxsize=32)
def content_of(checkpoint: CheckpointId, rank: int) -> Mapping[str, bytes]:
    """Return the bytes of each leaf, which this checkpoint and rank alone have."""
    source = random.Random(f"{checkpoint} {rank}")
    return {leaf.name: source.randbytes(leaf.size_bytes) for leaf in LEAVES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One cycle of the writing process."""

    directories: tuple[Path, ...]
    """The devices; their places here are their numbers."""
    readmit: int | None = None
    """The device that is taken back when the store is opened."""
    changes: tuple[tuple[str, int], ...] = ()
    """(drain, cancel or retire; device), made in turn while checkpoints are written."""
    dawdles: bool = False
    """The storage does, see dawdling_storage.py."""

    def line(self) -> str:
        """Return it as one line for the writing process."""
        return json.dumps(
            [[str(path) for path in self.directories], self.readmit, self.changes, self.dawdles]
        )

    @classmethod
    def of(cls, line: str) -> "Order":
        """Return what a line says."""
        directories, readmit, changes, dawdles = json.loads(line)
        return cls(
            directories=tuple(Path(path) for path in directories),
            readmit=readmit,
            changes=tuple((verb, number) for verb, number in changes),
            dawdles=dawdles,
        )
