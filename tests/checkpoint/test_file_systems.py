"""Stores on file systems of their own, made for the test on loop devices: ext4 and xfs, whole, unmounted and full."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.checkpoint import linux
from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.engine import EngineKind
from everstep.checkpoint.engine_choice import choose_engine
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import SMALL_LEAVES, State, load, make_state, opened, save
from everstep.core.errors import NoSpaceError, StorageError
from everstep.core.ids import CheckpointId

pytestmark = pytest.mark.root

UID = os.geteuid()
OPS = RealStorage()
FIRST, SECOND, THIRD = CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(1, 3)
LEAVES = (*SMALL_LEAVES, whole_leaf("model.large", "float32", (1500, 1000)))
"""Two 4 MiB blocks and a bit: several transfers of the engine, and an end that is not aligned."""
SIZES_MIB = {"ext4": 128, "xfs": 320}
"""mkfs.xfs makes nothing below 300 MiB."""
_KEPT_S = 60.0


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


class FileSystem:
    """A file system in a sparse file."""

    def __init__(self, folder: Path, kind: str, options: str = "") -> None:
        self.kind, self.options = kind, options
        self.image, self.path = folder / f"{kind}.img", folder / kind
        self.path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(SIZES_MIB[kind] << 20)
        made = run_tool(f"mkfs.{kind}", "-q", self.image)
        assert made.returncode == 0, made.stderr

    def mount(self) -> None:
        options = ",".join(filter(None, ("loop", self.options)))
        done = run_tool("mount", "-t", self.kind, "-o", options, self.image, self.path)
        if done.returncode:
            pytest.skip(f"cannot mount a loop device here: {done.stderr.strip()}")

    def unmount(self) -> None:
        """Unmount it, as soon as nothing of the machine looks at it any more."""
        deadline_s = time.monotonic() + _KEPT_S
        while (done := run_tool("umount", self.path)).returncode:
            assert time.monotonic() < deadline_s, done.stderr
            time.sleep(0.05)

    def remount(self) -> None:
        self.unmount()
        self.mount()

    def remove(self) -> None:
        """Unmount if a test did not get that far, and see that no loop device keeps the file.

        A mount namespace that another test makes meanwhile keeps it for as long as it lives.
        """
        if self.path.is_mount():
            run_tool("umount", "--lazy", self.path)
        deadline_s = time.monotonic() + _KEPT_S
        while kept := run_tool("losetup", "--associated", self.image).stdout:
            assert time.monotonic() < deadline_s, kept
            time.sleep(0.05)

    def fill(self) -> Path:
        """Take every block that this user can have, and return the file that has them."""
        path = self.path / "filler"
        with path.open("wb", buffering=0) as file:
            end = 0
            for step in (1 << 24, 1 << 20, 1 << 16, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        linux.fallocate(file.fileno(), step, offset_bytes=end)
                        end += step
            os.fsync(file.fileno())
        with pytest.raises(NoSpaceError):
            OPS.write_small_new(self.path / "one-more", bytes(1 << 16))
        return path


Maker = Callable[[str, str], FileSystem]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    made: list[FileSystem] = []

    def make_one(kind: str, options: str = "") -> FileSystem:
        tools = (f"mkfs.{kind}", "losetup", "mount", "umount")
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: apt-get install xfsprogs e2fsprogs mount")
        made.append(FileSystem(tmp_path, kind, options))
        made[-1].mount()
        return made[-1]

    yield make_one
    for each in made:
        each.remove()


@pytest.fixture(params=sorted(SIZES_MIB))
def file_system(request: pytest.FixtureRequest, make: Maker) -> FileSystem:
    return make(request.param, "")


def device(file_system: FileSystem) -> Path:
    path = file_system.path / "everstep"
    path.mkdir(exist_ok=True)
    return path


def save_two(path: Path) -> dict[CheckpointId, State]:
    """Commit two checkpoints by kernel AIO."""
    with opened([path]) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        states = {FIRST: make_state(store, 1, LEAVES), SECOND: make_state(store, 2, LEAVES)}
        for checkpoint, state in states.items():
            written = save(run, state, checkpoint, make_engine=AioEngine)
            assert [write.is_direct for write in written.writes] == [True]
            assert all(segment.dio_alignment_bytes for segment in written.manifest.segments)
        run.set_complete_floor(SECOND)
    return states


def test_direct_io_is_asked_of_a_file_there_and_used(file_system: FileSystem) -> None:
    choice = choose_engine(file_system.path)
    assert choice.kind is EngineKind.AIO
    assert choice.alignment is not None
    handle = OPS.open_new_segment(file_system.path / "0.safetensors")
    try:
        assert linux.dio_alignment(handle.fd) == choice.alignment
        assert handle.is_direct
        assert handle.alignment_bytes == max(choice.alignment.memory_bytes, choice.alignment.offset_bytes)
    finally:
        OPS.close(handle)


def test_a_directory_that_cannot_be_asked_is_named(make: Maker) -> None:
    full = make("xfs", "")
    full.fill()  # xfs makes inodes out of free blocks: no file can be made any more
    with pytest.raises(NoSpaceError, match=rf"{full.path} failed.*ENOSPC"):
        choose_engine(full.path)
    with pytest.raises(StorageError, match=r"/absent failed.*ENOENT"):
        choose_engine(full.path / "absent")


def test_where_files_are_journalled_nothing_is_direct_and_all_works(make: Maker) -> None:
    path = device(make("ext4", "data=journal"))
    choice = choose_engine(path)
    assert (choice.kind, choice.alignment) == (EngineKind.PLAIN, None)
    with opened([path]) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, 1, LEAVES)
        written = save(run, state, FIRST, make_engine=choice.factory)
        assert [write.is_direct for write in written.writes] == [False]
        assert load(run, written.manifest, make_engine=choice.factory) == state.content


def test_what_kernel_aio_committed_is_there_after_an_unmount(file_system: FileSystem) -> None:
    path = device(file_system)
    states = save_two(path)
    file_system.remount()
    with opened([path]) as (store, report):
        run = store.run(UID, "demo")
        assert report.problems == []
        assert [info.state for info in run.checkpoints()] == [CheckpointState.COMPLETE] * 2
        for checkpoint, state in states.items():
            assert load(run, run.manifest(checkpoint, 0), make_engine=AioEngine) == state.content


def test_a_rename_never_replaces(file_system: FileSystem) -> None:
    first, second, target = (file_system.path / name for name in ("first", "second", "target"))
    first.write_text("first")
    second.write_text("second")
    linux.rename_noreplace(
        -100, str(first), -100, str(target)
    )  # the kernel's own, not the fallback by a link
    with pytest.raises(FileExistsError):
        linux.rename_noreplace(-100, str(second), -100, str(target))
    assert not OPS.rename_noreplace(second, target)
    assert (target.read_text(), second.read_text()) == ("first", "second")


def test_a_reservation_beyond_the_free_space_is_refused_by_the_kernel(file_system: FileSystem) -> None:
    path = file_system.path / "0.safetensors"
    handle = OPS.open_new_segment(path)
    with pytest.raises(NoSpaceError, match="ENOSPC"):
        OPS.reserve(handle, SIZES_MIB[file_system.kind] << 20)
    OPS.close(handle)
    path.unlink()
    file_system.fill().unlink()  # ext4 keeps what it could reserve: only with the file is the space free again


def test_what_a_file_has_is_reserved_for_it_on_a_full_file_system(file_system: FileSystem) -> None:
    """For one that is written over. XFS refuses a range for which there is no free space, though it is allocated."""
    size_bytes = 8 << 20
    handle = OPS.open_new_segment(file_system.path / "0.safetensors")
    OPS.reserve(handle, size_bytes)
    file_system.fill()
    OPS.reserve(handle, size_bytes)
    OPS.reserve(handle, size_bytes // 2)
    with pytest.raises(NoSpaceError, match="ENOSPC"):
        OPS.reserve(handle, 2 * size_bytes)
    OPS.close(handle)


def test_a_full_file_system_refuses_the_next_and_keeps_and_offers_the_older(file_system: FileSystem) -> None:
    path = device(file_system)
    states = save_two(path)
    filler = file_system.fill()
    file_system.remount()
    for _ in range(2):
        with opened([path]) as (store, report):
            run = store.run(UID, "demo")
            assert report.problems == []
            assert run.offered() == [SECOND, FIRST]
            for checkpoint, state in states.items():
                assert load(run, run.manifest(checkpoint, 0), make_engine=AioEngine) == state.content
            with pytest.raises(NoSpaceError, match=r"room for 0 bytes, \d+ are needed"):
                save(run, make_state(store, 3, LEAVES), THIRD, make_engine=AioEngine)
    with opened([path]) as (store, _):
        filler.unlink()
        run = store.run(UID, "demo")
        save(run, make_state(store, 3, LEAVES), THIRD, make_engine=AioEngine)
        assert run.offered() == [THIRD, SECOND, FIRST]


@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_a_manifest_that_only_a_full_device_has_keeps_the_data_on_the_others(
    make: Maker, tmp_path: Path, kind: str
) -> None:
    full, other = make(kind, ""), tmp_path / "other"
    other.mkdir()
    paths = [device(full), other]
    with opened(paths) as (store, _):
        run = store.run(UID, "demo", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, 1, LEAVES)
        save(run, state, FIRST)
    (copy,) = other.glob("runs/*/*/commits/*.mf")
    copy.unlink()
    full.fill()
    with opened(paths) as (store, report):
        run = store.run(UID, "demo")
        assert (report.orphan_count, report.copy_count, report.problems) == (0, 1, [])
        assert run.offered() == [FIRST]
        assert load(run, run.manifest(FIRST, 0)) == state.content
    assert copy.exists()
