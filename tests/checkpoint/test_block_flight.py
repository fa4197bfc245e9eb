"""Blocks that the kernel puts off, on its real queues and files: asked for again, and not for ever."""

import errno
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from everstep.checkpoint import block_flight, block_io, plain_engine
from everstep.checkpoint.arena_map import ArenaMaps
from everstep.checkpoint.block_flight import BlockQueue, Flight
from everstep.checkpoint.block_io import open_span
from everstep.checkpoint.engine import EngineConfig, Transfer, TransferKind
from everstep.checkpoint.kernel_aio import AioContext
from everstep.checkpoint.plain_engine import THREADS_MAX, PlainEngine
from everstep.checkpoint.uring import Ring

PAGE = 4096
SIZE = 16 * PAGE
DEPTH = 4
NUMBERS = pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN], ids=["EINTR", "EAGAIN"])
KINDS = pytest.mark.parametrize("kind", TransferKind)


class ReluctantQueue:
    """A queue of the kernel that does not get some of the blocks: they end at once with an error of ours."""

    def __init__(self, queue: BlockQueue, number: int, is_put_off: Callable[[int], bool]) -> None:
        self._queue, self._number, self._is_put_off = queue, number, is_put_off
        self._offsets = [0] * queue.depth
        self._put_off: list[int] = []
        self.name, self.depth = queue.name, queue.depth

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight + len(self._put_off)

    def prepare(
        self,
        slot: int,
        kind: TransferKind,
        *,
        file_fd: int,
        address: int,
        length_bytes: int,
        offset_bytes: int,
    ) -> None:
        self._offsets[slot] = offset_bytes
        self._queue.prepare(
            slot,
            kind,
            file_fd=file_fd,
            address=address,
            length_bytes=length_bytes,
            offset_bytes=offset_bytes,
        )

    def submit(self, slots: Sequence[int]) -> int:
        put_off = [slot for slot in slots if self._is_put_off(self._offsets[slot])]
        well = [slot for slot in slots if slot not in put_off]
        assert self._queue.submit(well) == len(well)
        self._put_off += put_off
        return len(slots)

    def reap(self, min_count: int, *, timeout_s: float) -> list[tuple[int, int]]:
        ended = [(slot, -self._number) for slot in self._put_off]
        self._put_off.clear()
        return ended + self._queue.reap(max(min_count - len(ended), 0), timeout_s=timeout_s)


@pytest.fixture(params=[AioContext, Ring], ids=["aio", "uring"])
def queue(request: pytest.FixtureRequest) -> Generator[BlockQueue]:
    made: AioContext | Ring = request.param(DEPTH)
    yield made
    made.close()


@pytest.fixture
def transfer(tmp_path: Path) -> Generator[Callable[[TransferKind], Transfer]]:
    """Random bytes in a file, other ones in an arena."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    file_fd = os.open(path, os.O_RDWR)
    arena_fd = os.memfd_create("everstep-test-arena")
    os.write(arena_fd, os.urandom(SIZE))
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


@pytest.fixture
def maps() -> Generator[ArenaMaps]:
    made = ArenaMaps()
    yield made
    made.close()


@pytest.fixture
def asked_again_max(monkeypatch: pytest.MonkeyPatch) -> int:
    """Fewer times than the product's, so that the end is near."""
    for module in (block_flight, plain_engine):
        monkeypatch.setattr(module, "ASKED_AGAIN_MAX", 5)
    return 5


def put_off(times: dict[int, int]) -> Callable[[int], bool]:
    """Return what says of the block at an offset whether it is put off, so many times."""

    def is_put_off(offset: int) -> bool:
        times[offset] = times.get(offset, 0) - 1
        return times[offset] >= 0

    return is_put_off


def both(transfer: Transfer) -> list[bytes]:
    return [os.pread(fd, SIZE, 0) for fd in (transfer.arena_fd, transfer.file_fd)]


@NUMBERS
@KINDS
def test_a_block_that_was_put_off_is_asked_for_again(
    queue: BlockQueue,
    transfer: Callable[[TransferKind], Transfer],
    maps: ArenaMaps,
    number: int,
    kind: TransferKind,
) -> None:
    made = transfer(kind)
    wanted = both(made)[0 if kind is TransferKind.WRITE else 1]
    times = {0: 1, 3 * PAGE: 7, SIZE - PAGE: 2}
    reluctant = ReluctantQueue(queue, number, put_off(times))
    Flight(reluctant, open_span(made, maps), PAGE).run(lambda _: None)
    assert both(made) == [wanted, wanted]
    assert set(times.values()) == {-1}, "each went through once"


@NUMBERS
def test_one_that_is_put_off_for_ever_is_an_error_in_the_end(
    queue: BlockQueue,
    transfer: Callable[[TransferKind], Transfer],
    maps: ArenaMaps,
    number: int,
    asked_again_max: int,
) -> None:
    asked: list[int] = []

    def always_the_third(offset: int) -> bool:
        asked.append(offset)
        return offset == 2 * PAGE

    reluctant = ReluctantQueue(queue, number, always_the_third)
    flight = Flight(reluctant, open_span(transfer(TransferKind.WRITE), maps), PAGE)
    with pytest.raises(OSError, match=f"write of {PAGE} bytes at byte {2 * PAGE}:") as caught:
        flight.run(lambda _: None)
    assert caught.value.errno == number
    assert asked.count(2 * PAGE) == 1 + asked_again_max
    assert reluctant.in_flight == 0


@NUMBERS
def test_every_block_has_as_many_tries(
    queue: BlockQueue,
    transfer: Callable[[TransferKind], Transfer],
    maps: ArenaMaps,
    number: int,
    asked_again_max: int,
) -> None:
    """A slot carries block after block: what one was refused does not count for the next."""
    made = transfer(TransferKind.WRITE)
    times = dict.fromkeys(range(0, SIZE, PAGE), asked_again_max)
    Flight(ReluctantQueue(queue, number, put_off(times)), open_span(made, maps), PAGE).run(lambda _: None)
    assert len(set(both(made))) == 1


def test_a_block_that_the_kernel_refuses_is_named_though_others_before_it_were_taken(
    transfer: Callable[[TransferKind], Transfer], maps: ArenaMaps
) -> None:
    class WrongFile(ReluctantQueue):
        """Asks for one block of a file that is not open."""

        def prepare(self, slot: int, kind: TransferKind, **more: int) -> None:
            wrong = more | {"file_fd": 1_000_000} if more["offset_bytes"] == 2 * PAGE else more
            context.prepare(slot, kind, **wrong)

        def submit(self, slots: Sequence[int]) -> int:
            return context.submit(slots)

    context = AioContext(DEPTH)
    flight = Flight(
        WrongFile(context, 0, lambda _: False), open_span(transfer(TransferKind.WRITE), maps), PAGE
    )
    with pytest.raises(OSError, match=f"write of {PAGE} bytes at byte {2 * PAGE}: Bad file") as caught:
        flight.run(lambda _: None)
    assert caught.value.errno == errno.EBADF
    assert context.in_flight == 0
    context.close()


@KINDS
def test_the_plain_engine_asks_again_too(
    transfer: Callable[[TransferKind], Transfer], monkeypatch: pytest.MonkeyPatch, kind: TransferKind
) -> None:
    """Python repeats what was interrupted by itself; EAGAIN it raises."""
    made = transfer(kind)
    wanted = both(made)[0 if kind is TransferKind.WRITE else 1]
    name = "pwrite" if kind is TransferKind.WRITE else "preadv"
    real, is_put_off = getattr(os, name), put_off({0: 2, 5 * PAGE: 1})

    def reluctant(fd: int, block: object, offset: int) -> int:
        if is_put_off(offset):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(fd, block, offset)

    monkeypatch.setattr(plain_engine.os, name, reluctant)
    engine = PlainEngine(EngineConfig(block_size_bytes=PAGE))
    assert engine.run(made).bytes_moved == SIZE
    engine.close()
    assert both(made) == [wanted, wanted]


def test_the_plain_engine_does_not_ask_for_ever(
    transfer: Callable[[TransferKind], Transfer], monkeypatch: pytest.MonkeyPatch, asked_again_max: int
) -> None:
    asked: list[int] = []

    def busy(_fd: int, _block: object, offset: int) -> int:
        asked.append(offset)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(plain_engine.os, "pwrite", busy)
    engine = PlainEngine(EngineConfig(block_size_bytes=PAGE))
    with pytest.raises(BlockingIOError, match=f"write of {PAGE} bytes at byte 0:"):
        engine.run(transfer(TransferKind.WRITE))
    engine.close()
    assert asked.count(0) == 1 + asked_again_max
    assert max(asked) < THREADS_MAX * PAGE  # no block was begun after the first had failed


def test_the_wait_is_long_enough_for_a_kernel_out_of_memory_and_not_for_ever() -> None:
    assert 1 <= block_io.ASKED_AGAIN_MAX * block_io.ASK_AGAIN_PAUSE_S <= 10
