"""One suite for all engines: kernel AIO, io_uring and plain, in the thread and in a process, direct and buffered."""

import errno
import mmap
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint import plain_engine
from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.arena_map import ARENA_MAPS_MAX
from everstep.checkpoint.engine import Engine, EngineConfig, EngineKind, Transfer, TransferKind
from everstep.checkpoint.engine_process import ProcessEngine
from everstep.checkpoint.linux import dio_alignment, seal_size
from everstep.checkpoint.plain_engine import THREADS_MAX, PlainEngine
from everstep.checkpoint.uring_engine import UringEngine

PAGE = 4096
BLOCK = 2 * PAGE
ARENA_SIZE = 64 * PAGE
NEVER_OPEN_FD = 1_000_000
CONFIG = EngineConfig(
    block_size_bytes=BLOCK, queue_depth=4
)  # small: many blocks and full queues in a few pages

REGISTERING = replace(CONFIG, register_arenas=True)

MAKERS: dict[str, Callable[[], Engine]] = {
    "aio": lambda: AioEngine(CONFIG),
    "uring": lambda: UringEngine(CONFIG),
    "uring-registered": lambda: UringEngine(REGISTERING),
    "plain": lambda: PlainEngine(CONFIG),
    "process-aio": lambda: ProcessEngine(EngineKind.AIO, CONFIG),
    "process-uring": lambda: ProcessEngine(EngineKind.URING, REGISTERING),
    "process-plain": lambda: ProcessEngine(EngineKind.PLAIN, CONFIG),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> bool:
    if request.param:
        with (tmp_path / "probe").open("wb") as probe:
            told = dio_alignment(probe.fileno())
            if told is None or not told.is_possible:
                pytest.skip(f"files in {tmp_path} cannot do direct I/O")
    return request.param


class Arena:
    """A memfd with a view of its bytes, of sealed size as the daemon's are."""

    def __init__(self, size_bytes: int, *, sealed: bool = True) -> None:
        self.fd = os.memfd_create("everstep-test-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        if sealed:
            seal_size(self.fd)
        self.bytes = mmap.mmap(self.fd, size_bytes)

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


@contextmanager
def arena_for(engine: Engine, content: bytes = b"", *, sealed: bool = True) -> Generator[Arena]:
    arena = Arena(ARENA_SIZE, sealed=sealed)
    arena.bytes[: len(content)] = content
    try:
        yield arena
    finally:
        engine.forget(arena.fd)
        arena.close()


@contextmanager
def opened(path: Path, *, direct: bool = False, flags: int = os.O_RDWR | os.O_CREAT) -> Generator[int]:
    file_fd = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
    try:
        yield file_fd
    finally:
        os.close(file_fd)


def run(
    engine: Engine,
    kind: TransferKind,
    arena_fd: int,
    file_fd: int,
    length: int,
    *,
    arena_offset: int = 0,
    file_offset: int = 0,
) -> None:
    done = engine.run(
        Transfer(
            kind=kind,
            arena_fd=arena_fd,
            arena_offset_bytes=arena_offset,
            file_fd=file_fd,
            file_offset_bytes=file_offset,
            length_bytes=length,
        )
    )
    assert done.bytes_moved == length
    assert done.busy_s >= 0


def worker_pid(engine: Engine) -> int:
    return engine.pid if isinstance(engine, ProcessEngine) else os.getpid()


def assert_still_works(engine: Engine, folder: Path) -> None:
    content = os.urandom(10 * PAGE)
    with arena_for(engine, content) as arena, opened(folder / "still-works") as file_fd:
        run(engine, TransferKind.WRITE, arena.fd, file_fd, len(content))
        assert os.pread(file_fd, ARENA_SIZE, 0) == content


_offsets = st.integers(0, 20).map(lambda pages: pages * PAGE)


@st.composite
def _lengths(draw: st.DrawFn) -> tuple[int, int]:
    """Exact length of the data, and of the write, whose tail is padded to a page as a segment's is."""
    exact = draw(st.integers(1, 24 * PAGE) | st.integers(1, 24).map(lambda pages: pages * PAGE))
    return exact, -(-exact // PAGE) * PAGE


def test_what_was_written_is_read_back_and_nothing_else_is_touched(
    engine: Engine, direct: bool, tmp_path: Path
) -> None:
    @settings(max_examples=25)
    @given(lengths=_lengths(), source_offset=_offsets, target_offset=_offsets, file_offset=_offsets)
    def round_trip(
        lengths: tuple[int, int], source_offset: int, target_offset: int, file_offset: int
    ) -> None:
        exact, padded = lengths
        before = os.urandom(ARENA_SIZE)
        content = os.urandom(exact) + bytes(padded - exact)
        path = tmp_path / "file"
        path.write_bytes(before)
        with opened(path, direct=direct) as file_fd:
            with arena_for(engine, bytes(source_offset) + content) as source:
                run(
                    engine,
                    TransferKind.WRITE,
                    source.fd,
                    file_fd,
                    padded,
                    arena_offset=source_offset,
                    file_offset=file_offset,
                )
            after = path.read_bytes()
            assert after == before[:file_offset] + content + before[file_offset + padded :]
            with arena_for(engine, before) as target:
                run(
                    engine,
                    TransferKind.READ,
                    target.fd,
                    file_fd,
                    exact,
                    arena_offset=target_offset,
                    file_offset=file_offset,
                )
                assert target.bytes[:target_offset] == before[:target_offset]
                assert target.bytes[target_offset : target_offset + exact] == content[:exact]
                assert target.bytes[target_offset + padded :] == before[target_offset + padded :]

    round_trip()


@pytest.mark.parametrize("had", range(THREADS_MAX - 1))
def test_where_no_more_threads_are_to_be_had_fewer_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had: int
) -> None:
    """And nothing goes on when the call has ended: the file's number is the next one's then."""
    start, left = threading.Thread.start, iter(range(had))

    def started(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    content = os.urandom(ARENA_SIZE)
    engine = PlainEngine(EngineConfig(block_size_bytes=PAGE))
    with arena_for(engine, content) as arena, opened(tmp_path / "file", direct=False) as file_fd:
        monkeypatch.setattr(threading.Thread, "start", started)
        run(engine, TransferKind.WRITE, arena.fd, file_fd, ARENA_SIZE)
        assert not [each for each in threading.enumerate() if each.name == "everstep-plain"]
    assert (tmp_path / "file").read_bytes() == content
    engine.close()


@pytest.mark.parametrize("length", [1, 511, PAGE, BLOCK + 1, 5 * BLOCK - 1])
def test_a_file_cut_to_its_exact_length_is_read_to_its_end(
    engine: Engine, direct: bool, tmp_path: Path, length: int
) -> None:
    content = os.urandom(length)
    (tmp_path / "file").write_bytes(content)
    with arena_for(engine) as arena, opened(tmp_path / "file", direct=direct) as file_fd:
        run(engine, TransferKind.READ, arena.fd, file_fd, length)
        assert arena.bytes[:] == content + bytes(ARENA_SIZE - length)


@pytest.mark.parametrize(
    ("file_size", "asked"), [(0, 1), (100, 101), (PAGE, PAGE + 1), (5 * PAGE + 7, 16 * PAGE)]
)
def test_a_file_that_is_too_short_is_an_error_that_says_where_it_ends(
    engine: Engine, direct: bool, tmp_path: Path, file_size: int, asked: int
) -> None:
    (tmp_path / "file").write_bytes(os.urandom(file_size))
    with arena_for(engine) as arena, opened(tmp_path / "file", direct=direct) as file_fd:
        with pytest.raises(OSError, match="ends at byte") as caught:
            run(engine, TransferKind.READ, arena.fd, file_fd, asked)
        assert caught.value.errno == errno.ENODATA
    assert_still_works(engine, tmp_path)


def test_length_zero_moves_nothing(engine: Engine, direct: bool, tmp_path: Path) -> None:
    with arena_for(engine) as arena, opened(tmp_path / "file", direct=direct) as file_fd:
        run(engine, TransferKind.WRITE, arena.fd, file_fd, 0)
        run(engine, TransferKind.READ, arena.fd, file_fd, 0)
        assert os.fstat(file_fd).st_size == 0


def test_a_real_short_write_goes_on_where_it_stopped(engine: Engine, direct: bool, tmp_path: Path) -> None:
    # One block, and a file size limit within it: the kernel writes up to the limit, which is a short
    # completion; what the engine then asks for again fails, and the error names that place.
    limit = PAGE + 512 if direct else PAGE + 1234
    content = os.urandom(BLOCK)
    pid = worker_pid(engine)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with arena_for(engine, content) as arena, opened(tmp_path / "file", direct=direct) as file_fd:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=f"write of {BLOCK - limit} bytes at byte {limit}:") as caught:
                run(engine, TransferKind.WRITE, arena.fd, file_fd, BLOCK)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert caught.value.errno == errno.EFBIG
        assert (tmp_path / "file").read_bytes() == content[:limit]
    assert_still_works(engine, tmp_path)


def test_short_reads_are_continued(engine: Engine) -> None:
    # Binary files of sysfs give at most one page per read, however much is asked.
    path = Path("/sys/kernel/btf/vmlinux")
    if not path.exists():
        pytest.skip(f"{path}: this kernel has no type information, and no other file is known to read short")
    content = path.read_bytes()[: ARENA_SIZE - 123]
    with arena_for(engine) as arena, opened(path, flags=os.O_RDONLY) as file_fd:
        assert len(os.pread(file_fd, BLOCK, 0)) < BLOCK
        run(engine, TransferKind.READ, arena.fd, file_fd, len(content))
        assert arena.bytes[: len(content)] == content


def test_the_first_error_of_many_blocks_in_flight_ends_the_transfer_quietly(
    engine: Engine, direct: bool, tmp_path: Path
) -> None:
    pid = worker_pid(engine)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    with (
        arena_for(engine, b"1" * ARENA_SIZE) as arena,
        opened(tmp_path / "file", direct=direct) as file_fd,
    ):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20 * PAGE, hard))
        try:
            with pytest.raises(OSError, match="write of") as caught:
                run(engine, TransferKind.WRITE, arena.fd, file_fd, ARENA_SIZE)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert caught.value.errno == errno.EFBIG
        # Nothing is under way any more: what the arena holds from now on never reaches the file.
        arena.bytes[:] = b"2" * ARENA_SIZE
        os.fdatasync(file_fd)
        assert b"2" not in (tmp_path / "file").read_bytes()
    assert_still_works(engine, tmp_path)


@pytest.mark.root
def test_a_full_file_system_is_enospc(engine: Engine, tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ARENA_SIZE // 2}", "tmpfs", mounted],
        check=False,
        capture_output=True,
        text=True,
    )
    if mount.returncode:
        pytest.skip(f"cannot mount here: {mount.stderr.strip()}")
    try:
        with arena_for(engine) as arena, opened(mounted / "file") as file_fd:
            with pytest.raises(OSError, match=r"write of .*No space left") as caught:
                run(engine, TransferKind.WRITE, arena.fd, file_fd, ARENA_SIZE)
            assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", mounted], check=True)
    assert_still_works(engine, tmp_path)


@pytest.mark.parametrize("engine", ["plain", "process-plain"], indirect=True)  # /dev/full knows no AIO
def test_dev_full_is_enospc(engine: Engine) -> None:
    with arena_for(engine) as arena, opened(Path("/dev/full"), flags=os.O_WRONLY) as file_fd:
        with pytest.raises(OSError, match=f"write of {BLOCK} bytes at byte 0: No space left") as caught:
            run(engine, TransferKind.WRITE, arena.fd, file_fd, ARENA_SIZE)
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("kind", "flags"), [(TransferKind.WRITE, os.O_RDONLY), (TransferKind.READ, os.O_WRONLY)]
)
def test_a_file_opened_the_other_way_is_ebadf(
    engine: Engine, direct: bool, tmp_path: Path, kind: TransferKind, flags: int
) -> None:
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    with arena_for(engine) as arena, opened(tmp_path / "file", direct=direct, flags=flags) as file_fd:
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            run(engine, kind, arena.fd, file_fd, BLOCK)
        assert caught.value.errno == errno.EBADF
    assert_still_works(engine, tmp_path)


def test_closed_fds_are_ebadf(engine: Engine, tmp_path: Path) -> None:
    with arena_for(engine) as arena, opened(tmp_path / "file") as file_fd:
        for arena_fd, target_fd in ((arena.fd, NEVER_OPEN_FD), (NEVER_OPEN_FD, file_fd)):
            with pytest.raises(OSError, match="Bad file descriptor") as caught:
                run(engine, TransferKind.WRITE, arena_fd, target_fd, PAGE)
            assert caught.value.errno == errno.EBADF
    assert_still_works(engine, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        (TransferKind.WRITE, 1, 0, PAGE),
        (TransferKind.WRITE, 0, 100, PAGE),
        (TransferKind.WRITE, 0, 0, PAGE + 1),
        (TransferKind.READ, 8, 0, PAGE),
        (TransferKind.READ, 0, 8, PAGE),
    ],
)
def test_a_misaligned_direct_transfer_is_refused_and_a_buffered_one_is_done(
    engine: Engine, direct: bool, tmp_path: Path, case: tuple[TransferKind, int, int, int]
) -> None:
    kind, arena_offset, file_offset, length = case
    (tmp_path / "file").write_bytes(bytes(ARENA_SIZE))
    with arena_for(engine) as arena, opened(tmp_path / "file", direct=direct) as file_fd:
        refused = pytest.raises(ValueError, match="needs multiples of") if direct else nullcontext()
        with refused:
            run(engine, kind, arena.fd, file_fd, length, arena_offset=arena_offset, file_offset=file_offset)


def test_a_range_outside_the_arena_is_refused(engine: Engine, direct: bool, tmp_path: Path) -> None:
    with arena_for(engine) as arena, opened(tmp_path / "file", direct=direct) as file_fd:
        for kind in TransferKind:
            with pytest.raises(ValueError, match=f"to byte {ARENA_SIZE + PAGE}, it has {ARENA_SIZE}"):
                run(engine, kind, arena.fd, file_fd, 2 * PAGE, arena_offset=ARENA_SIZE - PAGE)
        assert os.fstat(file_fd).st_size == 0
    assert_still_works(engine, tmp_path)


def test_a_read_only_arena_can_be_written_to_a_file_and_not_read_into(engine: Engine, tmp_path: Path) -> None:
    content = os.urandom(ARENA_SIZE)
    with (
        arena_for(engine, content) as arena,
        opened(Path(f"/proc/self/fd/{arena.fd}"), flags=os.O_RDONLY) as read_only_fd,
        opened(tmp_path / "file") as file_fd,
    ):
        run(engine, TransferKind.WRITE, read_only_fd, file_fd, ARENA_SIZE)
        assert os.pread(file_fd, ARENA_SIZE, 0) == content
        with pytest.raises(PermissionError):
            run(engine, TransferKind.READ, read_only_fd, file_fd, ARENA_SIZE)


def test_an_arena_that_has_grown_is_used_whole(engine: Engine, tmp_path: Path) -> None:
    with arena_for(engine, sealed=False) as arena, opened(tmp_path / "file") as file_fd:
        run(engine, TransferKind.WRITE, arena.fd, file_fd, PAGE)
        os.ftruncate(arena.fd, 2 * ARENA_SIZE)
        os.pwrite(arena.fd, b"grown", ARENA_SIZE)
        run(engine, TransferKind.WRITE, arena.fd, file_fd, PAGE, arena_offset=ARENA_SIZE)
        assert os.pread(file_fd, 5, 0) == b"grown"


def _held(engine: Engine) -> tuple[int, int]:
    """Return how many descriptors and mappings of test arenas the working process has."""
    process = Path(f"/proc/{worker_pid(engine)}")
    maps = (process / "maps").read_text().count("memfd:everstep-test-arena")
    return len(list((process / "fd").iterdir())), maps


def test_forgotten_arenas_and_used_files_are_let_go(engine: Engine, tmp_path: Path) -> None:
    with opened(tmp_path / "anchor") as anchor_fd, arena_for(engine) as anchor:
        run(engine, TransferKind.WRITE, anchor.fd, anchor_fd, 0)
        before = _held(engine)
        assert before[1] == (
            0 if isinstance(engine, ProcessEngine) else 1
        )  # the test's own view of the anchor
        for _ in range(5):
            with arena_for(engine) as arena, opened(tmp_path / "file") as file_fd:
                run(engine, TransferKind.WRITE, arena.fd, file_fd, PAGE)
                run(engine, TransferKind.READ, arena.fd, file_fd, PAGE)
                with pytest.raises(OSError, match="ends at byte"):
                    run(engine, TransferKind.READ, arena.fd, file_fd, 2 * PAGE)
                with pytest.raises(ValueError, match="needs the arena"):
                    run(engine, TransferKind.READ, arena.fd, file_fd, 2 * ARENA_SIZE)
                engine.forget(arena.fd)
        # A process obeys and answers in order: after this answer it has obeyed every `forget`.
        run(engine, TransferKind.WRITE, anchor.fd, anchor_fd, 0)
        assert _held(engine) == before


def test_at_most_eight_arenas_stay_mapped_and_all_work(engine: Engine, tmp_path: Path) -> None:
    arenas = [Arena(PAGE) for _ in range(ARENA_MAPS_MAX + 3)]
    try:
        with opened(tmp_path / "file") as file_fd:
            fds_before, maps_before = _held(engine)
            for index, arena in enumerate(arenas * 2):
                arena.bytes[:4] = index.to_bytes(4, "little")
                run(engine, TransferKind.WRITE, arena.fd, file_fd, PAGE)
                assert os.pread(file_fd, 4, 0) == index.to_bytes(4, "little")
            fds, maps = _held(engine)
        # A process may not yet have obeyed the last `forget`, which follows the transfer.
        assert maps <= maps_before + ARENA_MAPS_MAX
        assert fds <= fds_before + 2 * ARENA_MAPS_MAX + 1
    finally:
        for arena in arenas:
            engine.forget(arena.fd)
            arena.close()


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Transfer(
            kind=TransferKind.READ,
            arena_fd=3,
            arena_offset_bytes=0,
            file_fd=4,
            file_offset_bytes=-1,
            length_bytes=1,
        )


@pytest.mark.parametrize(("block_size", "depth", "named"), [(0, 1, "0"), (1000, 1, "1000"), (PAGE, 0, "0")])
def test_an_impossible_configuration_is_refused(block_size: int, depth: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"got {named}"):
        EngineConfig(block_size_bytes=block_size, queue_depth=depth)


def test_the_plain_engine_makes_few_calls_at_once_and_more_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call waits until as many are under way as may be; with one fewer none would ever return."""
    meeting, real, inside = threading.Barrier(THREADS_MAX), os.pwrite, list[int]()

    def pwrite(fd: int, block: memoryview, offset: int) -> int:
        inside.append(offset)
        meeting.wait(20)
        return real(fd, block, offset)

    monkeypatch.setattr(plain_engine.os, "pwrite", pwrite)
    engine, content = PlainEngine(replace(CONFIG, queue_depth=64)), os.urandom(2 * THREADS_MAX * BLOCK)
    with arena_for(engine, content) as arena, opened(tmp_path / "file") as file_fd:
        run(engine, TransferKind.WRITE, arena.fd, file_fd, len(content))
        assert os.pread(file_fd, ARENA_SIZE, 0) == content
    engine.close()
    assert sorted(inside) == list(range(0, len(content), BLOCK))
