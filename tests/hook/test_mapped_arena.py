"""The trainer's mapping: shared with the daemon, without a descriptor, absent in forked children."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.checkpoint.layout_plan import Layout, plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.core.errors import NodeError
from everstep.hook.mapped_arena import MappedArena

SIZE_BYTES = 1 << 20
NAME = "everstep-mapped-test"


def memfd(size_bytes: int = 2 * SIZE_BYTES) -> int:
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, size_bytes)
    return fd


def mapped(fd: int | None = None) -> MappedArena:
    return MappedArena(3, memfd() if fd is None else fd, SIZE_BYTES, 2)


def in_child(check: Callable[[], bool]) -> bool:
    """Return what `check` says in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    return os.waitstatus_to_exitcode(status) == 0


def is_mapped() -> bool:
    return NAME in Path("/proc/self/maps").read_text()


def is_open() -> bool:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()]
    return any(NAME in str(link.readlink()) for link in links)


def test_it_is_shared_memory_and_the_descriptor_is_closed() -> None:
    fd = memfd()
    other = os.dup(fd)
    try:
        arena = mapped(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        view = arena.view(SIZE_BYTES + 5, 3)
        view[:] = b"abc"
        assert os.pread(other, 3, SIZE_BYTES + 5) == b"abc"
        os.pwrite(other, b"x", SIZE_BYTES + 5)
        assert bytes(view) == b"xbc"
        view.release()
        arena.close()
    finally:
        os.close(other)


def test_a_forked_child_has_neither_mapping_nor_descriptor() -> None:
    arena = mapped()
    try:
        assert is_mapped()
        assert not in_child(is_mapped)
        assert not in_child(is_open)
        assert is_mapped()
    finally:
        arena.close()


def test_closing_unmaps_and_again_is_nothing() -> None:
    arena = mapped()
    arena.close()
    assert not is_mapped()
    arena.close()


def test_what_cannot_be_mapped_is_said_and_the_descriptor_is_closed() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(NodeError, match=r"mapping an arena of 2097152 bytes failed: "):
        mapped(reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_slots_follow_each_other_and_are_taken_once() -> None:
    arena = mapped()
    try:
        assert arena.slot_address(1) - arena.slot_address(0) == SIZE_BYTES
        for slot in (0, 1):
            assert arena.next_free() == arena.next_free() == slot
            arena.take(slot)
        assert arena.next_free() is None
        arena.give(1)
        assert arena.next_free() == 1
    finally:
        arena.close()


def layout(columns: int) -> Layout:
    leaf = whole_leaf("w", "float32", (4, columns))
    return plan_layout([leaf], [], segment_count=1)


def test_any_layout_fits_that_it_has_room_for() -> None:
    small, alike, large = layout(4), layout(8), layout(8192)
    assert small.digest != alike.digest
    arena = MappedArena(1, memfd(small.slot_size_bytes), small.slot_size_bytes, 1)
    tight = MappedArena(1, memfd(4096), 4096, 1)
    try:
        assert arena.fits(small)
        assert arena.fits(alike)
        assert not arena.fits(large)
        assert not tight.fits(small)
    finally:
        arena.close()
        tight.close()
