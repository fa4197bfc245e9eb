"""Arrow files and streams, and what `datasets.save_to_disk` writes."""

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_checks import check_in_workers, check_source, contents
from source_data import write_saved_dataset, write_stream

from everstep.core.errors import CorruptDataError, SourceChangedError, UsageError
from everstep.dataloader.sources import ArrowSource, read_row
from everstep.dataloader.sources.hf_format import parse_splits, parse_state

ROWS: list[dict[str, object]] = [
    {"n": i, "image": {"bytes": b"%d" % i * 3, "path": None}, "text": f"é{i}"} for i in range(10)
]
TABLE = pa.Table.from_pylist(ROWS)


def write_file(path: Path, table: Any, rows: int = 3) -> Path:
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("write", [write_stream, write_file])
def test_files_and_streams(tmp_path: Path, write: Callable[[Path, Any], Path]) -> None:
    path = write(tmp_path / "a.arrow", TABLE)
    source = ArrowSource(path)
    assert [read_row(source.get_bytes(i)) for i in range(10)] == ROWS
    check_source(source, contents(source))
    cells = ArrowSource(tmp_path, column="image.bytes")
    check_source(cells, [b"%d" % i * 3 for i in range(10)])
    assert ArrowSource(path, column="text").get_bytes(3) == "é3".encode()
    assert read_row(ArrowSource(path, columns=["n"]).get_bytes(4)) == {"n": 4}
    assert (
        len({source.fingerprint(), cells.fingerprint(), ArrowSource(path, columns=["n"]).fingerprint()}) == 3
    )


def test_saved_datasets(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "train", TABLE)
    source = ArrowSource(folder)
    assert [read_row(source.get_bytes(i)) for i in range(10)] == ROWS
    assert list(source.files()) == [str(folder / f"data-0000{i}-of-00002.arrow") for i in range(2)]
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_fingerprint": "another"}))
    assert ArrowSource(folder).fingerprint() != source.fingerprint()


def test_saved_splits(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "both/train", TABLE)
    write_saved_dataset(tmp_path / "both/test", TABLE.slice(0, 7))
    (tmp_path / "both/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert len(ArrowSource(tmp_path / "both", split="test")) == 7
    with pytest.raises(UsageError, match="has the splits train, test, not None"):
        ArrowSource(tmp_path / "both")
    with pytest.raises(UsageError, match="has the splits train, test, not none"):
        ArrowSource(tmp_path / "both", split="none")
    with pytest.raises(UsageError, match="has no splits"):
        ArrowSource(tmp_path / "both/train", split="train")
    (tmp_path / "both/dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    assert len(ArrowSource(tmp_path / "both")) == 7


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    source = ArrowSource(write_saved_dataset(tmp_path / "train", TABLE), column="image.bytes")
    check_in_workers(source, [b"%d" % i * 3 for i in range(10)], method)


def test_files_that_change(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "a.arrow", TABLE)
    source = ArrowSource(path, column="text")
    copy = pickle.dumps(source)
    assert source.get_bytes(9) == "é9".encode()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(SourceChangedError, match=rf"a\.arrow has not {size} bytes any more \(sample 9\)"):
        source.get_bytes(9)
    with pytest.raises(SourceChangedError, match=rf"a\.arrow has {size // 2} bytes, {size} when"):
        pickle.loads(copy).get_bytes(9)
    path.unlink()
    with pytest.raises(SourceChangedError, match=r"a\.arrow is gone \(sample 2\)"):
        pickle.loads(copy).get_bytes(2)


def test_what_is_refused(tmp_path: Path) -> None:
    whole = write_stream(tmp_path / "a.arrow", TABLE).read_bytes()
    for data in (b"", b"x" * 100, whole[:100], whole[: len(whole) // 2], b"ARROW1" + bytes(50)):
        (tmp_path / "b.arrow").write_bytes(data)
        with pytest.raises(CorruptDataError, match=r"b\.arrow"):
            ArrowSource(tmp_path / "b.arrow")
    encoded = pa.table({"x": pa.array(["a", "b"]).dictionary_encode()})
    with pytest.raises(UsageError, match="dictionary-encoded columns"):
        ArrowSource(write_stream(tmp_path / "c.arrow", encoded))
    assert read_row(ArrowSource(write_file(tmp_path / "d.arrow", encoded)).get_bytes(1)) == {"x": "b"}
    with pytest.raises(UsageError, match="is int64, not bytes or text"):
        ArrowSource(tmp_path / "a.arrow", column="n")
    with pytest.raises(UsageError, match="no column 'z'"):
        ArrowSource(tmp_path / "a.arrow", columns=["z"])
    with pytest.raises(UsageError, match="both given"):
        ArrowSource(tmp_path / "a.arrow", column="text", columns=["n"])
    folder = write_saved_dataset(tmp_path / "train", TABLE)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(CorruptDataError, match=r"names data-00001-of-00002\.arrow, which is not there"):
        ArrowSource(folder)


def test_offsets_that_lead_out_of_the_file(tmp_path: Path) -> None:
    """A text column whose offsets are damaged must not read somebody else's memory."""
    table = pa.table({"x": pa.array(["a" * 50, "b" * 50, "c" * 50])})
    path = write_stream(tmp_path / "a.arrow", table)
    data = bytearray(path.read_bytes())
    offsets = data.index((0).to_bytes(4, "little") + (50).to_bytes(4, "little") + (100).to_bytes(4, "little"))
    data[offsets + 8 : offsets + 12] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)
    source = ArrowSource(path, column="x")
    assert source.get_bytes(0) == b"a" * 50
    with pytest.raises(CorruptDataError, match=r"a\.arrow, batch 0 \(sample 1\)"):
        source.get_bytes(1)


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "..", "."])
def test_names_that_leave_the_folder(name: str) -> None:
    with pytest.raises(CorruptDataError, match="not in its folder"):
        parse_state(json.dumps({"_data_files": [{"filename": name}]}).encode())
    with pytest.raises(CorruptDataError, match="names the splits"):
        parse_splits(json.dumps({"splits": [name]}).encode())


def test_selections_by_indices_are_refused() -> None:
    for key in ("_indices_data_files", "_indices_files"):
        with pytest.raises(UsageError, match="flatten_indices"):
            parse_state(json.dumps({"_data_files": [], key: [{"filename": "x"}]}).encode())
    assert parse_state(b'{"_data_files": [], "_indices_data_files": null}') == ([], "")


KEYS = st.sampled_from(["_data_files", "filename", "_fingerprint", "splits"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_fuzzed_state_ends_in_declared_errors(data: bytes) -> None:
    for parse in (parse_state, parse_splits):
        with contextlib.suppress(CorruptDataError, UsageError):
            parse(data)
