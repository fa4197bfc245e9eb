"""One run in a process of its own: attaches, seals a checkpoint in every slot, ends when all of them are persisted."""

import argparse
import os
from pathlib import Path

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--size-bytes", type=int, required=True, help="of a checkpoint, whole KiB")
    parser.add_argument(
        "--seeds", type=int, nargs="+", required=True, help="content of the checkpoint in each slot"
    )
    arguments = parser.parse_args()
    with FakeTrainer(Path(os.environ["EVERSTEP_SOCKET"])) as trainer:
        assert isinstance(
            trainer.open_run([Path("nvme0"), Path("nvme1")], name=arguments.run), frames.RunOpened
        )
        trainer.begin_attempt(1)
        leaf = whole_leaf("weight", "uint8", (arguments.size_bytes >> 10, 1 << 10))
        layout = plan_layout([leaf], [], segment_count=2)
        arena = trainer.make_arena(layout, slot_count=len(arguments.seeds))
        for slot, seed in enumerate(arguments.seeds):
            arena.save(CheckpointId(1, slot + 1), seed=seed, slot=slot)
        for _ in arguments.seeds:
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


if __name__ == "__main__":
    main()
