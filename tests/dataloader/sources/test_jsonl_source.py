"""JSONL: what is a line, files that change, and any chunking of the scan."""

import os
import pickle
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_checks import LONG_AGO_S, check_in_workers, check_source, contents, settle

from everstep.core.errors import SourceChangedError, UsageError
from everstep.dataloader.sources import JsonlSource
from everstep.dataloader.sources.index_format import Index
from everstep.dataloader.sources.line_format import KIND, LineScanner, line_at, line_check

BOM = b"\xef\xbb\xbf"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    settle(path)
    return path


def lines_of(data: bytes) -> list[bytes]:
    """Return the samples of a file by another way than the scanner's."""
    lines = (line.removesuffix(b"\r") for line in data.removeprefix(BOM).split(b"\n"))
    return [line for line in lines if line.strip(b" \t\n\r\x0b\x0c")]


CASES = {
    b"": [],
    b"\n\n\r\n  \n": [],
    b"a": [b"a"],
    b"a\n": [b"a"],
    b"a\r\nb\r\n": [b"a", b"b"],
    b"a\nb": [b"a", b"b"],
    b"\na\n\n\nb\n \t\n": [b"a", b"b"],
    b"a\rb\n": [b"a\rb"],
    b"a\r\r\n": [b"a\r"],
    b"a\r": [b"a"],
    b" a \n": [b" a "],
    BOM + b"a\nb": [b"a", b"b"],
    BOM: [],
    b"\0\n\xff": [b"\0", b"\xff"],
}


@pytest.mark.parametrize(("data", "expected"), CASES.items())
def test_what_is_a_line(tmp_path: Path, data: bytes, expected: list[bytes]) -> None:
    assert contents(JsonlSource(write(tmp_path / "x.jsonl", data))) == expected == lines_of(data)


PIECES = st.sampled_from([b"a", b"\r", b"\n", b" ", b"\r\n", b"bc" * 9, BOM])


@given(
    st.lists(PIECES | st.binary(max_size=3)).map(b"".join),
    st.lists(st.integers(3, 9), min_size=1),
)
def test_any_chunks_give_the_same_lines(data: bytes, sizes: list[int]) -> None:
    scanner = LineScanner()
    position = number = 0
    while position < len(data):
        scanner.feed(data[position : position + sizes[number % len(sizes)]])
        position += sizes[number % len(sizes)]
        number += 1
    index = Index(b"".join(scanner.encode([])), kind=KIND)
    places = [line_at(index, i) for i in range(index.count)]
    assert [data[start : start + length] for start, length, _ in places] == lines_of(data)
    assert [check for _, _, check in places] == [line_check(line) for line in lines_of(data)]


def test_a_line_of_any_length_takes_no_memory() -> None:
    scanner = LineScanner()
    chunk = b"x" * (1 << 16)
    tracemalloc.start()
    try:
        for _ in range(256):
            scanner.feed(chunk)
        pieces = scanner.encode([])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert line_at(Index(b"".join(pieces), kind=KIND), 0)[:2] == (0, 256 << 16)


def test_several_files(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", b"3\n4\n")
    write(tmp_path / "a.jsonl", b"1\n2")
    write(tmp_path / "c.ndjson", b"5\n")
    write(tmp_path / "d.txt", b"6\n")
    source = JsonlSource(tmp_path)
    check_source(source, [b"1", b"2", b"3", b"4", b"5"])
    assert [Path(path).name for path in source.files()] == ["a.jsonl", "b.jsonl", "c.ndjson"]
    assert source.fingerprint() == "jsonl-1:8b541ee16c93e39b0ff3c4571ad1d08d"
    assert contents(JsonlSource(tmp_path, index=tmp_path / "other")) == contents(source)
    with pytest.raises(UsageError, match="compressed"):
        JsonlSource(write(tmp_path / "x.jsonl.gz", b"\x1f\x8b" + bytes(9)))
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    path = write(tmp_path / "a.jsonl", b"1\n2\n" * 50)
    check_in_workers(JsonlSource(path), [b"1", b"2"] * 50, method)


def test_appended_and_edited_files_are_indexed_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"one\ntwo\n")
    first = JsonlSource(path)
    with path.open("ab") as file:
        file.write(b"three\n")
    assert contents(JsonlSource(path)) == [b"one", b"two", b"three"]
    with pytest.raises(
        SourceChangedError, match=r"a\.jsonl has 14 bytes, 8 when it was indexed \(sample 1\)"
    ):
        first.get_bytes(1)
    path.write_bytes(b"one\ntwO\n")
    settle(path, at_s=LONG_AGO_S + 9)
    edited = JsonlSource(path)
    assert contents(edited) == [b"one", b"twO"]
    assert edited.fingerprint() != first.fingerprint()


def test_a_line_edited_in_place_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"x": 1}\n{"x": 2}\n')
    source = JsonlSource(path)
    copy = pickle.loads(pickle.dumps(source))
    assert source.get_bytes(1) == b'{"x": 2}'
    with path.open("r+b") as file:
        file.seek(15)
        file.write(b"3")
    for each in (source, copy):
        assert each.get_bytes(0) == b'{"x": 1}'
        with pytest.raises(
            SourceChangedError, match=re.escape(f"{path} has another line at 9") + ".*sample 1"
        ):
            each.get_bytes(1)
    with path.open("r+b") as file:
        file.truncate(12)
    with pytest.raises(SourceChangedError, match=r"ends at 12, sample 1 lies at \[9, 17\)"):
        source.get_bytes(1)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_other_encodings_are_refused(tmp_path: Path, encoding: str) -> None:
    """A line feed is two bytes there, and half of other letters."""
    (tmp_path / "a.jsonl").write_text('\ufeff{"a": 1}\n', encoding=encoding)
    with pytest.raises(UsageError, match=r"a\.jsonl is UTF-16.*iconv"):
        JsonlSource(tmp_path / "a.jsonl")


def test_what_is_no_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match=r"pipe\.jsonl is not a regular file.*not folders or pipes"):
        JsonlSource(tmp_path / "pipe.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe.jsonl"]
