"""Direct I/O where statx does not say what it needs, as on kernels before 6.1: tried on real files."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.checkpoint import direct_io, linux, real_storage
from everstep.checkpoint.aio_engine import AioEngine
from everstep.checkpoint.direct_io import ASSUMED_ALIGNMENT, alignment_in
from everstep.checkpoint.engine import EngineKind
from everstep.checkpoint.engine_choice import choose_engine
from everstep.checkpoint.linux import DioAlignment
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.testing import load, make_state, opened, save
from everstep.core.errors import NoSpaceError
from everstep.core.ids import CheckpointId

MEMORY = Path("/dev/shm")


@pytest.fixture
def ops() -> RealStorage:
    """One that has not tried anything yet."""
    return RealStorage()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose files can do direct I/O."""
    if alignment_in(tmp_path) is None:
        pytest.skip(f"files in {tmp_path} cannot do direct I/O")
    return tmp_path


@pytest.fixture
def silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a kernel that does not know the question."""
    monkeypatch.setattr(linux, "_STATX_DIOALIGN", 0)
    with (folder / "asked").open("wb") as file:
        assert linux.dio_alignment(file.fileno()) is None
    (folder / "asked").unlink()
    return folder


def failing(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_what_was_tried_is_used(silent: Path) -> None:
    choice = choose_engine(silent)
    assert (choice.kind, choice.alignment) == (EngineKind.AIO, ASSUMED_ALIGNMENT)
    assert choice.reason == "direct I/O in multiples of 4096 bytes; kernel AIO"
    assert list(silent.iterdir()) == []


def test_segments_are_written_and_read_past_the_page_cache(silent: Path, ops: RealStorage) -> None:
    with opened([silent]) as (store, _):
        run = store.run(os.geteuid(), "demo", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, 1)
        done = save(run, state, CheckpointId(1, 1), make_engine=AioEngine)
        assert [write.is_direct for write in done.writes] == [True]
        assert {record.dio_alignment_bytes for record in done.manifest.segments} == {4096}
        assert load(run, done.manifest, make_engine=AioEngine) == state.content
        handle = ops.open_segment_for_read(run.segment_path(done.manifest.segments[0]))
        ops.close(handle)
        assert (handle.is_direct, handle.alignment_bytes) == (True, 4096)


def test_no_byte_of_a_segment_is_touched_by_the_try(silent: Path, ops: RealStorage) -> None:
    """A file of a deleted checkpoint may be somebody's until it is known not to be."""
    new = ops.open_new_segment(silent / "new")
    assert (new.is_direct, os.fstat(new.fd).st_size) == (True, 0)
    ops.close(new)
    content = os.urandom(8192)
    (silent / "old").write_bytes(content)
    recycled = ops.open_recycled(silent / "old", silent / "again")
    assert recycled is not None
    assert recycled.is_direct
    ops.close(recycled)
    assert (silent / "again").read_bytes() == content
    assert sorted(path.name for path in silent.iterdir()) == ["again", "new"]


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_where_the_try_is_refused_nothing_is_direct(
    silent: Path, ops: RealStorage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(direct_io.os, call, failing(errno.EINVAL))
    choice = choose_engine(silent)
    assert (choice.kind, choice.alignment) == (EngineKind.PLAIN, None)
    handle = ops.open_new_segment(silent / "new")
    ops.close(handle)
    assert (handle.is_direct, handle.alignment_bytes) == (False, 0)


def test_a_try_that_finds_no_room_is_no_verdict(
    silent: Path, ops: RealStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io.os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(NoSpaceError, match=r"/new failed.*ENOSPC"):
        ops.open_new_segment(silent / "new")
    with pytest.raises(NoSpaceError, match=f"{silent} failed"):
        choose_engine(silent)


def test_a_file_system_is_tried_once(silent: Path, ops: RealStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Path]()

    def counting(directory: Path) -> DioAlignment | None:
        tried.append(directory)
        return alignment_in(directory)

    monkeypatch.setattr(real_storage, "alignment_in", counting)
    (silent / "below").mkdir()
    for path in (silent / "a", silent / "b", silent / "below" / "c"):
        handle = ops.open_new_segment(path)
        ops.close(handle)
        assert (handle.is_direct, handle.alignment_bytes) == (True, 4096)
    with tempfile.TemporaryDirectory(dir=MEMORY) as other:
        for name in ("d", "e"):
            handle = ops.open_new_segment(Path(other) / name)
            ops.close(handle)
            assert not handle.is_direct
        assert tried in ([silent, Path(other)], [silent])  # before Linux 6.6 it refuses to be opened so


def test_a_file_that_says_no_is_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "dio_alignment", lambda _: DioAlignment(memory_bytes=0, offset_bytes=0))
    monkeypatch.setattr(direct_io.os, "pwrite", failing(errno.EIO))
    assert alignment_in(folder) is None


def test_what_lies_in_memory_is_never_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux 6.6 and later open it with O_DIRECT."""
    assert alignment_in(MEMORY) is None
    monkeypatch.setattr(linux, "_STATX_DIOALIGN", 0)
    assert alignment_in(MEMORY) is None
