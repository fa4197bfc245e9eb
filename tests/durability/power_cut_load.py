"""What a power-cut test writes and what it says: shared by the writing process and the one that checks it."""

import random
from collections.abc import Mapping

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


def content_of(checkpoint: CheckpointId, rank: int) -> Mapping[str, bytes]:
    """Return the bytes of each leaf, which this checkpoint and rank alone have."""
    source = random.Random(f"{checkpoint} {rank}")
    return {leaf.name: source.randbytes(leaf.size_bytes) for leaf in LEAVES}
