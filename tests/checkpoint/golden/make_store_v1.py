"""Writes the golden store of format v1 beside this file. Run once; its result is never written again.

    .venv/bin/python tests/checkpoint/golden/make_store_v1.py

A later format gets a script and a directory of its own: what is in `store_v1` must open forever.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

from msgspec.structs import replace

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import Alias, LeafSpec, whole_leaf
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import State, each_engine, memory_arena, opened
from everstep.core.ids import CheckpointId

TARGET = Path(__file__).parent / "store_v1"

LEAVES = (
    whole_leaf("model.embedding.weight", "bfloat16", (33, 5), replicas=2),
    LeafSpec(
        name="model.conv.weight",
        dtype="float32",
        shape=(2, 3, 2, 2),
        strides=(12, 1, 6, 3),
        global_shape=(2, 3, 2, 2),
        global_offset=(0, 0, 0, 0),
    ),
    whole_leaf("optimizer.state.model.embedding.weight.step", "float32", ()),
    whole_leaf("model.norm.num_batches_tracked", "int64", ()),
    whole_leaf("model.fp8", "float8_e5m2fnuz", (9,)),
    whole_leaf("model.mask", "bool", (3,)),
    whole_leaf("model.empty", "float64", (0, 4)),
    whole_leaf("gewichte.größe ✓", "complex64", (2,)),
)
ALIASES = (
    Alias(
        name="model.head.weight",
        of="model.embedding.weight",
        offset_bytes=0,
        dtype="bfloat16",
        shape=(33, 5),
        strides=(5, 1),
    ),
)
VALUES = b'{"epoch":3,"lr":0.001,"rng":{"$bytes":"AAEC"},"big":340282366920938463463374607431768211455}'


def content_of(leaf: LeafSpec, checkpoint: CheckpointId, rank: int) -> bytes:
    return random.Random(f"{leaf.name} {checkpoint} {rank}").randbytes(leaf.size_bytes)


def save(run: RunStore, checkpoint: CheckpointId, rank: int, parent: CheckpointId | None) -> None:
    layout = plan_layout(LEAVES, ALIASES, segment_count=len(run.store.devices))
    state = State(layout, {leaf.name: content_of(leaf, checkpoint, rank) for leaf in LEAVES})
    draft = replace(
        state.draft(checkpoint, rank=rank, world_size=2),
        parent=parent,
        values=VALUES,
        notes={"epoch": "3", "finished": "true" if checkpoint.attempt == 3 else "false"},
    )
    with memory_arena(layout.slot_size_bytes) as arena, each_engine(run.store) as engines:
        state.copy_into(arena)
        persist_shard(run, draft, arena, engines=engines)


def main() -> None:
    if TARGET.exists():
        raise SystemExit(f"{TARGET} is there already; a golden store is written once")
    work = Path(tempfile.mkdtemp())
    dirs = [work / "device0", work / "device1"]
    for path in dirs:
        path.mkdir()
    with opened(dirs) as (store, _):
        run = store.run(1000, "golden run", create=True)
        run.begin_attempt(1, fresh=False)
        for rank in range(2):
            save(run, CheckpointId(1, 7), rank, None)
        run.begin_attempt(2, fresh=True)
        for step in (4, 8):
            for rank in range(2):
                save(run, CheckpointId(2, step), rank, None)
            run.set_complete_floor(CheckpointId(2, step))
        run.begin_attempt(3, fresh=False)
        save(run, CheckpointId(3, 2), 0, CheckpointId(2, 8))
    for path in dirs:
        (path / "lock").unlink()
        disk_id = json.loads((path / "disk.id").read_bytes())
        disk_id["members"] = {
            device_id: f"/nvme/{Path(member).name}" for device_id, member in disk_id["members"].items()
        }
        (path / "disk.id").write_text(json.dumps(disk_id) + "\n")
        shutil.copytree(path, TARGET / path.name)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
