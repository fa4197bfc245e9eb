"""Streams whose workers die or hang; a module of their own, so that spawned workers find it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from everstep.dataloader import DataLoader


class Silent(IterableDataset[float]):
    """Numbers, shared between workers in turn, with noise; says nothing. Some kill or halt who reads them."""

    def __init__(
        self, folder: Path, *, count: int = 30, deadly: dict[int, int] | None = None, halts_at: int = -1
    ) -> None:
        self.folder, self.count = folder, count
        self.deadly = deadly or {}
        """How often reading each of these kills, counted over all workers."""
        self.halts_at = halts_at
        self.epoch = 0
        self.next: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        assert info is None or info.dataset is self
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.next = first if self.next is None else self.next
        while self.next < self.count:
            self._maybe_die(self.next)
            number, self.next = self.next, self.next + step
            yield 1000 * self.epoch + number + 0.5 * random.random()
        self.next = None

    def _maybe_die(self, number: int) -> None:
        if number == self.halts_at:
            (self.folder / f"halted-{os.getpid()}").touch()
            signal.sigwait({signal.SIGCONT})
        if self.deadly.get(number, 0) > len(list(self.folder.glob(f"died-{number}-*"))):
            (self.folder / f"died-{number}-{time.monotonic_ns()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


class Fragile(Silent):
    """The same, and says where it stands."""

    def state_dict(self) -> dict[str, object]:
        return {"next": self.next, "as": torch.tensor([-1 if self.next is None else self.next])}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.next = cast("int | None", state_dict["next"])
        assert cast(torch.Tensor, state_dict["as"]).tolist() == [-1 if self.next is None else self.next]


def loader_of(dataset: object, **more: object) -> DataLoader[Any]:
    arguments = {"batch_size": 4, "seed": 9, "num_workers": 2, "multiprocessing_context": "fork"}
    arguments |= more
    if not arguments["num_workers"]:
        del arguments["multiprocessing_context"]  # torch's check
    return cast(Callable[..., DataLoader[Any]], DataLoader)(dataset, **arguments)


def numbers(batch: object) -> list[float]:
    return cast(torch.Tensor, batch).tolist()
