"""What was acknowledged survives the loss of power, on the file systems that people use, in their own code."""

import contextlib
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from loop_disk import SIZES_MIB, LoopDisk, skip_without
from places import memory_folder
from power_cut import power_cut

from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import opened
from everstep.core.errors import StorageError

pytestmark = pytest.mark.usefixtures("quiet")
CYCLES = 500
CARELESS_WRITER = Path(__file__).with_name("careless_writer.py")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_nothing_acknowledged_is_lost(kind: str, tell: Callable[[str], None]) -> None:
    skip_without(kind)
    found = power_cut(kind, cycles=CYCLES, seed=random.randrange(1 << 32))
    tell(str(found))
    found.check()
    assert found.count == CYCLES


@pytest.mark.root
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_a_writer_that_does_not_sync_is_found(kind: str) -> None:
    skip_without(kind)
    found = power_cut(kind, cycles=60, seed=1, program=CARELESS_WRITER)
    assert found.failures, str(found)


@pytest.mark.root
@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_a_drive_without_power_is_missing_and_the_others_are_opened(kind: str, tmp_path: Path) -> None:
    skip_without(kind)
    with memory_folder() as folder, contextlib.ExitStack() as stack:
        disk = LoopDisk(folder, kind, "drive")
        stack.callback(disk.remove)
        disk.mount()
        directories = [disk.path / "everstep", tmp_path]
        directories[0].mkdir()
        with opened(directories):
            pass
        disk.cut()
        with opened(directories) as (store, _):
            assert [missing.path for missing in store.missing] == [str(directories[0])]
            assert "EIO" in store.missing[0].reason
            assert [device.path for device in store.devices] == [tmp_path]
        disk.unmount()
        disk.mount()
        with opened(directories) as (store, _):
            assert store.may_delete


@pytest.mark.root
@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_no_name_is_durable_on_a_file_system_that_has_shut_down(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of a directory alone does not tell: XFS says that all is well."""
    skip_without(kind)
    real_fsync = os.fsync
    with memory_folder() as folder, contextlib.ExitStack() as stack:
        disk = LoopDisk(folder, kind, "drive")
        stack.callback(disk.remove)
        disk.mount()
        (disk.path / "name").touch()

        def cut_first(fd: int) -> None:
            disk.cut()
            real_fsync(fd)

        monkeypatch.setattr(os, "fsync", cut_first)
        with pytest.raises(StorageError, match="EIO"):
            RealStorage().sync_directory(disk.path)


@pytest.mark.root
@pytest.mark.parametrize("kind", sorted(SIZES_MIB))
def test_a_mount_namespace_made_meanwhile_does_not_keep_what_was_cut(kind: str) -> None:
    """Of the test's own drive: mounted again while a container has it, it would still be without power."""
    skip_without(kind)
    with memory_folder() as folder, contextlib.ExitStack() as stack:
        disk = LoopDisk(folder, kind, "drive")
        stack.callback(disk.remove)
        disk.mount()
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo there; sleep 0.5"]
        container = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert container.stdout is not None
        assert container.stdout.readline() == b"there\n"
        disk.cut()
        disk.unmount()
        disk.mount()
        (disk.path / "name").touch()
