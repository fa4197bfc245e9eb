"""How long a store with many checkpoints takes to open, and how many calls on its devices that is.

    python bench/recovery_time.py DIR [--checkpoints 1000] [--devices 4] [--leaves 300] [--rounds 7]

The devices are directories of one file system. Recovery reads metadata only, so that the size of the tensors does not
matter: those here are small. Caches are dropped before each opening, which needs root.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from paired import Row, publish, row

from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import FaultyStorage, each_engine, make_state, memory_arena, opened
from everstep.core.ids import CheckpointId

GOAL_S = 5.0
"""For 1,000 checkpoints."""


def fill(directories: Sequence[Path], steps: Iterable[int], *, leaf_count: int) -> None:
    """Persist a checkpoint at each of these steps of attempt 1, which is begun with the first store."""
    leaves = tuple(whole_leaf(f"layers.{number}.weight", "float32", (4, 4)) for number in range(leaf_count))
    with opened(directories) as (store, _):
        run = store.run(os.geteuid(), "bench", create=True)
        if not run.highest_attempt():
            run.begin_attempt(1, fresh=False)
        state = make_state(store, 1, leaves, segment_count=len(directories))
        with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(store) as engines:
            state.copy_into(arena)
            for step in steps:
                persist_shard(run, state.draft(CheckpointId(1, step)), arena, engines=engines)


def calls_to_open(directories: Sequence[Path]) -> Counter[str]:
    """Return how often each call on a device is made until the store is recovered, locks included."""
    ops = FaultyStorage(RealStorage())
    with opened(directories, ops=ops.as_ops()):
        return Counter(call.name for call in ops.calls)


def drop_caches() -> None:
    """Let nothing of any file be in memory.

    Raises:
        PermissionError: this is not root.
    """
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def seconds_to_open(directories: Sequence[Path]) -> float:
    """Return how long it takes, with caches cold."""
    drop_caches()
    began_s = time.perf_counter()
    with opened(directories) as (_, report):
        took_s = time.perf_counter() - began_s
    assert not report.problems
    return took_s


def rows(directories: Sequence[Path], *, count: int, leaf_count: int, rounds: int) -> list[Row]:
    """Return what opening a store of so many checkpoints takes."""
    fill(directories, range(1, count + 1), leaf_count=leaf_count)
    what = f"{count:,} checkpoints of {leaf_count} leaves on {len(directories)} devices"
    samples_s = [seconds_to_open(directories) for _ in range(rounds)]
    calls = sum(calls_to_open(directories).values())
    return [
        row(f"opening {what}, caches cold", samples_s, goal=GOAL_S, at_most=True, unit="s"),
        row(
            f"calls per checkpoint and device, {what}",
            [calls / count / len(directories)],
            goal=None,
            unit="calls",
        ),
    ]


def main() -> int:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--leaves", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("build/bench/recovery.json"))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="everstep-recovery-", dir=given.folder))
    try:
        directories = [folder / str(number) for number in range(given.devices)]
        for path in directories:
            path.mkdir()
        found = rows(directories, count=given.checkpoints, leaf_count=given.leaves, rounds=given.rounds)
    finally:
        shutil.rmtree(folder)
    return 0 if publish("opening a store", found, given.output) else 1


if __name__ == "__main__":
    raise SystemExit(main())
