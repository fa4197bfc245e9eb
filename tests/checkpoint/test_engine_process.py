"""What only an engine in a process can do: die, stand still, outlive or not outlive its parent."""

import errno
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.checkpoint.engine import EngineConfig, EngineKind, Transfer, TransferDone, TransferKind
from everstep.checkpoint.engine_lanes import LanedEngine
from everstep.checkpoint.engine_process import ProcessEngine
from everstep.core.errors import DeadlineError, StorageError

KINDS = list(EngineKind)
LENGTH = 256 << 20
SLOW = EngineConfig(block_size_bytes=4096, queue_depth=1)  # 65,536 single blocks: seconds, never milliseconds


@contextmanager
def sparse_transfer(folder: Path, length: int = LENGTH) -> Generator[Transfer]:
    """A write of `length` zero bytes that takes memory only as it goes."""
    arena_fd = os.memfd_create("everstep-test-arena")
    file_fd = os.open(folder / "file", os.O_CREAT | os.O_TRUNC | os.O_RDWR)
    try:
        os.ftruncate(arena_fd, length)
        yield Transfer(
            kind=TransferKind.WRITE,
            arena_fd=arena_fd,
            arena_offset_bytes=0,
            file_fd=file_fd,
            file_offset_bytes=0,
            length_bytes=length,
        )
    finally:
        os.close(arena_fd)
        os.close(file_fd)


class InThread:
    """A transfer running in a thread, and how it ended."""

    def __init__(self, work: Callable[[], TransferDone]) -> None:
        self.outcome: TransferDone | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], TransferDone]) -> None:
        try:
            self.outcome = work()
        except Exception as exc:  # noqa: BLE001 - the test looks at it
            self.outcome = exc

    def wait(self, timeout_s: float) -> TransferDone | Exception | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self.outcome


def _wait_until_written(file_fd: int) -> None:
    deadline_s = time.monotonic() + 30
    while os.fstat(file_fd).st_size == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


TRIES = 5
"""Of what is timed: a busy machine may let this process, or that one, stand still for seconds."""


@pytest.mark.parametrize("kind", KINDS)
def test_kill_in_mid_transfer_is_an_error_within_two_seconds(kind: EngineKind, tmp_path: Path) -> None:
    assert any(_told_after_kill_s(kind, tmp_path) < 2 for _ in range(TRIES))


def _told_after_kill_s(kind: EngineKind, folder: Path) -> float:
    """Kill a process that writes; return how long the error took, infinity where all was written before the kill."""
    engine = ProcessEngine(kind, SLOW)
    try:
        with sparse_transfer(folder) as transfer:
            running = InThread(lambda: engine.run(transfer))
            _wait_until_written(transfer.file_fd)
            killed_s = time.monotonic()
            os.kill(engine.pid, signal.SIGKILL)
            outcome = running.wait(60)
            told_s = time.monotonic() - killed_s
            if isinstance(outcome, TransferDone):
                return math.inf
            assert isinstance(outcome, StorageError)
            assert f"{engine.pid} ended (exit status -9)" in str(outcome)
            assert os.fstat(transfer.file_fd).st_size < LENGTH
            assert _is_gone(engine.pid)
            with pytest.raises(StorageError, match="make a new engine"):
                engine.run(transfer)
            return told_s
    finally:
        engine.close()


ASYNCHRONOUS = [EngineKind.AIO, EngineKind.URING]
SLOW_BYTES_PER_S = 500_000
SLOW_LENGTH = 2 << 20
"""Four seconds: many times what a process is given here, with room for a test that stands still itself."""


class SlowDrive:
    """A mounted loop device that the block layer holds to a speed."""

    def __init__(self, groups: list[Path], loop: Path, folder: Path) -> None:
        self.folder = folder
        self._groups, self._loop = groups, loop

    def hold_to(self, bytes_per_s: int) -> None:
        """Let it do no more than so many bytes per second; 0: as fast as it can."""
        number = self._loop.stat().st_rdev
        for group in self._groups:
            (group / "blkio.throttle.write_bps_device").write_text(
                f"{os.major(number)}:{os.minor(number)} {bytes_per_s}"
            )


@pytest.fixture
def slow_drive(tmp_path: Path) -> Iterator[SlowDrive]:
    """A file system on a loop device that is held to 0.5 MB/s, here and for the I/O processes."""
    groups = _throttled_groups()
    image, folder = tmp_path / "image", tmp_path / "slow"
    folder.mkdir()
    image.write_bytes(bytes(64 << 20))
    loop = Path(_command("losetup", "--find", "--show", "--direct-io=on", image))
    try:
        _command("mkfs.ext4", "-q", "-E", "nodiscard", loop)
        _command("mount", loop, folder)
        (folder / "file").write_bytes(bytes(SLOW_LENGTH))
        os.sync()
        drive = SlowDrive(groups, loop, folder)
        drive.hold_to(SLOW_BYTES_PER_S)
        yield drive
        drive.hold_to(0)
        _command("umount", "--lazy", folder)  # a process that a failed test left may still hold it
    finally:
        _command("losetup", "--detach", loop)


def _throttled_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup/blkio")
    if not (root / "blkio.throttle.write_bps_device").exists():
        pytest.skip(f"no blkio controller of cgroup v1 at {root}: a drive cannot be slowed down here")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line.split(":", 2)[2] for line in lines if "blkio" in line.split(":")[1].split(","))
    return list({root, root / own.lstrip("/")})


def _command(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def slow_write(folder: Path) -> Generator[tuple[Transfer, int]]:
    """A write over two written blocks of a slow file, and the arena's fd."""
    arena_fd = os.memfd_create("everstep-test-arena")
    file_fd = os.open(folder / "file", os.O_RDWR | os.O_DIRECT)
    os.ftruncate(arena_fd, SLOW_LENGTH)
    try:
        yield (
            Transfer(
                kind=TransferKind.WRITE,
                arena_fd=arena_fd,
                arena_offset_bytes=0,
                file_fd=file_fd,
                file_offset_bytes=0,
                length_bytes=SLOW_LENGTH,
            ),
            arena_fd,
        )
    finally:
        os.close(arena_fd)
        os.close(file_fd)


@pytest.mark.root
@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_given_up_means_that_nothing_reads_the_arena_any_more(
    kind: EngineKind, slow_drive: SlowDrive
) -> None:
    engine = ProcessEngine(kind, stall_timeout_s=0.3, end_timeout_s=60)
    path = slow_drive.folder / "file"
    with slow_write(slow_drive.folder) as (transfer, arena_fd):
        with pytest.raises(StorageError, match="no progress"):
            engine.run(transfer)
        os.pwrite(arena_fd, b"2" * SLOW_LENGTH, 0)
        engine.close()
    os.truncate(path, SLOW_LENGTH - 1)  # waits until no direct I/O on the file is under way
    assert path.read_bytes() == bytes(SLOW_LENGTH - 1)


@pytest.mark.root
@pytest.mark.parametrize("kind", ASYNCHRONOUS)
def test_a_device_that_still_works_for_a_killed_process_makes_its_arena_unusable(
    kind: EngineKind, slow_drive: SlowDrive, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ProcessEngine(kind, stall_timeout_s=0.2, end_timeout_s=0.05)
    with slow_write(slow_drive.folder) as (transfer, _):
        with pytest.raises(DeadlineError, match="do not use this range of the arena again"):
            engine.run(transfer)
        engine.close()
        assert "engine_process_stuck" in caplog.text
        slow_drive.hold_to(0)
        for _ in range(300):  # of 0.1 s each, while the device works
            caplog.clear()
            engine.close()
            if not caplog.text:
                break
        assert not caplog.text
        assert _is_gone(engine.pid)


def test_a_process_that_died_between_transfers_is_an_error(tmp_path: Path) -> None:
    engine = ProcessEngine(EngineKind.PLAIN)
    try:
        os.kill(engine.pid, signal.SIGKILL)
        with sparse_transfer(tmp_path, 4096) as transfer, pytest.raises(StorageError, match="ended"):
            engine.run(transfer)
    finally:
        engine.close()


@pytest.mark.parametrize("how", ["between transfers", "in the middle of one", "while it stands still"])
def test_a_lane_whose_process_ended_gives_way_to_a_new_one_that_moves_the_same_bytes(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = list[ProcessEngine]()

    def make() -> ProcessEngine:
        stall_timeout_s = 0.3 if how == "while it stands still" and not made else 60.0
        made.append(ProcessEngine(EngineKind.AIO, stall_timeout_s=stall_timeout_s))
        return made[-1]

    lanes = LanedEngine(make, 1)
    try:
        with sparse_transfer(tmp_path) as transfer:
            if how == "in the middle of one":
                os.kill(made[0].pid, signal.SIGSTOP)
                running = InThread(lambda: lanes.run(transfer))
                os.kill(made[0].pid, signal.SIGKILL)
                outcome = running.wait(250)
            elif how == "between transfers":
                os.kill(made[0].pid, signal.SIGKILL)
                outcome = lanes.run(transfer)
            else:  # the device may hang: that is said before it is tried again
                os.kill(made[0].pid, signal.SIGSTOP)
                with pytest.raises(StorageError, match="no progress"):
                    lanes.run(transfer)
                outcome = lanes.run(transfer)
            assert isinstance(outcome, TransferDone)
            assert outcome.bytes_moved == LENGTH == os.fstat(transfer.file_fd).st_size
            assert "engine_replaced" in caplog.text
            assert len(made) == 2
            assert _is_gone(made[0].pid)
            lanes.forget(transfer.arena_fd)
    finally:
        lanes.close()
    assert _is_gone(made[1].pid)


def test_an_arena_is_let_go_by_all_lanes_though_the_process_of_one_has_ended(tmp_path: Path) -> None:
    """In the daemon it was kept, and counted, until that ended."""
    made = [ProcessEngine(EngineKind.PLAIN), ProcessEngine(EngineKind.PLAIN)]
    left = list(made)
    lanes = LanedEngine(left.pop, 2)
    try:
        with sparse_transfer(tmp_path, 4096) as transfer:
            for each in made:
                each.run(transfer)
            os.kill(made[1].pid, signal.SIGKILL)
            os.waitid(os.P_PID, made[1].pid, os.WEXITED | os.WNOWAIT)
            lanes.forget(transfer.arena_fd)
            maps = Path(f"/proc/{made[0].pid}/maps")
            deadline_s = time.monotonic() + 30
            while "everstep-test-arena" in maps.read_text():
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
    finally:
        lanes.close()


def test_where_no_new_process_can_be_made_the_next_transfer_tries_again(tmp_path: Path) -> None:
    made, may_make = list[ProcessEngine](), [True]

    def make() -> ProcessEngine:
        if not may_make[0]:
            raise BlockingIOError(errno.EAGAIN, "no process can be started")
        made.append(ProcessEngine(EngineKind.PLAIN))
        return made[-1]

    lanes = LanedEngine(make, 1)
    try:
        with sparse_transfer(tmp_path, 4096) as transfer:
            may_make[0] = False
            os.kill(made[0].pid, signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(BlockingIOError, match="no process"):
                    lanes.run(transfer)
            may_make[0] = True
            assert lanes.run(transfer).bytes_moved == 4096
    finally:
        lanes.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_stands_still_is_ended(kind: EngineKind, tmp_path: Path) -> None:
    engine = ProcessEngine(kind, stall_timeout_s=0.3)
    try:
        os.kill(engine.pid, signal.SIGSTOP)
        with sparse_transfer(tmp_path, 4096) as transfer:
            with pytest.raises(StorageError, match=r"no progress for 0\.3 s"):
                engine.run(transfer)
            assert _is_gone(engine.pid)
    finally:
        engine.close()


def test_progress_keeps_a_long_transfer_alive(tmp_path: Path) -> None:
    """Where a busy machine lets it stand still for longer, all of it takes longer, too."""
    assert any(_outlasts(stall_s, tmp_path) for stall_s in (*[0.4] * TRIES, 0.8, 1.6, 3.2))


def _outlasts(stall_timeout_s: float, folder: Path) -> bool:
    """Tell whether a transfer was made that took longer than its process may stand still."""
    engine = ProcessEngine(EngineKind.PLAIN, SLOW, stall_timeout_s=stall_timeout_s)
    try:
        with sparse_transfer(folder, 384 << 20) as transfer:
            outcome = InThread(lambda: engine.run(transfer)).wait(60)
    finally:
        engine.close()
    if isinstance(outcome, StorageError):
        assert "made no progress" in str(outcome)
        return False
    assert isinstance(outcome, TransferDone)
    assert outcome.bytes_moved == 384 << 20
    return outcome.busy_s > stall_timeout_s


def test_the_signals_that_stop_the_daemon_do_not_stop_the_process(tmp_path: Path) -> None:
    engine = ProcessEngine(EngineKind.PLAIN)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(engine.pid, number)
        with sparse_transfer(tmp_path, 4096) as transfer:
            assert engine.run(transfer).bytes_moved == 4096
    finally:
        engine.close()


def test_close_ends_and_reaps_the_process_and_may_be_repeated(tmp_path: Path) -> None:
    engine = ProcessEngine(EngineKind.AIO, end_timeout_s=60)
    engine.close()

    assert _is_gone(engine.pid)
    assert engine._process.returncode == 0  # pyright: ignore[reportPrivateUsage] (by itself, not by a kill)
    engine.close()
    with sparse_transfer(tmp_path, 4096) as transfer, pytest.raises(StorageError, match="was closed"):
        engine.run(transfer)


def test_close_kills_a_process_that_does_not_end() -> None:
    engine = ProcessEngine(EngineKind.AIO, end_timeout_s=0.2)
    os.kill(engine.pid, signal.SIGSTOP)

    engine.close()

    assert _is_gone(engine.pid)


_PARENT = """
import os, signal
from everstep.checkpoint.engine import EngineKind
from everstep.checkpoint.engine_process import ProcessEngine

engine = ProcessEngine(EngineKind.AIO)
print(engine.pid, flush=True)
signal.pause()
"""


def test_the_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(60_000), "the I/O process outlives its parent"
        finally:
            os.close(pidfd)
    finally:
        parent.kill()
        parent.communicate()


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match=r"ended \(exit status 1\)"):
        ProcessEngine(EngineKind.PLAIN)

    monkeypatch.setattr(sys, "executable", "/absent/python")
    with pytest.raises(FileNotFoundError):
        ProcessEngine(EngineKind.PLAIN)


def test_the_process_inherits_nothing_but_its_socket_and_its_pipe() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    engine = ProcessEngine(EngineKind.PLAIN)
    try:
        folder = Path(f"/proc/{engine.pid}/fd")
        targets = {entry.name: str(entry.readlink()) for entry in folder.iterdir() if int(entry.name) > 2}
        assert sorted(target.partition(":")[0] for target in targets.values()) == ["pipe", "socket"]
        assert Path(f"/proc/{engine.pid}/cwd").readlink() == Path("/")
    finally:
        engine.close()
        os.close(reader)
        os.close(writer)
