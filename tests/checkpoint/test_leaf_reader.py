"""Leaves read from segment files, verified, in bounded memory."""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.leaf_reader import BLOCKS_KEPT, LeafReader
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_files import StoredSegments
from everstep.checkpoint.testing import SMALL_LEAVES, State, make_state, opened, save
from everstep.core.errors import CorruptDataError, IncompleteError
from everstep.core.ids import CheckpointId

ONE = CheckpointId(1, 1)
LEAVES = (
    *SMALL_LEAVES,
    whole_leaf("large", "float32", (3_000, 1_000)),  # cut over both devices
    whole_leaf("odd_size", "uint8", (BLOCK_SIZE_BYTES + 4097,)),
)


@contextmanager
def stored(folder: Path) -> Generator[tuple[RunStore, State, list[Path]]]:
    devices = [folder / "d0", folder / "d1"]
    for device in devices:
        device.mkdir()
    with opened(devices) as (store, _):
        run = store.run(os.geteuid(), "run", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, 3, LEAVES)
        save(run, state, ONE)
        yield run, state, devices


def test_every_leaf_comes_back(tmp_path: Path) -> None:
    with (
        stored(tmp_path) as (run, state, _),
        LeafReader(StoredSegments(run), {0: run.manifest(ONE, 0)}) as reader,
    ):
        for leaf in LEAVES:
            found = b"".join(map(bytes, reader.read(0, leaf.name, 0, leaf.size_bytes)))
            assert found == state.content[leaf.name], leaf.name
        assert list(reader.read(0, "unknown", 0, 5)) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_is_that_range(data: st.DataObject, shared: tuple[LeafReader, State]) -> None:
    reader, state = shared
    leaf = data.draw(st.sampled_from(LEAVES))
    begin = data.draw(st.integers(0, leaf.size_bytes))
    end = data.draw(st.integers(begin, min(leaf.size_bytes, begin + 10_000)))
    found = b"".join(map(bytes, reader.read(0, leaf.name, begin, end)))
    assert found == state.content[leaf.name][begin:end]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[LeafReader, State]]:
    with (
        stored(tmp_path) as (run, state, _),
        LeafReader(StoredSegments(run), {0: run.manifest(ONE, 0)}) as reader,
    ):
        yield reader, state


def test_more_blocks_than_are_kept(tmp_path: Path) -> None:
    leaf = whole_leaf("huge", "uint8", ((BLOCKS_KEPT + 3) * BLOCK_SIZE_BYTES,))
    device = tmp_path / "d"
    device.mkdir()
    with opened([device]) as (store, _):
        run = store.run(os.geteuid(), "run", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, 3, [leaf])
        save(run, state, ONE)
        with LeafReader(StoredSegments(run), {0: run.manifest(ONE, 0)}) as reader:
            for _ in range(2):
                begin = 0
                for view in reader.read(0, "huge", 0, leaf.size_bytes):
                    assert view == memoryview(state.content["huge"])[begin : begin + len(view)]
                    begin += len(view)
                assert begin == leaf.size_bytes


def test_a_flipped_bit_is_found_before_its_block_is_handed_on(tmp_path: Path) -> None:
    with stored(tmp_path) as (run, _, _):
        manifest = run.manifest(ONE, 0)
        path = run.segment_path(manifest.segments[-1])
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        piece = [each for each in manifest.pieces if each.segment == manifest.segments[-1].segment][-1]
        end = piece.offset_in_leaf_bytes + piece.size_bytes
        with (
            LeafReader(StoredSegments(run), {0: manifest}) as reader,
            pytest.raises(CorruptDataError, match=str(path)),
        ):
            list(reader.read(0, piece.leaf, end - 1, end))
        assert ONE not in run.offered()


def test_what_retention_removes_meanwhile_is_still_read(tmp_path: Path) -> None:
    with (
        stored(tmp_path) as (run, state, devices),
        LeafReader(StoredSegments(run), {0: run.manifest(ONE, 0)}) as reader,
    ):
        for path in (path for device in devices for path in device.rglob("*.safetensors")):
            path.unlink()
        found = b"".join(map(bytes, reader.read(0, "large", 0, LEAVES[-2].size_bytes)))
        assert found == state.content["large"]
        with pytest.raises(IncompleteError):
            LeafReader(StoredSegments(run), {0: run.manifest(ONE, 0)})
