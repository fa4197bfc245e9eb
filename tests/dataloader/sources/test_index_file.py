"""Building an index: once for all processes that ask, whole or not at all, whoever is killed."""

import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from everstep.core.errors import StorageError, UsageError
from everstep.dataloader.sources import index_file
from everstep.dataloader.sources.index_file import index_path, open_or_build, settled
from everstep.dataloader.sources.index_format import NEVER_CURRENT, Buffer, Index, encode_index
from everstep.dataloader.sources.mapping import map_file

FORK = multiprocessing.get_context("fork")


def pieces(content: bytes = b"content") -> list[Buffer]:
    return encode_index("test", 1, [content], [])


def never(_: Index) -> bool:
    return False


def always(_: Index) -> bool:
    return True


def test_processes_that_ask_together_build_once(tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"x")
    go = FORK.Semaphore(0)

    def build() -> Sequence[Buffer]:
        with (tmp_path / "built").open("ab") as file:
            file.write(b"1")
        return pieces()

    def ask(_: int) -> None:
        go.acquire()
        handle = open_or_build(str(target), "test", str(data), never, build)
        assert handle.get().piece(1, 0, 7) == b"content"

    children = [FORK.Process(target=ask, args=(number,)) for number in range(4)]
    for child in children:
        child.start()
    with data.open("rb") as held:  # all four have looked for an index before the first may build one
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in children:
            go.release()
        waiting = 0
        while waiting < 4:
            waiting = sum(_holds_open(child.pid, data) for child in children)
            time.sleep(0.01)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert (tmp_path / "built").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "data", "index"]


def _holds_open(pid: int | None, path: Path) -> bool:
    names = list(Path(f"/proc/{pid}/fd").iterdir())
    return any(os.path.realpath(name) == str(path) for name in names)


def test_a_child_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"x")
    ended = FORK.Event()
    children = [FORK.Process(target=ended.wait)]

    def build() -> Sequence[Buffer]:
        children[0].start()
        return pieces()

    open_or_build(str(tmp_path / "index"), "test", str(data), always, build)
    with data.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ended.set()
    children[0].join()


def test_who_dies_while_building_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"x")

    def die() -> Sequence[Buffer]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    child = FORK.Process(target=open_or_build, args=(str(target), "test", str(data), always, die))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob("index.*.tmp"))) == 1
    open_or_build(str(target), "test", str(data), always, pieces)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "index"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")

    def fail() -> Sequence[Buffer]:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        open_or_build(str(tmp_path / "index"), "test", str(tmp_path / "data"), always, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")

    def ask() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(StorageError, match=r"the index .* could not be written: .*name a directory"):
            open_or_build(str(tmp_path / "index"), "test", str(tmp_path / "data"), always, pieces)

    child = FORK.Process(target=ask)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_builder_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_file, "BUILD_WAIT_S", 0.0)
    (tmp_path / "data").write_bytes(b"x")
    other = tmp_path / "index.other.tmp"
    other.write_bytes(b"the other's work")
    with (tmp_path / "data").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_or_build(str(tmp_path / "index"), "test", str(tmp_path / "data"), always, pieces)
    assert "index_lock_late" in caplog.text
    assert other.exists()


def test_an_old_mapping_outlives_a_newer_index(tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"x")
    old = open_or_build(str(target), "test", str(data), always, pieces)
    new = open_or_build(str(target), "test", str(data), never, lambda: pieces(b"another"))
    assert old.get().piece(1, 0, 7) == b"content"
    assert new.get().piece(1, 0, 7) == b"another"


def test_a_mapping_keeps_no_descriptor_and_is_unmapped(tmp_path: Path) -> None:
    path = tmp_path / "mapped-file"
    path.write_bytes(b"x" * 5000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    view = map_file(str(path))
    part = view[10:20]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert str(path) in Path("/proc/self/maps").read_text()
    assert view.readonly
    assert len(view) == 5000
    del view
    assert part == b"x" * 10
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()
    path.write_bytes(b"")
    assert map_file(str(path)) == b""


def test_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one/data.tar", tmp_path / "two/data.tar"
    assert index_path(str(one), None) == f"{one}.everstep-index"
    assert index_path(str(tmp_path), None, inside=True) == f"{tmp_path}/.everstep-index"
    assert index_path(str(one), "/c") != index_path(str(two), "/c")
    assert index_path(str(one), "/c").startswith("/c/data.tar-")


def test_builders_without_locks_remove_each_others_files_and_both_end_well(tmp_path: Path) -> None:
    """As on a network file system where a lock holds on one node only: each believes to be alone."""
    data, target = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"x")

    def removed() -> Sequence[Buffer]:
        (unfinished,) = tmp_path.glob("index.*.tmp")
        unfinished.unlink()
        return pieces()

    handle = open_or_build(str(target), "test", str(data), always, removed)
    assert handle.get().piece(1, 0, 7) == b"content"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "index"]


def test_an_index_that_contradicts_itself_is_built_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, target = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"x")
    target.write_bytes(b"".join(pieces(b"wrong")))

    def check(index: Index) -> bool:
        index.check_lengths([7])
        return True

    handle = open_or_build(str(target), "test", str(data), check, pieces)
    assert handle.get().piece(1, 0, 7) == b"content"
    assert "index_damaged" in caplog.text


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [Path.mkdir, _fifo])
def test_what_is_no_file_in_the_place_of_an_index_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A FIFO must not hang, a folder must not be mapped."""
    data, target = tmp_path / "data", tmp_path / "index"
    data.write_bytes(b"x")
    make(target)
    with pytest.raises(UsageError, match=r"index cannot be read: not a regular file.*name a directory"):
        open_or_build(str(target), "test", str(data), always, pieces)


def test_places_that_cannot_be(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"x")
    with pytest.raises(UsageError, match=r"no index can be written to .*data"):
        open_or_build(str(data / "index"), "test", str(data), always, pieces)
    with pytest.raises(UsageError, match="gone cannot be read: No such file"):
        open_or_build(str(tmp_path / "index"), "test", str(tmp_path / "gone"), always, pieces)


def test_what_the_data_fails_with_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"x")
    for number, kind in ((errno.EIO, StorageError), (errno.EACCES, UsageError)):

        def fail(number: int = number) -> Sequence[Buffer]:
            raise OSError(number, os.strerror(number), str(tmp_path / "below"))

        with pytest.raises(kind, match=f"below could not be read for the index .*: {os.strerror(number)}"):
            open_or_build(str(tmp_path / "index"), "test", str(data), always, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_times_that_may_come_again_are_not_trusted() -> None:
    """Of a file changed just now, or by a clock somewhat ahead; a time of next year does not come again soon."""
    now_s = 1_700_000_000
    trusted = {ago_s: settled((now_s - ago_s) * 10**9, now_s) for ago_s in (3600, 3, 1, 0, -60, -864_000)}
    assert trusted == {
        3600: now_s - 3600, 3: now_s - 3, 1: NEVER_CURRENT, 0: NEVER_CURRENT, -60: NEVER_CURRENT,
        -864_000: now_s + 864_000,
    }  # fmt: skip


def test_names_as_long_as_a_file_system_takes(tmp_path: Path) -> None:
    names = ["é" * 120 + end for end in ("-1.jsonl", "-2.jsonl")]
    found: set[str] = set()
    for name in names:
        data = tmp_path / name
        data.write_bytes(b"x")
        for directory in (None, str(tmp_path / "indices")):
            path = index_path(str(data), directory)
            assert open_or_build(path, "test", str(data), always, pieces).get().count == 1
            found.add(path)
    assert len(found) == 4
