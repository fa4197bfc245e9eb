"""What the explorer takes for granted, because it lies below its disks or outside its workloads."""

import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint import real_storage
from everstep.checkpoint.collect import remove_checkpoint
from everstep.checkpoint.engine import Transfer, TransferDone
from everstep.checkpoint.plain_engine import PlainEngine
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import make_state, memory_arena, opened, save
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId

OPS = RealStorage()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The system calls made since `tmp_path` was, by name and path; each is really made."""
    del tmp_path
    made: list[str] = []

    def recorded(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, *rest: object) -> object:
            made.append(f"{name} {Path(f'/proc/self/fd/{fd}').readlink()}")
            return real(fd, *rest)

        monkeypatch.setattr(real_storage.os, name, call)

    for name in ("write", "fsync", "fdatasync", "ftruncate"):
        recorded(name)
    return made


def test_a_small_file_is_synced_after_its_last_byte(calls: list[str], tmp_path: Path) -> None:
    OPS.write_small_new(tmp_path / "small", b"content")
    assert calls == [f"write {tmp_path}/small", f"fsync {tmp_path}/small"]


def test_names_are_synced_by_their_directory(calls: list[str], tmp_path: Path) -> None:
    OPS.sync_directory(tmp_path)
    assert calls == [f"fsync {tmp_path}"]


def test_a_segment_is_synced_by_fdatasync(calls: list[str], tmp_path: Path) -> None:
    handle = OPS.open_new_segment(tmp_path / "segment")
    OPS.truncate(handle, 100)
    OPS.sync_data(handle)
    OPS.close(handle)
    assert calls == [f"ftruncate {tmp_path}/segment", f"fdatasync {tmp_path}/segment"]


class _HalfEngine(PlainEngine):
    """Says that it moved a block less than it was asked for."""

    def run(self, transfer: Transfer) -> TransferDone:
        done = super().run(transfer)
        return replace(done, bytes_moved=done.bytes_moved - 4096)


@pytest.fixture
def half_engine() -> Generator[_HalfEngine]:
    made = _HalfEngine()
    yield made
    made.close()


def test_an_engine_that_moved_less_has_not_written(half_engine: _HalfEngine, tmp_path: Path) -> None:
    with memory_arena(16384) as arena:
        handle = OPS.open_new_segment(tmp_path / "segment")
        with pytest.raises(StorageError, match="moved 4096 of 8192"):
            OPS.write_segment(handle, arena, 0, 8192, half_engine)
        OPS.close(handle)
        half_engine.forget(arena.fd)


def test_a_segment_that_another_checkpoint_needs_stays(tmp_path: Path) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    for path in dirs:
        path.mkdir()
    with opened(dirs) as (store, _):
        run = store.run(os.geteuid(), "shared", create=True)
        run.begin_attempt(1, fresh=False)
        save(run, make_state(store), CheckpointId(1, 1))
        newer = replace(run.shard(CheckpointId(1, 1), 0), checkpoint=CheckpointId(1, 2))
        run.add_shard(newer)  # as a manifest that reuses unchanged segments would have it
        contents = {(path := run.segment_path(ref)): path.read_bytes() for ref in newer.segments}
        assert contents
        remove_checkpoint(run, CheckpointId(1, 1))
        assert {path: path.read_bytes() for path in contents} == contents
