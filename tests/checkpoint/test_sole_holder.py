"""What is moved out of its readers' reach to be written over: only what nobody else has."""

import fcntl
import mmap
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.checkpoint import linux
from everstep.checkpoint.real_storage import RealStorage

OPS = RealStorage()
CONTENT = b"x" * 10_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool" / "waiting"


def test_a_file_that_nobody_has_is_moved_and_opened_again(source: Path, target: Path) -> None:
    assert OPS.recycle(source, target) == len(CONTENT)
    assert not source.exists()
    assert target.read_bytes() == CONTENT
    handle = OPS.open_recycled(target, source)
    assert handle is not None
    try:
        assert handle.path == source
        assert handle.is_direct == (handle.alignment_bytes > 0)
        assert os.fstat(handle.fd).st_size == len(CONTENT)
        assert fcntl.fcntl(handle.fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK
        assert not fcntl.fcntl(handle.fd, fcntl.F_GETFL) & os.O_NONBLOCK  # io_uring would not wait
    finally:
        OPS.close(handle)
    assert source.read_bytes() == CONTENT
    assert not target.exists()


def open_for_reading(path: Path) -> Callable[[], None]:
    fd = os.open(path, os.O_RDONLY)
    return lambda: os.close(fd)


def open_for_writing(path: Path) -> Callable[[], None]:
    fd = os.open(path, os.O_RDWR)
    return lambda: os.close(fd)


def mapped_only(path: Path) -> Callable[[], None]:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ).close


def linked(path: Path) -> Callable[[], None]:
    other = path.with_name("other")
    other.hardlink_to(path)
    return other.unlink


@pytest.mark.parametrize("hold", [open_for_reading, open_for_writing, mapped_only, linked])
def test_what_somebody_has_is_not_touched(
    hold: Callable[[Path], Callable[[], None]], source: Path, target: Path
) -> None:
    let_go = hold(source)
    assert OPS.recycle(source, target) is None
    assert OPS.open_recycled(source, target) is None
    let_go()
    assert source.read_bytes() == CONTENT
    assert not target.exists()
    assert OPS.recycle(source, target) == len(CONTENT)


def test_what_is_no_file_of_ours_is_not_touched(source: Path, target: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "folder").mkdir()
    for path in (link, fifo, tmp_path / "folder", tmp_path / "absent"):
        assert OPS.recycle(path, target) is None
    assert not target.exists()
    target.write_bytes(b"already")
    assert OPS.recycle(source, target) is None
    assert OPS.open_recycled(source, target) is None
    assert (source.read_bytes(), target.read_bytes()) == (CONTENT, b"already")


@pytest.mark.root
def test_what_is_another_users_is_not_touched(source: Path, target: Path) -> None:
    os.chown(source, 65534, 65534)
    assert OPS.recycle(source, target) is None
    assert source.exists()


def test_a_link_made_at_the_last_moment_keeps_the_content(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = linux.rename_noreplace

    def link_first(*arguments: int | str) -> None:
        (tmp_path / "other").hardlink_to(source)
        real(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(linux, "rename_noreplace", link_first)
    assert OPS.recycle(source, target) is None
    assert not target.exists()
    assert (tmp_path / "other").read_bytes() == CONTENT


def test_a_file_system_without_leases_is_written_anew(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS answers."""
    real = fcntl.fcntl

    def no_leases(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(22, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", no_leases)
    assert OPS.recycle(source, target) is None
    assert source.read_bytes() == CONTENT


def test_whoever_opens_it_meanwhile_waits_and_no_signal_ends_the_daemon(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells the holder of a lease by SIGIO, which ends a process, unless it was asked for another signal."""
    real = linux.rename_noreplace
    readers: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def while_somebody_opens_it(*arguments: int | str) -> None:
        readers.append(subprocess.Popen(["cat", source], stdout=subprocess.PIPE))
        # The kernel marks the lease as soon as the open waits for it.
        while not any(
            "BREAKING" in line and f":{source.stat().st_ino} " in line
            for line in Path("/proc/locks").read_text().splitlines()
        ):
            assert readers[0].poll() is None
        real(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(linux, "rename_noreplace", while_somebody_opens_it)
    before = signal.signal(signal.SIGIO, lambda number, _: signals.append(number))
    try:
        assert OPS.recycle(source, target) == len(CONTENT)
    finally:
        signal.signal(signal.SIGIO, before)
    assert signals == []
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL  # to ignore it
    assert readers[0].communicate()[0] == CONTENT
