"""`everstep top`: in a terminal, in a pipe, and on every way out."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from cached import Blocks, HostileReader
from watched_drives import AS_FAST_AS_IT_IS, Drives, watched_daemon

from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.top_plan import Key, keys
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon
from everstep.dataloader import CachedDataset
from everstep.proto import frames

EVERSTEP = Path(sys.executable).with_name("everstep")
DEADLINE_S = 60.0
ESCAPES = re.compile(rb"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")
ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A terminal with `everstep top` in it."""

    def __init__(self, arguments: list[str], *, columns: int = 80, rows: int = 30) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.ours)
        environment: Mapping[str, str] = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [EVERSTEP, "top", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.said = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, data: bytes) -> None:
        os.write(self.ours, data)

    def wait(self, words: str, *, after: int = 0) -> int:
        """Read until the words were drawn; return where the text ends now."""
        return self._wait(re.escape(words), after)

    def wait_row(self, *cells: str, after: int = 0) -> int:
        """Read until a row with these cells was drawn, each of them matched whole; return where the text ends now."""
        return self._wait(r"(?m)^\s*" + r"\s{2,}".join(cells) + r"\s*$", after)

    def _wait(self, pattern: str, after: int) -> int:
        until_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.text(after)):
            ready, _, _ = select.select([self.ours], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, f"{pattern!r} was never drawn:\n{self.text(after)}"
            assert self._read(), f"it ended before {pattern!r}:\n{self.text(after)}"
        return len(self.said)

    def _read(self) -> bool:
        try:
            data = os.read(self.ours, 65536)
        except OSError:  # the other side has closed it
            return False
        self.said += data
        return bool(data)

    def text(self, after: int = 0) -> str:
        lines = re.sub(rb"\x1b\[[0-9;]*H", b"\n", self.said[after:])
        return ESCAPES.sub(b"", lines).decode(errors="replace")

    def ended(self) -> int:
        """Return the exit code, everything that was said read."""
        while select.select([self.ours], [], [], 0 if self.process.poll() is not None else DEADLINE_S)[0]:
            if not self._read():
                break
        return self.process.wait(DEADLINE_S)

    @property
    def is_as_it_was(self) -> bool:
        return termios.tcgetattr(self.ours)[:4] == self.before[:4]


@contextmanager
def terminal(*arguments: str, columns: int = 80) -> Generator[Terminal]:
    made = Terminal([*arguments], columns=columns)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.process.wait(DEADLINE_S)
        os.close(made.ours)


@contextmanager
def training(
    socket_path: Path, *names: str, reason: str = "bound by the budget", paused_until_unix_s: float = 0.0
) -> Generator[None]:
    """Runs of these names, each with a checkpoint."""
    trainers: list[FakeTrainer] = []
    try:
        for name in names:
            trainer = FakeTrainer(socket_path)
            trainers.append(trainer)
            trainer.open_run([Path("nvme0"), Path("nvme1")], name=name)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 4217), seed=1)
            trainer.event(frames.Persisted)
            arena.close()
            trainer.send(
                frames.Costs(
                    train_s=100.0, boundary_s=1.0, eager_s=0.0, wait_s=0.0, guard_s=1.0, slower_s=0.0, skipped={},
                    interval_steps=250, reason=reason, goal_missed="", steps=2500, data_s=12.0,
                    paused_until_unix_s=paused_until_unix_s,
                )
            )  # fmt: skip
        yield
    finally:
        for trainer in trainers:
            trainer.close()


def test_keys_are_told_from_what_means_nothing() -> None:
    assert [*keys(b"xj\x1b[Bk\x1b[A\t\x1b[Z\x1b[99~q")] == [
        Key.DOWN, Key.DOWN, Key.UP, Key.UP, Key.DOWN, Key.UP, Key.QUIT,
    ]  # fmt: skip


def test_a_terminal_shows_it_live_and_is_as_it_was_after(node_config: Path, socket_path: Path) -> None:
    """Runs, devices, keys, a new size, a daemon that ends and comes back; then `q`."""
    with node_daemon(node_config, socket_path), training(socket_path, "gpt", "vit"), terminal() as top:
        top.wait("> gpt")
        at = top.wait("25")  # steps per second
        assert all(len(line) <= 80 for line in top.text().replace("\r", "\n").split("\n"))
        for words in ("1/1 ranks", "4,217", "2.0 %", "12 %", "250", "nvme0", "idle", "all is well"):
            assert words in top.text(), words
        assert not top.is_as_it_was
        top.press(b"\x1b[B")
        at = top.wait("> vit", after=at)
        top.press(b"\t")
        at = top.wait("> gpt", after=at)
        top.resize(132, 40)
        os.kill(top.process.pid, signal.SIGWINCH)
        at = top.wait("nvme1", after=at)
    # both daemon and trainers are gone, and the terminal with them: the next one lives through a restart
    with terminal() as top:
        at = top.wait("no daemon answers")
        with node_daemon(node_config, socket_path):
            at = top.wait("no run has attached", after=at)
        at = top.wait("no answer for", after=at)
        with node_daemon(node_config, socket_path):
            at = top.wait("all is well", after=at)
            top.press(b"q")
            assert top.ended() == 0
        assert top.is_as_it_was
        assert ALTERNATE_ON in top.said
        assert top.said.rindex(ALTERNATE_OFF) > top.said.rindex(ALTERNATE_ON)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_ends_it_with_the_terminal_as_it_was(number: signal.Signals, code: int) -> None:
    with terminal() as top:
        top.wait("no daemon answers")
        top.process.send_signal(number)
        assert top.ended() == code
        assert top.is_as_it_was
        assert top.said.rindex(ALTERNATE_OFF) > top.said.rindex(ALTERNATE_ON)


def test_a_stop_gives_the_terminal_back_until_it_goes_on() -> None:
    with terminal() as top:
        at = top.wait("no daemon answers")
        top.process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(top.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert top.is_as_it_was
        top.process.send_signal(signal.SIGCONT)
        top.wait("no daemon answers", after=at)
        assert not top.is_as_it_was
        top.press(b"q")
        assert top.ended() == 0
        assert top.is_as_it_was


def test_each_drive_has_its_own_queue(
    node_config: Path, socket_path: Path, devices: list[Path], tmp_path: Path
) -> None:
    """Of two drives that stand still, the one that a run writes to has a queue until it goes on."""
    drives = Drives(tmp_path / "drives", devices, 0)
    size = r"[\d.]+ [KMGT]iB"
    with watched_daemon(drives, node_config, socket_path), terminal(columns=100) as top:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0")], name="gpt")
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout((whole_leaf("weight", "uint8", (3 << 20,)),)))
            arena.save(CheckpointId(1, 1), seed=1)
            at = top.wait_row("nvme0", "ok", "-", r"3\.0 MiB", size, size)
            top.wait_row("nvme1", "ok", "-", "idle", size, size)
            drives.hold(devices[0].name, AS_FAST_AS_IT_IS)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            top.wait_row("nvme0", "ok", ".*", "idle", size, size, after=at)
            arena.close()
        top.press(b"q")
        assert top.ended() == 0


def test_what_a_cache_holds_and_how_often_it_is_hit(
    node_config: Path, socket_path: Path, tmp_path: Path
) -> None:
    """Ten samples, read once from their source and three times from memory; another cache with two of ten samples."""
    source = Blocks([1000] * 10, tmp_path / "reads", name="photographs")
    with node_daemon(node_config, socket_path), terminal(columns=100) as top:
        dataset = CachedDataset[bytes](source, budget="1MB")
        top.wait_row("CACHE", "READERS", "HITS", "READS", "SAMPLES", "MEMORY")
        for _ in range(4):
            assert [dataset[index] for index in range(10)] == [*map(source.content, range(10))]
            assert dataset.flush()
        assert sorted(source.reads()) == [*range(10)]
        top.wait_row("1 photograph", "1", "75 %", "40", "100 %", r"[\d.]+ KiB")
        dataset.close()
        top.wait_row("1 photograph", "0", "75 %", "40", "100 %", r"[\d.]+ KiB")
        with HostileReader(socket_path) as reader:
            reader.open_cache(10, fingerprint="sounds")
            reader.stage()
            reader.fill({0: b"a" * 1000, 7: b"b" * 3000})
            top.wait_row("2 sounds", "1", "-", "0", "20 %", r"[\d.]+ KiB")
        top.press(b"q")
        assert top.ended() == 0


def test_a_pipe_and_programs_get_it_once(node_config: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path), training(socket_path, "gpt"):
        told = subprocess.run(
            [EVERSTEP, "top"], capture_output=True, text=True, check=True, timeout=DEADLINE_S
        )
        document = json.loads(subprocess.check_output([EVERSTEP, "top", "--json"], timeout=DEADLINE_S))
        with terminal("--once") as top:
            assert top.ended() == 0
            assert "gpt" in top.text()
            assert ALTERNATE_ON not in top.said
    assert "\x1b" not in told.stdout
    assert "gpt" in told.stdout
    assert "> gpt" not in told.stdout
    run = document["runs"][0]
    assert (run["run"]["name"], run["steps_per_s"], run["stall_share"]) == ("gpt", 25.0, 0.02)
    assert [device["queued_bytes"] for device in document["devices"]] == [0, 0]


def test_a_paused_run_has_no_interval(node_config: Path, socket_path: Path) -> None:
    paused = training(socket_path, "gpt", reason="paused until noon, as asked", paused_until_unix_s=4e9)
    with node_daemon(node_config, socket_path), paused, terminal() as top:
        top.wait_row("> gpt", ".*", "paused")
        top.wait("no checkpoint: paused until noon, as asked")
        assert "every 250" not in top.text()
        top.press(b"q")
        assert top.ended() == 0


def test_drives_without_names_are_told_apart_by_the_end_of_their_paths(
    socket_path: Path, tmp_path: Path
) -> None:
    """A private daemon's have none, and the column has room for 22 characters."""
    drives = [tmp_path / "a_long_way_to_the_drives" / name for name in ("nvme0", "nvme1")]
    for drive in drives:
        drive.mkdir(parents=True, mode=0o700)
    with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run(drives)
        told = subprocess.run(
            [EVERSTEP, "top", "--once"], capture_output=True, text=True, check=True, timeout=DEADLINE_S
        )
    shown = [line.split()[0] for line in told.stdout.splitlines() if "drives/nvme" in line]
    assert shown == [f"…{str(drive)[-21:]}" for drive in drives]


def test_no_daemon_is_said(socket_path: Path) -> None:
    told = subprocess.run(
        [EVERSTEP, "top", "--once"], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert told.returncode == 3
    assert str(socket_path) in told.stderr
