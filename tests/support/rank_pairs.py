"""The ranks of one run, all in this process, over a real Store."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from everstep.checkpoint.frequency_types import Limits
from everstep.core.errors import EverstepError
from everstep.core.ids import CheckpointId
from everstep.hook import ranks as ranks_module
from everstep.hook.pace import Pace
from everstep.hook.ranks import StoreRanks

NEVER = 10**6
"""Steps between two checkpoints of a test that takes none."""


class DeafListener:
    """Has time for a last checkpoint, and fails the test where it hears anything: a test's own hears what it awaits."""

    def saves_last_boundary(self) -> bool:
        return True

    def end_heard(self, left_s: float) -> None:
        raise AssertionError(left_s)

    def end_confirmed(self) -> None:
        raise AssertionError

    def ranks_lost(self, error: EverstepError) -> None:
        raise AssertionError(error)

    def sealed_everywhere(self, checkpoint: CheckpointId) -> None:
        raise AssertionError(checkpoint)

    def complete(self, checkpoint: CheckpointId) -> None:
        raise AssertionError(checkpoint)

    def incomplete(self, checkpoint: CheckpointId, reason: str, *, in_memory: bool) -> None:
        raise AssertionError(checkpoint, reason, in_memory)


def own_server() -> TCPStore:
    """Return the Store that torchrun's agent would serve; it ends with its last reference."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)


@contextmanager
def ranks_of_two(monkeypatch: pytest.MonkeyPatch, port: int) -> Generator[Callable[[int, int], StoreRanks]]:
    """Yield what makes one rank of two, by (number, steps between checkpoints); the last made closes first."""
    made = list[StoreRanks]()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks_module, "default_store", lambda: None)
    monkeypatch.setattr(
        ranks_module, "own_client", lambda: TCPStore("127.0.0.1", port, is_master=False, use_libuv=False)
    )

    def make(number: int, every: int) -> StoreRanks:
        monkeypatch.setattr(dist, "get_rank", lambda: number)
        made.append(StoreRanks("small", Pace(every=every, limits=Limits())))
        return made[-1]

    try:
        yield make
    finally:
        while made:
            made.pop().close()
