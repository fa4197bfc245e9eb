"""The memory of a run's snapshots, seen from the trainer."""

import os
from typing import Any

from everstep.hook.arena_keeper import ArenaKeeper
from everstep.hook.cuda_copy import CudaCopies
from everstep.hook.mapped_arena import MappedArena
from everstep.hook.report import CostBook

PAGE_BYTES = 4096


def arena(number: int, free: set[int]) -> MappedArena:
    fd = os.memfd_create("everstep-test-arena")
    os.ftruncate(fd, 2 * PAGE_BYTES)
    made = MappedArena(number, fd, PAGE_BYTES, 2)
    made.free = free
    return made


def test_a_slot_that_is_freed_while_its_arena_is_restored_from_is_free_when_it_stays() -> None:
    """The daemon says so once; with one slot of two no checkpoint is taken beside one that is kept."""
    nobody: Any = None
    costs = CostBook()
    keeper = ArenaKeeper(
        nobody,
        CudaCopies(costs),
        costs,
        slot_count=2,
        is_copying=lambda: False,
        on_slots=lambda _: None,
    )
    keeper.slot_free(6, 0)
    keeper.slot_free(7, 1)
    adopted = arena(7, free={0})
    keeper.adopt(adopted)
    assert adopted.free == {0, 1}
    keeper.lost()
    keeper.slot_free(8, 1)
    keeper.lost()  # the next daemon counts anew
    other = arena(8, free={0})
    keeper.adopt(other)
    assert other.free == {0}
    keeper.lost()
