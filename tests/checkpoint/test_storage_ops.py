import contextlib
import errno
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from loop_disk import LoopDisk, skip_without

from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import FileKind, storage_error
from everstep.checkpoint.testing import memory_arena
from everstep.core.errors import CorruptDataError, DeviceMissingError, NoSpaceError, StorageError

OPS = RealStorage()
UID = os.geteuid()


@pytest.fixture
def engine() -> Generator[PlainEngine]:
    made = PlainEngine()
    yield made
    made.close()


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Path]:
    """A directory on a file system with direct I/O, and one without."""
    if request.param == "disk":
        yield tmp_path
        return
    made = Path("/dev/shm") / f"everstep-{os.getpid()}-{random.randrange(10**9)}"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-r", made], check=True)


@pytest.mark.parametrize("size", [1, 511, 512, 4096, 12_345])
def test_a_segment_reads_back_with_its_exact_size(folder: Path, engine: PlainEngine, size: int) -> None:
    content = random.Random(size).randbytes(size)
    path = folder / "0.safetensors"
    with memory_arena(20480, slot_offset_bytes=4096) as arena:
        arena.view(4096, size)[:] = content
        handle = OPS.open_new_segment(path)
        OPS.reserve(handle, size)
        assert OPS.write_segment(handle, arena, 4096, size, engine) >= 0
        OPS.truncate(handle, size)
        OPS.sync_data(handle)
        OPS.close(handle)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == 0o600
        arena.view(0, 20480)[:] = bytes(20480)
        handle = OPS.open_segment_for_read(path)
        OPS.read_segment(handle, arena, 0, size, engine)
        assert bytes(arena.view(0, size)) == content
        with pytest.raises(CorruptDataError, match="too short"):
            OPS.read_segment(handle, arena, 0, 16384, engine)
        OPS.close(handle)
        engine.forget(arena.fd)


def test_direct_io_is_asked_of_the_file(tmp_path: Path) -> None:
    handle = OPS.open_new_segment(tmp_path / "a")
    is_direct = bool(os.get_inheritable(handle.fd) is False and _flags(handle.fd) & os.O_DIRECT)
    assert handle.is_direct == is_direct
    assert (handle.alignment_bytes > 0) == handle.is_direct
    OPS.close(handle)
    shm = Path(f"/dev/shm/everstep-{os.getpid()}-direct")
    handle = OPS.open_new_segment(shm)
    OPS.close(handle)
    shm.unlink()
    assert (handle.is_direct, handle.alignment_bytes) == (False, 0)


def _flags(fd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("flags")), 8)


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("old", "link"):
        with pytest.raises(StorageError, match="EEXIST"):
            OPS.open_new_segment(tmp_path / name)
        with pytest.raises(StorageError, match="EEXIST"):
            OPS.write_small_new(tmp_path / name, b"new")
    OPS.write_small_new(tmp_path / "new", b"new")
    assert not OPS.rename_noreplace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "old"
    assert OPS.rename_noreplace(tmp_path / "new", tmp_path / "newer")
    OPS.replace(tmp_path / "newer", tmp_path / "old")
    assert OPS.list_directory(tmp_path) == ("link", "old")


def test_directories_are_private_and_made_once(tmp_path: Path) -> None:
    assert OPS.make_directory(tmp_path / "d")
    assert not OPS.make_directory(tmp_path / "d")
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("d")
    for name in ("file", "link", "no/d"):
        with pytest.raises(StorageError):
            OPS.make_directory(tmp_path / name)
    OPS.sync_directory(tmp_path / "d")
    assert OPS.remove_directory(tmp_path / "d")
    assert not OPS.remove_directory(tmp_path / "d")
    assert OPS.unlink(tmp_path / "file")
    assert not OPS.unlink(tmp_path / "file")


def test_small_files_are_read_only_when_plain(tmp_path: Path) -> None:
    path = tmp_path / "small"
    assert OPS.read_small(path, 10, owner_uid=UID) is None
    path.write_bytes(b"0123456789")
    assert OPS.read_small(path, 10, owner_uid=UID) == b"0123456789"
    assert OPS.read_head(path, 4) == b"0123"
    with pytest.raises(CorruptDataError, match="more than 9"):
        OPS.read_small(path, 9, owner_uid=UID)
    with pytest.raises(CorruptDataError, match="belongs to uid"):
        OPS.read_small(path, 10, owner_uid=UID + 1)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CorruptDataError, match="symbolic link"):
        OPS.read_small(tmp_path / "link", 10, owner_uid=UID)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CorruptDataError, match="no regular file"):
        OPS.read_small(tmp_path / "fifo", 10, owner_uid=UID)
    with pytest.raises(CorruptDataError, match="no regular file"):
        OPS.read_small(tmp_path, 10, owner_uid=UID)


def test_stat_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("f")
    kinds = [OPS.stat(tmp_path / name) for name in ("f", "link", ".", "none")]
    assert [found.kind if found else None for found in kinds] == [
        FileKind.REGULAR,
        FileKind.OTHER,
        FileKind.DIRECTORY,
        None,
    ]
    assert kinds[0] is not None
    assert (kinds[0].size_bytes, kinds[0].owner_uid) == (3, UID)


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = OPS.try_lock(path, b"a much longer first holder")
    assert first is not None
    assert OPS.try_lock(path, b"second") is None
    assert path.read_bytes() == b"a much longer first holder"
    first.release()
    first.release()
    second = OPS.try_lock(path, b"second")
    assert second is not None
    assert path.read_bytes() == b"second"
    second.release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from everstep.checkpoint.real_storage import RealStorage\n"
        "lock = RealStorage().try_lock(Path(sys.argv[1]), b'child'); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert OPS.try_lock(tmp_path / "lock", b"me") is None
        child.kill()
        child.wait()
    lock = OPS.try_lock(tmp_path / "lock", b"me")
    assert lock is not None
    lock.release()


@pytest.mark.parametrize(
    "call",
    [
        OPS.list_directory,
        OPS.sync_directory,
        OPS.free_bytes,
        lambda path: OPS.read_head(path, 1),
        OPS.open_segment_for_read,
        lambda path: OPS.open_new_segment(path / "x"),
        lambda path: OPS.write_small_new(path / "x", b""),
        lambda path: OPS.rename_noreplace(path, path),
        lambda path: OPS.replace(path, path),
        lambda path: OPS.try_lock(path / "lock", b""),
    ],
)
def test_what_is_absent_is_an_error_that_names_it(call: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/absent.*ENOENT"):
        call(tmp_path / "absent")


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOSPC, NoSpaceError, "free space"),
        (errno.EDQUOT, NoSpaceError, "free space"),
        (errno.ENODEV, DeviceMissingError, "went away"),
        (errno.EIO, StorageError, "SMART"),
        (errno.EROFS, StorageError, "read-only"),
        (errno.EACCES, StorageError, "belong to the user"),
        (errno.ENOENT, StorageError, "a directory on a drive that you may write to"),
        (errno.EBADF, StorageError, "dmesg"),
    ],
)
def test_each_errno_gets_the_class_that_says_what_to_do(
    number: int, kind: type[StorageError], hint: str
) -> None:
    found = storage_error(OSError(number, os.strerror(number)), Path("/nvme0/x"), "writing")
    assert type(found) is kind
    assert "/nvme0/x" in str(found)
    assert errno.errorcode[number] in str(found)
    assert hint in found.hint


def test_a_full_disk_is_no_space() -> None:
    """The kernel's own ENOSPC. A tmpfs refuses more than its size at once; a disk would be filled first."""
    folder = Path("/dev/shm")
    total = os.statvfs(folder)
    path = folder / f"everstep-{os.getpid()}-huge"
    handle = OPS.open_new_segment(path)
    try:
        with pytest.raises(NoSpaceError, match="ENOSPC"):
            OPS.reserve(handle, (total.f_blocks + 1) * total.f_frsize)
    finally:
        OPS.close(handle)
        path.unlink()


@pytest.mark.root
def test_a_disk_without_inodes_is_no_space_and_says_so(tmp_path: Path) -> None:
    skip_without("ext4")
    disk = LoopDisk(tmp_path, "ext4", "disk")
    try:
        disk.mount()
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (disk.path / str(number)).touch()
        with pytest.raises(NoSpaceError) as caught:
            RealStorage().write_small_new(disk.path / "new", b"x")
        assert "no inode is free" in caught.value.hint
    finally:
        disk.remove()


def test_ranges_outside_a_slot_are_refused() -> None:
    with memory_arena(8192, slot_offset_bytes=4096) as arena:
        assert arena.offset_in_arena(4096, 4096) == 8192
        for offset, length in [(0, 8193), (-1, 1), (8192, 1), (0, -1)]:
            with pytest.raises(ValueError, match="not in a slot"):
                arena.view(offset, length)
