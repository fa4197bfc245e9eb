import errno
import mmap
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from cffi import FFI

from everstep.checkpoint import kernel_aio
from everstep.checkpoint.engine import TransferKind
from everstep.checkpoint.kernel_aio import AioContext

_IOCB_OFFSETS = {
    "aio_data": 0,
    "aio_key": 8,
    "aio_rw_flags": 12,
    "aio_lio_opcode": 16,
    "aio_reqprio": 18,
    "aio_fildes": 20,
    "aio_buf": 24,
    "aio_nbytes": 32,
    "aio_offset": 40,
    "aio_reserved2": 48,
    "aio_flags": 56,
    "aio_resfd": 60,
}
_OPCODE_POLL = 5
_NEVER_OPEN_FD = 1_000_000
_NEVER_MAPPED_ADDRESS = 4096


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [
        ("struct iocb", 64, _IOCB_OFFSETS),
        ("struct io_event", 32, {"data": 0, "obj": 8, "res": 16, "res2": 24}),
        ("struct aio_timespec", 16, {"tv_sec": 0, "tv_nsec": 8}),
    ],
)
def test_structs_have_the_kernels_layout(struct: str, size: int, offsets: dict[str, int]) -> None:
    ffi = kernel_aio._ffi  # pyright: ignore[reportPrivateUsage]

    assert ffi.sizeof(struct) == size
    assert {field: ffi.offsetof(struct, field) for field in offsets} == offsets


class Memory:
    """Some anonymous pages with their address."""

    def __init__(self, size_bytes: int) -> None:
        ffi = FFI()
        self.pages = mmap.mmap(-1, size_bytes)
        self._pin = ffi.from_buffer(self.pages)
        self.address = int(ffi.cast("uintptr_t", self._pin))


@pytest.fixture
def context() -> Iterator[AioContext]:
    made = AioContext(4)
    yield made
    made.close()


@pytest.fixture
def file_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield fd
    os.close(fd)


def _prepare_page(context: AioContext, slot: int, kind: TransferKind, file_fd: int, memory: Memory) -> None:
    context.prepare(
        slot,
        kind,
        file_fd=file_fd,
        address=memory.address + 4096 * slot,
        length_bytes=4096,
        offset_bytes=4096 * slot,
    )


def _prepare_poll(context: AioContext, slot: int, poll_fd: int) -> None:
    """Prepare a request that stays in flight until `poll_fd` is readable."""
    context.prepare(
        slot, TransferKind.READ, file_fd=poll_fd, address=select.POLLIN, length_bytes=0, offset_bytes=0
    )
    context._iocbs[slot].aio_lio_opcode = _OPCODE_POLL  # pyright: ignore[reportPrivateUsage]


def test_all_slots_go_to_the_file_and_come_back(context: AioContext, file_fd: int) -> None:
    content = os.urandom(4 * 4096)
    source, target = Memory(4 * 4096), Memory(4 * 4096)
    source.pages[:] = content
    for kind, memory in ((TransferKind.WRITE, source), (TransferKind.READ, target)):
        for slot in range(4):
            _prepare_page(context, slot, kind, file_fd, memory)
        assert context.submit([3, 1, 0, 2]) == 4
        assert context.in_flight == 4
        assert sorted(context.reap(4, timeout_s=10)) == [(slot, 4096) for slot in range(4)]
        assert context.in_flight == 0

    assert os.pread(file_fd, 5 * 4096, 0) == content
    assert target.pages[:] == content


def test_a_refused_request_leaves_those_before_it_in_flight(context: AioContext, file_fd: int) -> None:
    memory = Memory(4 * 4096)
    for slot in range(3):
        _prepare_page(context, slot, TransferKind.WRITE, _NEVER_OPEN_FD if slot == 1 else file_fd, memory)

    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        context.submit([0, 1, 2])

    assert caught.value.errno == errno.EBADF
    assert context.in_flight == 1
    assert context.reap(1, timeout_s=10) == [(0, 4096)]


def test_a_failed_request_reports_its_errno(context: AioContext, file_fd: int) -> None:
    context.prepare(
        2,
        TransferKind.WRITE,
        file_fd=file_fd,
        address=_NEVER_MAPPED_ADDRESS,
        length_bytes=4096,
        offset_bytes=0,
    )

    assert context.submit([2]) == 1
    assert context.reap(1, timeout_s=10) == [(2, -errno.EFAULT)]


def test_reap_returns_what_is_there_when_time_is_over(context: AioContext, file_fd: int) -> None:
    reader, writer = os.pipe()
    memory = Memory(4 * 4096)
    try:
        _prepare_poll(context, 0, reader)
        _prepare_page(context, 1, TransferKind.WRITE, file_fd, memory)
        assert context.submit([0, 1]) == 2

        started_s = time.monotonic()
        assert context.reap(2, timeout_s=0.05) == [(1, 4096)]
        assert time.monotonic() - started_s >= 0.05

        os.write(writer, b"x")
        assert [slot for slot, _ in context.reap(1, timeout_s=10)] == [0]
    finally:
        os.close(reader)
        os.close(writer)


def test_reap_goes_on_after_a_signal(context: AioContext) -> None:
    reader, writer = os.pipe()
    signals: list[int] = []

    def on_alarm(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 3:
            os.write(writer, b"x")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        _prepare_poll(context, 0, reader)
        context.submit([0])
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        assert [slot for slot, _ in context.reap(1, timeout_s=30)] == [0]
        assert len(signals) >= 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        os.close(reader)
        os.close(writer)


def test_reap_with_nothing_in_flight_does_not_wait(context: AioContext) -> None:
    assert context.reap(4, timeout_s=600) == []


def test_a_context_beyond_the_nodes_limit_is_refused() -> None:
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if limit > 1 << 20:
        pytest.skip(f"fs.aio-max-nr is {limit}: exceeding it needs too much memory")

    with pytest.raises(OSError, match=rf"io_setup\({limit + 1}\)") as caught:
        AioContext(limit + 1)
    assert caught.value.errno == errno.EAGAIN


def test_closing_cancels_what_is_in_flight_and_gives_the_events_back() -> None:
    def used() -> int:
        return int(Path("/proc/sys/fs/aio-nr").read_text())

    reader, writer = os.pipe()
    try:
        context = AioContext(3000)
        assert used() >= 3000
        _prepare_poll(context, 0, reader)
        context.submit([0])
        context.close()
        context.close()
        with pytest.raises(ValueError, match="closed"):
            context.submit([1])
        with pytest.raises(ValueError, match="closed"):
            context.reap(1, timeout_s=0)
    finally:
        os.close(reader)
        os.close(writer)
