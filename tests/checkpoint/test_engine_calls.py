"""How often an engine enters the kernel: all free requests in one call, completions several at a time."""

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import kernel_aio, uring
from everstep.checkpoint.block_flight import FIRST_BLOCKS
from everstep.checkpoint.engine import Engine, EngineConfig, EngineKind, Transfer, TransferKind
from everstep.checkpoint.engine_kinds import make_engine
from everstep.checkpoint.kernel_aio import AioContext
from everstep.checkpoint.linux import SYSCALL, dio_alignment, raw_syscall, seal_size
from everstep.checkpoint.uring import Ring
from everstep.checkpoint.uring_memory import RingMemory

BLOCK = 4096
BLOCKS = 2048
DEPTH = 64
QUARTER = DEPTH // 4
SIZE = BLOCKS * BLOCK


@dataclass
class Calls:
    """What passed between an engine and the kernel, in order."""

    full: list[int] = field(default_factory=list[int])
    """Requests in flight after the engine gave some to its queue."""
    handed: list[int] = field(default_factory=list[int])
    """Requests that one system call took."""
    reaped: list[int] = field(default_factory=list[int])
    """Completions that were taken at once."""
    waits: int = 0
    """System calls in which the engine waited."""


def watch_submits(queue: type[AioContext] | type[Ring], calls: Calls, patch: pytest.MonkeyPatch) -> None:
    real: Any = queue.submit

    def submit(self: AioContext | Ring, slots: Sequence[int]) -> int:
        taken = real(self, slots)
        if slots:
            calls.full.append(self.in_flight)
        return taken

    patch.setattr(queue, "submit", submit)


def watch_aio(calls: Calls, patch: pytest.MonkeyPatch) -> None:
    def call(number: int, *arguments: int) -> int:
        result = raw_syscall(number, *arguments)
        if number == SYSCALL.io_submit:
            calls.handed.append(result)
        elif number == SYSCALL.io_getevents:
            calls.waits += 1
            calls.reaped.append(result)
        return result

    watch_submits(AioContext, calls, patch)
    patch.setattr(kernel_aio, "raw_syscall", call)


def watch_uring(calls: Calls, patch: pytest.MonkeyPatch) -> None:
    """One call hands over and waits; completions are read from shared memory, before it and after."""
    take = RingMemory.completions

    def call(number: int, *arguments: int) -> int:
        result = raw_syscall(number, *arguments)
        if number == SYSCALL.io_uring_enter:
            calls.waits += 1
            if arguments[1]:
                calls.handed.append(result)
        return result

    def completions(memory: RingMemory) -> list[tuple[int, int]]:
        done = take(memory)
        calls.reaped += [len(done)] if done else []
        return done

    watch_submits(Ring, calls, patch)
    patch.setattr(uring, "raw_syscall", call)
    patch.setattr(RingMemory, "completions", completions)


WATCHERS = {EngineKind.AIO: watch_aio, EngineKind.URING: watch_uring}


@pytest.fixture(params=WATCHERS, ids=lambda kind: kind.value)
def watched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[Engine, Calls]]:
    calls = Calls()
    WATCHERS[request.param](calls, monkeypatch)
    engine = make_engine(request.param, EngineConfig(block_size_bytes=BLOCK, queue_depth=DEPTH))
    yield engine, calls
    engine.close()


@pytest.fixture
def transfer(tmp_path: Path) -> Generator[Callable[[TransferKind], Transfer]]:
    """Between an arena and a direct file of BLOCKS blocks, which has its bytes already."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    file_fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    told = dio_alignment(file_fd)
    if told is None or not told.is_possible:
        os.close(file_fd)
        pytest.skip(f"files in {tmp_path} cannot do direct I/O")
    arena_fd = os.memfd_create("everstep-test-arena", os.MFD_ALLOW_SEALING)
    os.write(arena_fd, os.urandom(SIZE))
    seal_size(arena_fd)
    yield lambda kind: Transfer(
        kind=kind,
        arena_fd=arena_fd,
        arena_offset_bytes=0,
        file_fd=file_fd,
        file_offset_bytes=0,
        length_bytes=SIZE,
    )
    os.close(arena_fd)
    os.close(file_fd)


@pytest.mark.parametrize("kind", TransferKind, ids=lambda kind: kind.value)
def test_all_free_requests_go_in_one_call_and_completions_come_several_at_a_time(
    watched: tuple[Engine, Calls], transfer: Callable[[TransferKind], Transfer], kind: TransferKind
) -> None:
    engine, calls = watched
    assert engine.run(transfer(kind)).bytes_moved == SIZE
    assert sum(calls.handed) == sum(calls.reaped) == BLOCKS
    assert len(calls.handed) == len(calls.full), "what the engine gave in one piece took several calls"
    assert (
        calls.handed[0] == FIRST_BLOCKS
    )  # so that the device begins at once; from then on the queue is full
    assert set(calls.full[1:-1]) == {DEPTH}
    assert min(calls.handed[1:-1]) >= QUARTER
    assert calls.waits <= len(calls.handed) + 1
    assert len(calls.reaped) <= 2 * len(calls.handed)
    assert len(calls.handed) <= 3 + (BLOCKS - DEPTH) // QUARTER
