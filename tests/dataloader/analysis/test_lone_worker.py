"""What one worker alone takes: with real workers of torch's loader and of ours."""

import os
import time

import pytest
import torch
import torch.utils.data

from everstep.dataloader import DataLoader
from everstep.dataloader.analysis.instrument import Instrument
from everstep.dataloader.analysis.lone_worker import BATCHES, lone_cpu_s

BATCH = 4
BUSY_S = 0.002


class Slow(torch.utils.data.Dataset[int]):
    """Each sample takes its time of the processor, and is the pid of who prepared it."""

    def __len__(self) -> int:
        return 4 * BATCHES * BATCH

    def __getitem__(self, index: int) -> int:
        until_s = time.thread_time() + BUSY_S
        while time.thread_time() < until_s:
            pass
        return os.getpid()


def workers_of(loader: "torch.utils.data.DataLoader[int]") -> set[int]:
    """Return the pids of those that prepared a whole epoch."""
    if isinstance(loader, DataLoader):
        loader.reset()
    return {pid for batch in loader for pid in batch.tolist()}


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, DataLoader])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_one_worker_prepares_and_the_loader_stays_as_it_was(kind: type, *, is_persistent: bool) -> None:
    loader = kind(Slow(), batch_size=BATCH, num_workers=2, persistent_workers=is_persistent)
    workers = workers_of(loader)
    assert len(workers) == 2
    taken_s = lone_cpu_s(loader, Instrument(loader), iter)
    assert taken_s is not None
    assert BUSY_S <= taken_s < 2 * BUSY_S
    assert (loader.num_workers, loader.persistent_workers) == (2, is_persistent)
    again = workers_of(loader)
    assert len(again) == 2
    assert (again == workers) is is_persistent, "those that are kept go on"


def test_a_loader_with_one_worker_or_none_is_not_iterated() -> None:
    class Refusing(Slow):
        def __getitem__(self, index: int) -> int:
            raise AssertionError(index)

    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(Refusing(), num_workers=workers)
        assert lone_cpu_s(loader, Instrument(loader), iter) is None
