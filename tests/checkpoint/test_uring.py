"""The ring itself: layout, hand-over, completions, refusals of the kernel, registered memory."""

import errno
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from cffi import FFI
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint import uring, uring_abi, uring_buffers
from everstep.checkpoint.arena_map import ArenaMap
from everstep.checkpoint.engine import EngineConfig, Transfer, TransferKind
from everstep.checkpoint.linux import SYSCALL, raw_syscall, seal_size
from everstep.checkpoint.uring import Ring
from everstep.checkpoint.uring_engine import UringEngine
from everstep.checkpoint.uring_memory import UINT32_MAX, ring_indices

PAGE = 4096
NEVER_OPEN_FD = 1_000_000
NEVER_MAPPED_ADDRESS = 4096

SQ_OFFSETS = ("head", "tail", "ring_mask", "ring_entries", "flags", "dropped", "array")
CQ_OFFSETS = ("head", "tail", "ring_mask", "ring_entries", "overflow", "cqes", "flags")
SQE_OFFSETS = {
    "opcode": 0,
    "flags": 1,
    "fd": 4,
    "off": 8,
    "addr": 16,
    "len": 24,
    "rw_flags": 28,
    "user_data": 32,
    "buf_index": 40,
}


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [
        ("struct io_uring_params", 120, {"flags": 8, "features": 20, "sq_off": 40, "cq_off": 80}),
        ("struct io_sqring_offsets", 40, {name: 4 * index for index, name in enumerate(SQ_OFFSETS)}),
        ("struct io_cqring_offsets", 40, {name: 4 * index for index, name in enumerate(CQ_OFFSETS)}),
        ("struct io_uring_sqe", 64, SQE_OFFSETS),
        ("struct io_uring_cqe", 16, {"user_data": 0, "res": 8}),
        ("struct io_uring_rsrc_register", 32, {"nr": 0, "flags": 4, "data": 16, "tags": 24}),
        ("struct io_uring_rsrc_update2", 32, {"offset": 0, "data": 8, "tags": 16, "nr": 24}),
        ("struct io_uring_getevents_arg", 24, {"sigmask": 0, "sigmask_sz": 8, "ts": 16}),
    ],
)
def test_structs_have_the_kernels_layout(struct: str, size: int, offsets: dict[str, int]) -> None:
    assert uring_abi.ffi.sizeof(struct) == size
    assert {field: uring_abi.ffi.offsetof(struct, field) for field in offsets} == offsets


@given(head=st.integers(0, UINT32_MAX), count=st.integers(0, 16))
def test_counters_that_wrap_name_each_entry_once(head: int, count: int) -> None:
    indices = ring_indices(head, (head + count) & UINT32_MAX, 15)

    assert len(indices) == count
    assert len(set(indices)) == count
    assert all((index - head - step) % 16 == 0 for step, index in enumerate(indices))


class Memory:
    """Some anonymous pages with their address."""

    def __init__(self, size_bytes: int) -> None:
        ffi = FFI()
        self.pages = mmap.mmap(-1, size_bytes)
        self._pin = ffi.from_buffer(self.pages)
        self.address = int(ffi.cast("uintptr_t", self._pin))


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(4)
    yield made
    made.close()


@pytest.fixture
def file_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def prepare_page(ring: Ring, slot: int, kind: TransferKind, file_fd: int, memory: Memory) -> None:
    offset = PAGE * slot
    address = memory.address + offset
    ring.prepare(slot, kind, file_fd=file_fd, address=address, length_bytes=PAGE, offset_bytes=offset)


def prepare_wait(ring: Ring, slot: int, reader: int, memory: Memory) -> None:
    """Prepare a request that stays in flight until something is written to the pipe."""
    ring.prepare(
        slot, TransferKind.READ, file_fd=reader, address=memory.address, length_bytes=1, offset_bytes=0
    )


def test_all_slots_go_to_the_file_and_come_back(ring: Ring, file_fd: int) -> None:
    content = os.urandom(4 * PAGE)
    source, target = Memory(4 * PAGE), Memory(4 * PAGE)
    source.pages[:] = content
    for kind, memory in ((TransferKind.WRITE, source), (TransferKind.READ, target)):
        for slot in range(4):
            prepare_page(ring, slot, kind, file_fd, memory)
        assert ring.submit([3, 1, 0, 2]) == 4
        assert ring.in_flight == 4
        assert sorted(ring.reap(4, timeout_s=10)) == [(slot, PAGE) for slot in range(4)]
        assert ring.in_flight == 0

    assert os.pread(file_fd, 5 * PAGE, 0) == content
    assert target.pages[:] == content


def test_a_bad_request_does_not_hold_up_those_behind_it(ring: Ring, file_fd: int) -> None:
    memory = Memory(4 * PAGE)
    for slot in range(3):
        prepare_page(ring, slot, TransferKind.WRITE, NEVER_OPEN_FD if slot == 1 else file_fd, memory)
    ring.prepare(
        3,
        TransferKind.WRITE,
        file_fd=file_fd,
        address=NEVER_MAPPED_ADDRESS,
        length_bytes=PAGE,
        offset_bytes=0,
    )
    ring.submit([0, 1, 2, 3])

    assert dict(ring.reap(4, timeout_s=10)) == {0: PAGE, 1: -errno.EBADF, 2: PAGE, 3: -errno.EFAULT}


def test_reap_returns_what_is_there_when_time_is_over(
    ring: Ring, file_fd: int, pipe: tuple[int, int]
) -> None:
    memory = Memory(4 * PAGE)
    prepare_wait(ring, 0, pipe[0], memory)
    prepare_page(ring, 1, TransferKind.WRITE, file_fd, memory)
    ring.submit([0, 1])

    found: list[tuple[int, int]] = []
    for timeout_s in (0.05, 0.5, 5.0, 50.0):  # a thread of the kernel writes the page, when it has its turn
        started_s = time.monotonic()
        found = ring.reap(2, timeout_s=timeout_s)
        assert time.monotonic() - started_s >= timeout_s
        if found:
            break
    assert found == [(1, PAGE)]
    assert ring.in_flight == 1

    os.write(pipe[1], b"x")
    assert ring.reap(1, timeout_s=10) == [(0, 1)]


def test_reap_goes_on_after_a_signal(ring: Ring, pipe: tuple[int, int]) -> None:
    signals: list[int] = []

    def on_alarm(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 3:
            os.write(pipe[1], b"x")

    memory = Memory(PAGE)
    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        prepare_wait(ring, 0, pipe[0], memory)
        ring.submit([0])
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        assert ring.reap(1, timeout_s=30) == [(0, 1)]
        assert len(signals) >= 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_reap_with_nothing_in_flight_does_not_wait(ring: Ring) -> None:
    assert ring.reap(4, timeout_s=600) == []


def test_a_closed_ring_is_an_error_and_close_may_be_repeated() -> None:
    closed = Ring(1)
    closed.close()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.submit([0])
    with pytest.raises(ValueError, match="closed"):
        closed.reap(1, timeout_s=0)


def test_where_the_order_of_memory_is_unknown_there_is_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "ORDERED_MACHINES", frozenset({"pdp11"}))
    with pytest.raises(OSError, match="order of memory accesses on") as caught:
        Ring(1)
    assert caught.value.errno == errno.ENOTSUP


def test_a_request_is_never_longer_than_the_kernel_moves(ring: Ring, file_fd: int) -> None:
    ring.prepare(0, TransferKind.READ, file_fd=file_fd, address=PAGE, length_bytes=8 * 2**30, offset_bytes=0)

    length = ring._memory.sqes[0].len  # pyright: ignore[reportPrivateUsage]
    assert length % PAGE == 0
    assert length <= 2**31 - PAGE


# --- the kernel at its limits: io_uring_enter as it is, but for what it would answer then -----------------------------


def entering(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, int, tuple[int, ...]], int | None]
) -> list[int]:
    """Let `answer(call, to_submit, all arguments)` replace the kernel's answer; returns what each call gave."""
    given: list[int] = []

    def enter(number: int, *arguments: int) -> int:
        if number != SYSCALL.io_uring_enter:
            return raw_syscall(number, *arguments)
        instead = answer(len(given), arguments[1], arguments)
        given.append(raw_syscall(number, *arguments) if instead is None else instead)
        return given[-1]

    monkeypatch.setattr(uring, "raw_syscall", enter)
    return given


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.EINTR])
def test_what_the_kernel_refuses_is_handed_over_again(
    ring: Ring, file_fd: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    given = entering(monkeypatch, lambda call, _count, _arguments: -number if call < 3 else None)
    memory = Memory(4 * PAGE)
    for slot in range(4):
        prepare_page(ring, slot, TransferKind.WRITE, file_fd, memory)
    ring.submit([0, 1, 2, 3])

    assert sorted(ring.reap(4, timeout_s=10)) == [(slot, PAGE) for slot in range(4)]
    assert given[:3] == [-number] * 3


def test_a_kernel_that_takes_one_at_a_time_gets_all(
    ring: Ring, file_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(_call: int, count: int, arguments: tuple[int, ...]) -> int | None:
        return None if count < 2 else raw_syscall(SYSCALL.io_uring_enter, arguments[0], 1, 0, *arguments[3:])

    given = entering(monkeypatch, one)
    memory = Memory(4 * PAGE)
    for slot in range(4):
        prepare_page(ring, slot, TransferKind.WRITE, file_fd, memory)
    ring.submit([2, 0, 3, 1])

    assert sorted(ring.reap(4, timeout_s=10)) == [(slot, PAGE) for slot in range(4)]
    assert given[:4] == [1, 1, 1, 1]


def test_out_of_requests_with_some_in_flight_waits_for_one_of_them(
    ring: Ring, file_fd: int, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(4 * PAGE)
    prepare_wait(ring, 0, pipe[0], memory)
    ring.submit([0])
    assert ring.reap(1, timeout_s=0.01) == []

    def refuse_first(call: int, _count: int, _: tuple[int, ...]) -> int | None:
        if call:
            return None
        os.write(pipe[1], b"x")
        return -errno.EAGAIN

    given = entering(monkeypatch, refuse_first)
    prepare_page(ring, 1, TransferKind.WRITE, file_fd, memory)
    ring.submit([1])

    assert sorted(ring.reap(2, timeout_s=10)) == [(0, 1), (1, PAGE)]
    assert given[:2] == [-errno.EAGAIN, 0]


@pytest.mark.parametrize(("number", "words"), [(errno.EAGAIN, "took nothing for"), (errno.ENXIO, "failed")])
def test_what_was_never_taken_does_not_go_out_later(
    ring: Ring, file_fd: int, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    memory = Memory(4 * PAGE)
    memory.pages[:PAGE] = b"1" * PAGE
    with monkeypatch.context() as patched:
        patched.setattr(uring, "_RETRY_DEADLINE_S", 0.02)
        entering(patched, lambda _call, _count, _arguments: -number)
        prepare_page(ring, 0, TransferKind.WRITE, file_fd, memory)
        ring.submit([0])
        with pytest.raises(OSError, match=f"io_uring_enter {words}") as caught:
            ring.reap(1, timeout_s=10)
        assert caught.value.errno == number
        assert ring.in_flight == 0

    memory.pages[PAGE : 2 * PAGE] = b"2" * PAGE
    prepare_page(ring, 1, TransferKind.WRITE, file_fd, memory)
    ring.submit([1])
    assert ring.reap(1, timeout_s=10) == [(1, PAGE)]
    assert os.pread(file_fd, 3 * PAGE, 0) == bytes(PAGE) + b"2" * PAGE


# --- registered memory ------------------------------------------------------------------------------------------------

ARENA_SIZE = 64 * PAGE
REGISTERING = EngineConfig(block_size_bytes=2 * PAGE, queue_depth=4, register_arenas=True)


@contextmanager
def sealed_arena(size_bytes: int = ARENA_SIZE) -> Generator[tuple[int, mmap.mmap]]:
    fd = os.memfd_create("everstep-test-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    seal_size(fd)
    content = mmap.mmap(fd, size_bytes)
    try:
        yield fd, content
    finally:
        content.close()
        os.close(fd)


def pinned_kib() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPin")
    )
    return int(line.split()[1])


def transfer(kind: TransferKind, arena_fd: int, file_fd: int, length: int, *, begin: int = 0) -> Transfer:
    return Transfer(
        kind=kind,
        arena_fd=arena_fd,
        arena_offset_bytes=begin,
        file_fd=file_fd,
        file_offset_bytes=0,
        length_bytes=length,
    )


def test_an_arena_is_pinned_at_its_first_transfer_and_let_go_when_forgotten(file_fd: int) -> None:
    before = pinned_kib()
    engine = UringEngine(REGISTERING)
    with sealed_arena() as (arena_fd, _):
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, PAGE))
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, ARENA_SIZE))
        assert pinned_kib() - before == ARENA_SIZE // 1024
        engine.forget(arena_fd)
        assert pinned_kib() == before
        engine.run(transfer(TransferKind.READ, arena_fd, file_fd, ARENA_SIZE))
        assert pinned_kib() - before == ARENA_SIZE // 1024
        engine.close()
    assert pinned_kib() == before


def test_an_engine_that_is_not_told_to_pins_nothing(file_fd: int) -> None:
    before = pinned_kib()
    engine = UringEngine(EngineConfig())
    with sealed_arena() as (arena_fd, _):
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, ARENA_SIZE))
        assert pinned_kib() == before
        engine.close()


def test_only_the_chunks_that_are_used_are_pinned_and_any_block_moves(
    file_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_buffers, "CHUNK_BYTES", 8 * PAGE)
    engine = UringEngine(REGISTERING)
    before = pinned_kib()
    with sealed_arena() as (arena_fd, content):
        content[:] = os.urandom(ARENA_SIZE)
        # Blocks of two pages from an odd page on: every fourth lies across two chunks.
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, 20 * PAGE, begin=7 * PAGE))
        assert os.pread(file_fd, ARENA_SIZE, 0) == content[7 * PAGE : 27 * PAGE]
        assert pinned_kib() - before == 4 * 8 * PAGE // 1024
        engine.forget(arena_fd)
        engine.close()


def test_which_requests_use_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring_buffers, "CHUNK_BYTES", 8 * PAGE)
    ring = Ring(1)
    buffers = ring.register_buffers()
    with sealed_arena() as (arena_fd, _):
        arena = ArenaMap(arena_fd, size_bytes=ARENA_SIZE, writable=True)
        buffers.cover(arena, 0, 9 * PAGE)
        places = [
            buffers.find(arena.address + page * PAGE, count * PAGE)
            for page, count in ((0, 8), (7, 1), (7, 2), (8, 8), (16, 1))
        ]
        assert places == [0, 0, None, 1, None]
        buffers.release(arena)
        assert buffers.find(arena.address, PAGE) is None
        arena.close()
    ring.close()


_UNPRIVILEGED = """
import logging, os, resource, sys
from everstep.checkpoint.engine import EngineConfig, Transfer, TransferKind
from everstep.checkpoint.linux import seal_size
from everstep.checkpoint.uring_engine import UringEngine
from everstep.checkpoint.uring_probe import pin_limit_bytes

logging.basicConfig(format="%(message)s", stream=sys.stdout)
file_fd, limit = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
arena_fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
os.ftruncate(arena_fd, 1 << 20)
os.pwrite(arena_fd, b"content", 0)
seal_size(arena_fd)
print("limit", pin_limit_bytes())
engine = UringEngine(EngineConfig(register_arenas=True))
for length in (4096, 8192):
    engine.run(
        Transfer(
            kind=TransferKind.WRITE, arena_fd=arena_fd, arena_offset_bytes=0,
            file_fd=file_fd, file_offset_bytes=0, length_bytes=length,
        )
    )
engine.close()
"""


def test_what_may_not_be_pinned_is_written_all_the_same_and_told_once(file_fd: int) -> None:
    limit = 256 * 1024
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _UNPRIVILEGED, str(file_fd), str(limit)],
        pass_fds=[file_fd],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == f"limit {limit}"
    assert ended.stdout.count("buffers_not_registered") == 1
    assert f"memlock_bytes={limit}" in ended.stdout
    assert os.pread(file_fd, 7, 0) == b"content"


def test_a_kernel_without_a_table_of_buffers_registers_nothing(
    file_fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uring_buffers, "_PLACE_COUNT", 1 << 15)  # more than the kernel allows
    before = pinned_kib()
    with caplog.at_level(logging.WARNING), sealed_arena() as (arena_fd, _):
        engine = UringEngine(REGISTERING)
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, PAGE))
        assert pinned_kib() == before
        engine.close()
    assert "buffers_not_registered" in caplog.text


# --- what the kernel itself says of a ring ----------------------------------------------------------------------------


def ring_said(ring_fd: int) -> dict[str, list[str]]:
    """Return the tables of registered files and buffers as the kernel shows them, without empty places."""
    found, entries = dict[str, list[str]](), list[str]()
    for line in Path(f"/proc/self/fdinfo/{ring_fd}").read_text().splitlines():
        name, _, content = line.partition(":")
        if not name.strip().isdigit():
            entries = found[name] = []
        elif content.strip() != "<none>":
            entries.append(content.strip())
    if not {"UserFiles", "UserBufs"} <= found.keys():
        pytest.skip("this kernel does not show what is registered with a ring")
    return found


def ring_of(engine: UringEngine) -> Ring:
    return engine._ring  # pyright: ignore[reportPrivateUsage]


def fd_of(ring: Ring) -> int:
    return ring._fd  # pyright: ignore[reportPrivateUsage]


def opcodes(ring: Ring) -> list[int]:
    return [sqe.opcode for sqe in ring._memory.sqes]  # pyright: ignore[reportPrivateUsage]


def flags(ring: Ring) -> list[int]:
    return [sqe.flags for sqe in ring._memory.sqes]  # pyright: ignore[reportPrivateUsage]


def test_the_kernel_holds_what_is_registered_and_requests_use_it(
    file_fd: int, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_buffers, "CHUNK_BYTES", ARENA_SIZE // 4)
    engine = UringEngine(REGISTERING, held_fd=pipe[1])
    ring = ring_of(engine)
    empty = ring_said(fd_of(ring))
    assert (len(empty["UserFiles"]), len(empty["UserBufs"])) == (1, 0)
    assert "pipe" in empty["UserFiles"][0]
    with sealed_arena() as (arena_fd, content):
        content[:] = os.urandom(ARENA_SIZE)
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, ARENA_SIZE))
        assert set(opcodes(ring)) == {uring_abi.OP_WRITE_FIXED}
        chunks = [entry.split("/") for entry in ring_said(fd_of(ring))["UserBufs"]]
        assert [int(size) for _, size in chunks] == [ARENA_SIZE // 4] * 4
        addresses = [int(address, 16) for address, _ in chunks]
        assert [address - addresses[0] for address in addresses] == [
            number * ARENA_SIZE // 4 for number in range(4)
        ]
        assert os.pread(file_fd, ARENA_SIZE, 0) == content[:]
        content[:] = bytes(ARENA_SIZE)
        engine.run(transfer(TransferKind.READ, arena_fd, file_fd, ARENA_SIZE))
        assert set(opcodes(ring)) == {uring_abi.OP_READ_FIXED}
        assert os.pread(file_fd, ARENA_SIZE, 0) == content[:]
        engine.forget(arena_fd)
        assert ring_said(fd_of(ring))["UserBufs"] == []
    engine.close()


def test_a_file_is_registered_for_its_transfer_and_no_longer(tmp_path: Path, pipe: tuple[int, int]) -> None:
    seen = list[list[str]]()
    engine = UringEngine(
        REGISTERING,
        on_progress=lambda _: seen.append(ring_said(fd_of(ring_of(engine)))["UserFiles"]),
        held_fd=pipe[1],
    )
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    with sealed_arena() as (arena_fd, content):
        content[:] = os.urandom(ARENA_SIZE)
        for kind in TransferKind:
            seen.clear()
            engine.run(transfer(kind, arena_fd, fd, ARENA_SIZE))
            assert seen
            assert all(len(files) == 2 and "file" in files[1] for files in seen)
            assert set(flags(ring_of(engine))) == {uring_abi.FIXED_FILE}
            assert len(ring_said(fd_of(ring_of(engine)))["UserFiles"]) == 1
        os.close(fd)
        again = os.open(tmp_path / "file", os.O_RDWR)
        fcntl.fcntl(again, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # refused while anybody else has it open
        os.close(again)
        engine.forget(arena_fd)
    engine.close()


def test_a_file_that_is_not_open_is_refused_and_the_next_one_served(file_fd: int, tmp_path: Path) -> None:
    engine = UringEngine()
    with sealed_arena() as (arena_fd, content):
        content[:] = os.urandom(ARENA_SIZE)
        with pytest.raises(OSError, match="io_uring_register"), ring_of(engine).registered_file(2**20):
            pytest.fail("the kernel took a file that is not open")
        engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, ARENA_SIZE))
        assert os.pread(file_fd, ARENA_SIZE, 0) == content[:]
        engine.forget(arena_fd)
    engine.close()


def test_an_arena_with_more_chunks_than_places_is_registered_in_part_and_moves_whole(
    file_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_buffers, "CHUNK_BYTES", ARENA_SIZE // 8)
    monkeypatch.setattr(uring_buffers, "_PLACE_COUNT", 3)
    engine = UringEngine(REGISTERING)
    for _ in range(3):  # places come back with the arena
        with sealed_arena() as (arena_fd, content):
            content[:] = os.urandom(ARENA_SIZE)
            engine.run(transfer(TransferKind.WRITE, arena_fd, file_fd, ARENA_SIZE))
            assert os.pread(file_fd, ARENA_SIZE, 0) == content[:]
            assert len(ring_said(fd_of(ring_of(engine)))["UserBufs"]) == 3
            engine.forget(arena_fd)
    engine.close()


def test_one_ring_serves_many_more_files_than_it_has_slots_and_registered_files(
    tmp_path: Path, pipe: tuple[int, int]
) -> None:
    """They come and go with their transfers; the one that it holds for its owner stays."""
    engine = UringEngine(REGISTERING, held_fd=pipe[1])
    count = 16 * REGISTERING.queue_depth
    fds = [os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR) for number in range(count)]
    with sealed_arena() as (arena_fd, content):
        content[:] = os.urandom(ARENA_SIZE)
        for number, fd in enumerate(fds):
            page = number % (ARENA_SIZE // PAGE)
            engine.run(transfer(TransferKind.WRITE, arena_fd, fd, PAGE, begin=page * PAGE))
        assert len(ring_said(fd_of(ring_of(engine)))["UserFiles"]) == 1
        for number, fd in enumerate(fds):
            page = number % (ARENA_SIZE // PAGE)
            assert os.pread(fd, 2 * PAGE, 0) == content[page * PAGE : (page + 1) * PAGE]
        engine.forget(arena_fd)
    engine.close()
    for fd in fds:
        os.close(fd)
