"""One device, several ranks: each in its turn, by bytes, whatever the others have to write or to read."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

import pytest

from everstep.checkpoint.engine import Engine, EngineKind, Transfer, TransferDone, TransferKind
from everstep.checkpoint.engine_choice import EngineChoice
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.core.errors import DeadlineError
from everstep.daemon.devices import turns_machine
from everstep.daemon.devices.device_queue import QUEUE_LANES, DeviceQueue
from everstep.daemon.devices.turns_machine import RESTORE_WEIGHT

PIECE = 4096
LARGE = 24
"""Pieces of a large segment: 3 GiB in pieces of 128 MiB."""

Places = list[tuple[int, TransferKind]]
"""Arena and direction of each piece, in the order in which they began."""


class Gate:
    """Lets one piece after the other go, when the test says so; records who began, in that order."""

    def __init__(self) -> None:
        self.begun: Places = []
        self.waiting = 0
        self.passed = 0
        self.failing: dict[int, BaseException] = {}
        """What a piece at this offset of its file ends with."""
        self._go = threading.Semaphore(0)
        self._lock = threading.Lock()

    def open(self, count: int = 1) -> None:
        self._go.release(count)

    def pass_through(self, transfer: Transfer) -> None:
        with self._lock:
            self.begun.append((transfer.arena_fd, transfer.kind))
            self.waiting += 1
        assert self._go.acquire(timeout=20)
        with self._lock:
            self.waiting -= 1
            self.passed += 1
        if transfer.file_offset_bytes in self.failing:
            raise self.failing[transfer.file_offset_bytes]


class GatedEngine:
    """A real engine behind a gate."""

    def __init__(self, gate: Gate) -> None:
        self.name = "gated"
        self._gate = gate
        self._engine = PlainEngine()

    def run(self, transfer: Transfer) -> TransferDone:
        self._gate.pass_through(transfer)
        return self._engine.run(transfer)

    def forget(self, arena_fd: int) -> None:
        self._engine.forget(arena_fd)

    def close(self) -> None:
        self._engine.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_machine, "PIECE_BYTES", PIECE)


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
    """Makes files in memory with random content, which stand for arenas and for segments."""
    made: list[int] = []

    def make() -> int:
        made.append(os.memfd_create("queue", os.MFD_CLOEXEC))
        os.pwrite(made[-1], Random(len(made)).randbytes(LARGE * PIECE), 0)
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


@pytest.fixture
def ranks() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def transfer(kind: TransferKind, arena: int, file: int, length_bytes: int) -> Transfer:
    return Transfer(
        kind=kind,
        arena_fd=arena,
        arena_offset_bytes=0,
        file_fd=file,
        file_offset_bytes=0,
        length_bytes=length_bytes,
    )


def waiting(queue: DeviceQueue) -> int:
    """Return how many transfers have not ended."""
    return len(queue._jobs)


def let_go(gate: Gate, *done: "Future[TransferDone]") -> None:
    """Let one piece after the other go until these transfers have ended."""
    while not all(each.done() for each in done):
        wait_until(lambda: gate.waiting > 0 or all(each.done() for each in done))
        if gate.waiting:
            passed = gate.passed
            gate.open()
            wait_until(lambda passed=passed: gate.passed > passed)


def test_a_small_transfer_does_not_wait_for_a_large_one(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int], ranks: ThreadPoolExecutor
) -> None:
    large, small, first, second = files(), files(), files(), files()
    much = ranks.submit(queue.run, transfer(TransferKind.WRITE, large, first, LARGE * PIECE - 5))
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    little = ranks.submit(queue.run, transfer(TransferKind.WRITE, small, second, PIECE))
    wait_until(lambda: waiting(queue) == 2)
    let_go(gate, little)
    began = [arena for arena, _ in gate.begun]
    assert began[: began.index(small)].count(large) <= 2 * QUEUE_LANES + 1
    let_go(gate, much)
    assert (much.result().bytes_moved, little.result().bytes_moved) == (LARGE * PIECE - 5, PIECE)
    assert os.pread(first, LARGE * PIECE, 0)[:-5] == os.pread(large, LARGE * PIECE, 0)[:-5]
    assert os.pread(second, PIECE, 0) == os.pread(small, PIECE, 0)


def test_ranks_get_the_same_bytes_whatever_the_number_of_their_transfers(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int], ranks: ThreadPoolExecutor
) -> None:
    one, many, file = files(), files(), files()
    done = [ranks.submit(queue.run, transfer(TransferKind.WRITE, one, file, LARGE * PIECE))]
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    done += [
        ranks.submit(queue.run, transfer(TransferKind.WRITE, many, file, LARGE * PIECE)) for _ in range(5)
    ]
    wait_until(lambda: waiting(queue) == 6)
    let_go(gate, *done)
    began = [arena for arena, _ in gate.begun]
    both = began[QUEUE_LANES : QUEUE_LANES + 2 * (LARGE - QUEUE_LANES)]
    assert abs(both.count(one) - both.count(many)) <= 1


def test_a_restore_goes_ahead_and_leaves_the_others_their_share(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int], ranks: ThreadPoolExecutor
) -> None:
    arena, ring, written, read = files(), files(), files(), files()
    writing = ranks.submit(queue.run, transfer(TransferKind.WRITE, arena, written, LARGE * PIECE))
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    expected = os.pread(read, LARGE * PIECE, 0)
    restoring = ranks.submit(queue.run, transfer(TransferKind.READ, ring, read, LARGE * PIECE))
    wait_until(lambda: waiting(queue) == 2)
    let_go(gate, writing, restoring)
    after = [kind for _, kind in gate.begun[QUEUE_LANES:]]
    beside = after[: len(after) - after[::-1].index(TransferKind.READ)]
    assert beside[:RESTORE_WEIGHT] == [TransferKind.READ] * RESTORE_WEIGHT
    assert abs(beside.count(TransferKind.READ) - RESTORE_WEIGHT * beside.count(TransferKind.WRITE)) <= 4
    assert os.pread(ring, LARGE * PIECE, 0) == expected


def test_who_reads_beside_takes_turns_with_who_writes(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int], ranks: ThreadPoolExecutor
) -> None:
    arena, scratch, file = files(), files(), files()
    writing = ranks.submit(queue.run, transfer(TransferKind.WRITE, arena, file, LARGE * PIECE))
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    reading = ranks.submit(queue.beside.run, transfer(TransferKind.READ, scratch, file, LARGE * PIECE))
    wait_until(lambda: waiting(queue) == 2)
    let_go(gate, writing, reading)
    both = Counter(kind for _, kind in gate.begun[QUEUE_LANES : QUEUE_LANES + 20])
    assert abs(both[TransferKind.READ] - both[TransferKind.WRITE]) <= 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_piece_that_fails_fails_its_transfer_alone(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int], ranks: ThreadPoolExecutor, *, is_lost: bool
) -> None:
    """Nothing touches the memory any more when the caller hears of it; what hangs goes before what failed."""
    arena, other, file = files(), files(), files()
    gate.failing = {index * PIECE: OSError(5, "it fails") for index in range(QUEUE_LANES)}
    if is_lost:
        gate.failing[2 * PIECE] = DeadlineError("it hangs")
    failing = ranks.submit(queue.run, transfer(TransferKind.WRITE, arena, file, LARGE * PIECE))
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    well = ranks.submit(
        queue.run,
        Transfer(
            kind=TransferKind.WRITE,
            arena_fd=other,
            arena_offset_bytes=0,
            file_fd=file,
            file_offset_bytes=5 * PIECE,
            length_bytes=PIECE,
        ),
    )
    wait_until(lambda: waiting(queue) == 2)
    gate.open(QUEUE_LANES - 1)
    wait_until(lambda: len(gate.begun) >= QUEUE_LANES + 1)
    assert not failing.done()  # one of its pieces is under way
    let_go(gate, failing, well)
    with pytest.raises(DeadlineError if is_lost else OSError, match="it hangs" if is_lost else "it fails"):
        failing.result()
    assert well.result().bytes_moved == PIECE
    assert [arena for arena, _ in gate.begun].count(arena) == QUEUE_LANES


def test_an_arena_is_forgotten_after_its_transfers(
    gate: Gate, queue: DeviceQueue, files: Callable[[], int], ranks: ThreadPoolExecutor
) -> None:
    arena, file = files(), files()
    writing = ranks.submit(queue.run, transfer(TransferKind.WRITE, arena, file, LARGE * PIECE))
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    forgotten = queue.forgetting(arena)
    wait_until(lambda: gate.waiting == QUEUE_LANES)
    assert not forgotten.done()
    let_go(gate, writing)
    forgotten.result(20)
    assert writing.done()


def test_it_is_an_engine(queue: DeviceQueue) -> None:
    def name_of(engine: Engine) -> str:
        return engine.name

    assert (name_of(queue), name_of(queue.beside)) == ("gated", "gated")
