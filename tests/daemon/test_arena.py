"""Arenas: admitted, allocated, sealed; refused or cancelled without a trace."""

import asyncio
import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from everstep.core import advice
from everstep.core.errors import MemoryRefusedError
from everstep.core.huge_pages import huge_page_bytes
from everstep.core.ids import CheckpointId
from everstep.daemon.admission_plan import ALLOCATION_STEP_BYTES, Grant
from everstep.daemon.arena import Arena, make_arena

MIB = 1024**2


def made(
    *,
    slot_size_bytes: int = 4 * MIB,
    slot_count: int = 2,
    reserve_bytes: int = 0,
    told: list[int] | None = None,
) -> Arena:
    granted = Grant(slot_size_bytes=slot_size_bytes, slot_count=slot_count, reason="short")
    touched = [] if told is None else told
    return asyncio.run(
        make_arena(7, granted, layout_digest="d", reserve_bytes=reserve_bytes, on_touched=touched.append)
    )


def test_it_is_allocated_whole_and_its_slots_follow_each_other() -> None:
    arena = made()
    try:
        assert arena.size_bytes == 8 * MIB
        assert os.fstat(arena.fd).st_size == 8 * MIB
        assert os.fstat(arena.fd).st_blocks * 512 >= 8 * MIB
        assert [arena.slot_offset_bytes(slot) for slot in (0, 1)] == [0, 4 * MIB]
        assert arena.machine.free_slots == [0, 1]
        assert (arena.number, arena.layout_digest, arena.reason) == (7, "d", "short")
    finally:
        arena.close()


@pytest.mark.parametrize("gives", [True, False])
def test_its_pages_are_huge_where_the_kernel_gives_such_and_all_are_there_in_any_case(
    gives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    def madvise(address: int, size_bytes: int, what: int) -> bool:
        asked.append((address, size_bytes, what))
        return gives and kernels(address, size_bytes, what)

    kernels = advice.madvise
    monkeypatch.setattr(advice, "madvise", madvise)
    arena = made(slot_size_bytes=5 * MIB, slot_count=1)
    try:
        size = huge_page_bytes()
        whole_bytes = 5 * MIB // size * size if size else 0
        found = [each for each in asked if each[2] == advice.COLLAPSE]
        assert found == (
            [(advice.address_of(arena.view), whole_bytes, advice.COLLAPSE)] if whole_bytes else []
        )
        assert os.fstat(arena.fd).st_size == os.fstat(arena.fd).st_blocks * 512 == 5 * MIB
        assert bytes(arena.view) == bytes(5 * MIB)
    finally:
        arena.close()


def test_nobody_can_change_its_size() -> None:
    """A client that could shrink it would end the daemon by SIGBUS."""
    arena = made()
    try:
        for size in (0, 16 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        arena.view[8 * MIB - 1] = 1
    finally:
        arena.close()


def test_its_descriptor_is_not_inherited() -> None:
    arena = made()
    try:
        assert not os.get_inheritable(arena.fd)
    finally:
        arena.close()


def test_closing_gives_the_memory_back() -> None:
    arena = made()
    fd = arena.fd
    arena.machine.begin(0, CheckpointId(1, 1))
    arena.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_it_tells_how_much_is_touched() -> None:
    told: list[int] = []
    made(slot_size_bytes=ALLOCATION_STEP_BYTES // 2, slot_count=3, told=told).close()
    assert told == [ALLOCATION_STEP_BYTES, 3 * ALLOCATION_STEP_BYTES // 2]


def test_above_what_the_node_has_it_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(
        MemoryRefusedError, match=r"2 slots of 4 MiB needs 8 MiB, but .* MiB left of which .* kept free"
    ):
        made(reserve_bytes=1 << 60)


def test_cancelled_it_leaves_nothing() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(
            make_arena(
                1,
                Grant(slot_size_bytes=256 * MIB, slot_count=2),
                layout_digest="d",
                reserve_bytes=0,
                on_touched=lambda _: None,
            )
        )
        while not arena_bytes():  # noqa: ASYNC110 - no event tells that the first pages are being touched
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert arena_bytes() == 0


def arena_bytes() -> int:
    """Return what this process's arenas take, allocated or being so."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "everstep-arena" in str(link.readlink()):
                total += link.stat().st_blocks * 512
    return total
