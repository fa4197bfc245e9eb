"""Datasets and loaders whose workers die, hang or fail; a module of their own, so that spawned workers find it."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import get_worker_info

from everstep.dataloader import DataLoader


@dataclass
class Fragile:
    """Sample i is the number i. Reading those of `deadly` kills the worker as often as the value says."""

    folder: Path
    """Each death leaves a file here, so that all workers count together."""

    count: int = 24
    deadly: dict[int, int] = field(default_factory=dict[int, int])
    signal: int = signal.SIGKILL

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.maybe_die(index)
        return index

    def maybe_die(self, index: int) -> None:
        assert get_worker_info() is not None
        with (self.folder / f"reads-{index}").open("a") as file:
            file.write("x")
        if self.deadly.get(index, 0) > len(list(self.folder.glob(f"died-{index}-*"))):
            (self.folder / f"died-{index}-{time.monotonic_ns()}").touch()
            os.kill(os.getpid(), self.signal)
            time.sleep(60)

    def reads(self, index: int) -> int:
        path = self.folder / f"reads-{index}"
        return len(path.read_text()) if path.exists() else 0


class FragileInBulk(Fragile):
    """The same, read a whole batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        for index in indices:
            self.maybe_die(index)
        return list(indices)


class ImportFails:
    """Cannot be unpickled in a worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: object) -> None:
        raise ImportError("no module named 'nvidia'")

    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}


class Counted(Fragile):
    """Releases a semaphore of multiprocessing for each read."""

    reads_done: Any = None

    def __getitem__(self, index: int) -> int:
        sample = super().__getitem__(index)
        self.reads_done.release()
        return sample


def loader_of(dataset: object, **more: object) -> DataLoader[Any]:
    arguments = {
        "batch_size": 4,
        "shuffle": True,
        "seed": 9,
        "num_workers": 2,
        "multiprocessing_context": "fork",
    }
    return cast(Callable[..., DataLoader[Any]], DataLoader)(dataset, **(arguments | more))


def ids(batch: object) -> list[int]:
    return cast(torch.Tensor, batch).tolist()
