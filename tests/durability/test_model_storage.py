"""The disks in memory do what the file system does."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from lanes import in_lanes
from model_storage import MOUNT, Fault, ModelStorage, Recorder

from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.storage_ops import StorageOps
from everstep.checkpoint.testing import SMALL_LEAVES, make_state, opened, save
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId


def tree_of(path: Path) -> dict[str, bytes | None]:
    return {
        str(found.relative_to(path)): found.read_bytes() if found.is_file() else None
        for found in path.rglob("*")
    }


def train(directories: Sequence[Path], ops: StorageOps, recorder: Recorder, *, recycles: bool) -> None:
    """Some checkpoints, a restart, a collection, and one more checkpoint."""
    with in_lanes(recorder, seed=3):
        with opened(directories, ops=ops) as (store, _):
            run = store.run(os.geteuid(), "same", create=True)
            run.begin_attempt(1, fresh=False)
            for step in (1, 2, 3):
                save(run, make_state(store, seed=step, leaves=SMALL_LEAVES), CheckpointId(1, step))
                run.set_complete_floor(CheckpointId(1, step))
        with opened(directories, ops=ops, recycles=recycles) as (store, _):
            run = store.run(os.geteuid(), "same")
            collected = collect_garbage(run, keep=Keep(last=1))
            assert collected.removed == (CheckpointId(1, 1),)
            saved = save(run, make_state(store, seed=4, leaves=SMALL_LEAVES), CheckpointId(1, 4))
            assert all(write.recycled_bytes == recycles * write.size_bytes for write in saved.writes)


@pytest.mark.parametrize("recycles", [False, True])
def test_the_same_calls_leave_the_same_files(tmp_path: Path, recycles: bool) -> None:
    model = ModelStorage(2)
    train(model.directories, model, model.recorder, recycles=recycles)
    directories = [tmp_path / "0", tmp_path / "1"]
    for path in directories:
        path.mkdir()
    train(directories, RealStorage(), Recorder(), recycles=recycles)
    for index, path in enumerate(directories):
        real, found = tree_of(path), dict(model.files_below(index))
        assert real.keys() == found.keys()
        for name, content in real.items():
            if not name.endswith((".mf", "disk.id", "lock")):  # these hold times, paths and process ids
                assert found[name] == content, name


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, path: ops.list_directory(path / "absent"),
        lambda ops, path: ops.write_small_new(path / "absent" / "file", b""),
        lambda ops, path: ops.write_small_new(path / "there", b""),
        lambda ops, path: ops.open_new_segment(path / "there"),
        lambda ops, path: ops.remove_directory(path / "full"),
        lambda ops, path: ops.sync_directory(path / "absent"),
        lambda ops, path: ops.replace(path / "absent", path / "new"),
    ],
)
def test_what_the_file_system_refuses_is_refused(
    call: Callable[[StorageOps, Path], object], tmp_path: Path
) -> None:
    for ops, path in ((RealStorage(), tmp_path), (ModelStorage(1), MOUNT / "0")):
        ops.write_small_new(path / "there", b"x")
        assert ops.make_directory(path / "full")
        ops.write_small_new(path / "full" / "file", b"x")
        with pytest.raises(StorageError):
            call(ops, path)


def test_what_is_absent_or_taken_is_said_alike(tmp_path: Path) -> None:
    for ops, path in ((RealStorage(), tmp_path), (ModelStorage(1), MOUNT / "0")):
        ops.write_small_new(path / "a", b"a")
        ops.write_small_new(path / "b", b"b")
        assert not ops.rename_noreplace(path / "a", path / "b")
        assert ops.rename_noreplace(path / "a", path / "c")
        assert ops.list_directory(path) == ("b", "c")
        assert not ops.unlink(path / "a")
        assert not ops.remove_directory(path / "a")
        assert ops.stat(path / "a") is None
        assert ops.read_small(path / "a", 10, owner_uid=os.geteuid()) is None
        assert ops.read_small(path / "c", 10, owner_uid=os.geteuid()) == b"a"


def test_a_file_that_is_recycled_keeps_content_and_size(tmp_path: Path) -> None:
    for ops, path in ((RealStorage(), tmp_path), (ModelStorage(1), MOUNT / "0")):
        ops.write_small_new(path / "old", b"content")
        ops.make_directory(path / "pool")
        assert ops.recycle(path / "absent", path / "pool" / "x") is None
        assert ops.recycle(path / "old", path / "pool" / "x") == 7
        ops.write_small_new(path / "taken", b"")
        assert ops.open_recycled(path / "pool" / "x", path / "taken") is None
        handle = ops.open_recycled(path / "pool" / "x", path / "new")
        assert handle is not None
        assert handle.path == path / "new"
        ops.close(handle)
        assert ops.list_directory(path) == ("new", "pool", "taken")
        assert ops.read_small(path / "new", 10, owner_uid=os.geteuid()) == b"content"


def test_a_fault_hits_the_calls_that_it_names() -> None:
    model = ModelStorage(2)
    model.faults = [Fault(call="sync_directory", device=1, nth=2)]
    model.make_directory(MOUNT / "1" / "d")
    model.sync_directory(MOUNT / "0")
    model.sync_directory(MOUNT / "1" / "d")
    with pytest.raises(StorageError):
        model.sync_directory(MOUNT / "1" / "d")
    model.sync_directory(MOUNT / "1" / "d")
