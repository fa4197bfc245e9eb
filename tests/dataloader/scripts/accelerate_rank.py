"""One rank of a job with Accelerate, under torchrun on gloo: one JSON line on stdout per way to gather an epoch.

Each line has the rank, the way, and what the gathered steps hold, which is the same on all ranks.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator

from everstep.dataloader.adapters.for_accelerate import DataLoader

BATCH_SIZE = 4
NOTHING = -1
Gather = Callable[[torch.Tensor], Any]


def say(rank: int, way: str, steps: Iterable[object]) -> None:
    os.write(1, (json.dumps({"rank": rank, "way": way, "steps": list(steps)}) + "\n").encode())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    metrics = cast(Callable[..., Any], accelerator.gather_for_metrics)
    rank = accelerator.process_index

    def epoch(n: int, **more: Any) -> DataLoader[torch.Tensor]:
        arguments = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3, "accelerator": accelerator} | more
        return cast(DataLoader[torch.Tensor], accelerator.prepare(DataLoader(range(n), **arguments)))

    def plainly(batch: torch.Tensor) -> list[int]:
        return metrics(batch).tolist()

    def as_objects(batch: torch.Tensor) -> list[int]:
        return [int(each) for each in metrics(batch, use_gather_object=True)]

    def padded(batch: torch.Tensor) -> list[int]:
        even = cast(torch.Tensor, accelerator.pad_across_processes(batch, pad_index=NOTHING))
        return [each for each in metrics(even).tolist() if each != NOTHING]

    say(rank, "even", map(plainly, epoch(22)))
    say(rank, "fewer than ranks", map(plainly, epoch(17)))
    say(rank, "a step more", map(plainly, epoch(23)))
    say(rank, "drop", map(plainly, epoch(23, uneven="drop")))
    say(rank, "objects", map(as_objects, epoch(23, uneven="weight")))
    say(rank, "padded", map(padded, epoch(23, uneven="weight")))

    accelerator.free_memory()  # its states are numbered in the order of prepare
    begun = epoch(22)
    before = plainly(next(iter(begun)))
    accelerator.save_state(str(folder / "state"))
    accelerator.free_memory()
    rest = epoch(22)
    accelerator.load_state(str(folder / "state"))
    say(rank, "resumed", [before, *map(plainly, rest)])
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # gloo may drop its last work while the interpreter ends, and abort (pytorch#179291)
