"""One device, several ranks: each in its turn, whatever the others have to write."""

import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.checkpoint.engine import EngineKind, Transfer, TransferDone, TransferKind
from everstep.checkpoint.engine_choice import EngineChoice
from everstep.checkpoint.engine_lanes import LANE_COUNT
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.daemon.device_queue import DeviceQueue

PAGE = 4096


class Gate:
    """Lets one transfer after the other begin, when the test says so; records their arenas in that order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.waiting = 0
        self._go = threading.Semaphore(0)
        self._lock = threading.Lock()

    def open(self, count: int = 1) -> None:
        self._go.release(count)

    def pass_through(self, arena_fd: int) -> None:
        with self._lock:
            self.waiting += 1
        assert self._go.acquire(timeout=20)
        with self._lock:
            self.waiting -= 1
            self.begun.append(arena_fd)


class GatedEngine:
    """A real engine behind a gate."""

    def __init__(self, gate: Gate) -> None:
        self.name = "gated"
        self._gate = gate
        self._engine = PlainEngine()

    def run(self, transfer: Transfer) -> TransferDone:
        self._gate.pass_through(transfer.arena_fd)
        return self._engine.run(transfer)

    def forget(self, arena_fd: int) -> None:
        self._engine.forget(arena_fd)

    def close(self) -> None:
        self._engine.close()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def queue(gate: Gate) -> Generator[DeviceQueue]:
    choice = EngineChoice(
        kind=EngineKind.PLAIN, alignment=None, reason="a test", factory=lambda: GatedEngine(gate)
    )
    made = DeviceQueue(choice)
    yield made
    made.close()


@pytest.fixture
def files() -> Generator[Callable[[], int]]:
    """Makes files in memory, which stand for arenas and for segments."""
    made: list[int] = []

    def make() -> int:
        made.append(os.memfd_create("queue", os.MFD_CLOEXEC))
        os.ftruncate(made[-1], PAGE)
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_ranks_with_much_to_write_let_one_with_little_through(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int]
) -> None:
    """A rank hands over a segment only when one of its own has ended, so ranks take turns."""
    target, small = files(), files()
    large = [files() for _ in range(LANE_COUNT)]

    def write_all(arena: int, count: int) -> None:
        for _ in range(count):
            queue.run(
                Transfer(
                    kind=TransferKind.WRITE,
                    arena_fd=arena,
                    arena_offset_bytes=0,
                    file_fd=target,
                    file_offset_bytes=0,
                    length_bytes=PAGE,
                )
            )

    def all_wait(turn: int) -> bool:
        """Every lane is at the gate, and the one rank that has none waits behind."""
        behind = queue._threads._work_queue.qsize()
        return (len(gate.begun), gate.waiting, behind) == (turn, LANE_COUNT, 1)

    with ThreadPoolExecutor(LANE_COUNT + 1) as ranks:
        much = [ranks.submit(write_all, arena, 40) for arena in large]
        little = ranks.submit(write_all, small, 2)
        for turn in range(2 * (LANE_COUNT + 1)):
            wait_until(lambda turn=turn: gate.begun.count(small) == 2 or all_wait(turn))
            gate.open()
        little.result(20)
        gate.open(80)
        for each in much:
            each.result(20)
    assert gate.begun[: 2 * (LANE_COUNT + 1)].count(small) == 2
    assert [gate.begun.count(arena) for arena in large] == [40] * LANE_COUNT
