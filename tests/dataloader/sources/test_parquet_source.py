"""Parquet: cells and rows by row group, bounded memory, forks while another thread decodes, files that change."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_checks import check_in_workers, check_source, contents

from everstep.core.errors import CorruptDataError, SourceChangedError, UsageError
from everstep.dataloader.sources import ParquetSource, ReadsBlocks, read_row

ROWS: list[dict[str, object]] = [
    {"n": i, "image": b"%d" % i * 3, "text": f"é{i}", "nested": {"bytes": b"n%d" % i, "path": None}}
    for i in range(10)
]


def write(path: Path, rows: list[dict[str, object]], group: int = 4) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def test_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ROWS[:7])
    write(tmp_path / "b.parquet", ROWS[7:])
    source = ParquetSource(tmp_path)
    assert [read_row(source.get_bytes(i)) for i in range(10)] == ROWS
    check_source(source, contents(source))
    assert isinstance(source, ReadsBlocks)
    assert source.block_sizes() == [4, 3, 3]
    some = ParquetSource(tmp_path, columns=["text", "n"])
    assert read_row(some.get_bytes(8)) == {"text": "é8", "n": 8}
    assert list(read_row(some.get_bytes(8))) == ["text", "n"]
    assert [Path(path).name for path in source.files()] == ["a.parquet", "b.parquet"]


@pytest.mark.parametrize("column", ["image", "text", "nested.bytes"])
def test_one_column(tmp_path: Path, column: str) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet", ROWS), column=column)
    expected = {"image": b"777", "text": "é7".encode(), "nested.bytes": b"n7"}[column]
    assert source.get_bytes(7) == expected
    check_source(source, contents(source))
    assert source.fingerprint() != ParquetSource(tmp_path / "a.parquet").fingerprint()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    source = ParquetSource(write(tmp_path / "a.parquet", ROWS), column="image")
    check_in_workers(source, [b"%d" % i * 3 for i in range(10)], method)


def test_a_fork_amid_decoding(tmp_path: Path) -> None:
    """A child made while another thread holds the lock and a file of pyarrow reads all the same."""
    source = ParquetSource(write(tmp_path / "a.parquet", ROWS, group=1), column="image", cache_bytes=1)
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            contents(source)

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                os._exit(contents(source) != [b"%d" % i * 3 for i in range(10)])
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_few_row_groups_are_kept(tmp_path: Path) -> None:
    big: list[dict[str, object]] = [{"x": bytes([i]) * 100_000} for i in range(8)]
    path = write(tmp_path / "a.parquet", big, group=1)
    source = ParquetSource(path, column="x", cache_bytes=250_000)
    decoded: list[int] = []
    cache = source._cache.value()
    decode = cache._decode
    cache._decode = lambda group, *rest: (decoded.append(group), decode(group, *rest))[1]
    for index in (0, 0, 1, 0, 1, 2, 0, 1, 3):
        assert source.get_bytes(index) == bytes([index]) * 100_000
        assert len(cache._tables) <= 2
        assert cache._held_bytes <= 250_000 == source._cache_bytes
    assert decoded == [0, 1, 2, 0, 1, 3]
    tiny = ParquetSource(path, column="x", cache_bytes=0)
    assert tiny.get_bytes(5) == bytes([5]) * 100_000
    assert len(tiny._cache.value()._tables) == 1


def test_files_that_change(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    source = ParquetSource(path, column="image", cache_bytes=0)
    before = source.fingerprint()
    copy = pickle.dumps(source)
    assert ParquetSource(path, column="image").fingerprint() == before
    other: list[dict[str, object]] = [{**row, "image": b"%d" % (9 - i) * 3} for i, row in enumerate(ROWS)]
    replaced = write(tmp_path / "new", other)
    assert ParquetSource(replaced, column="image").fingerprint() != before
    same_size = replaced.stat().st_size == path.stat().st_size
    replaced.replace(path)
    message = "has another footer than before" if same_size else r"a\.parquet has \d+ bytes, \d+ when"
    with pytest.raises(SourceChangedError, match=message):
        pickle.loads(copy).get_bytes(1)
    path.unlink()
    with pytest.raises(SourceChangedError, match=r"a\.parquet is gone \(sample 1\)"):
        pickle.loads(copy).get_bytes(1)


def test_a_damaged_row_group(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"x": os.urandom(5000)} for _ in range(4)], group=2)
    source = ParquetSource(path, column="x")
    data = bytearray(path.read_bytes())
    data[4:200] = os.urandom(196)
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"a\.parquet, row group 0 \(sample 1\)"):
        source.get_bytes(1)
    assert len(source.get_bytes(2)) == 5000


def test_what_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*ROWS, {"n": 1, "image": None, "text": None, "nested": None}])
    with pytest.raises(UsageError, match="column 'image' is null in row 10"):
        ParquetSource(path, column="image").get_bytes(10)
    with pytest.raises(UsageError, match=r"column 'nested\.bytes' is null in row 10"):
        ParquetSource(path, column="nested.bytes").get_bytes(10)
    with pytest.raises(UsageError, match=r"column 'n' of .* is int64, not bytes or text"):
        ParquetSource(path, column="n")
    for bad in ("none", "nested.none", "n.x", "image."):
        with pytest.raises(UsageError, match=f"has no column '{bad}', only n, image, text, nested"):
            ParquetSource(path, column=bad)
    with pytest.raises(UsageError, match="has no column 'z'"):
        ParquetSource(path, columns=["z"])
    with pytest.raises(UsageError, match="both given"):
        ParquetSource(path, column="image", columns=["n"])
    write(tmp_path / "b.parquet", [{"other": 1}])
    with pytest.raises(UsageError, match=r"b\.parquet has other columns than"):
        ParquetSource(tmp_path)
    for data in (b"", b"PAR1", b"x" * 100, path.read_bytes()[:-1], path.read_bytes()[4:]):
        (tmp_path / "c.parquet").write_bytes(data)
        with pytest.raises(CorruptDataError, match=r"c\.parquet"):
            ParquetSource(tmp_path / "c.parquet")


def test_bytes_that_are_no_row() -> None:
    for data in (b"", b"x" * 50):
        with pytest.raises(CorruptDataError):
            read_row(data)


def test_without_pyarrow(tmp_path: Path) -> None:
    """The package and other sources work; the error says what to install."""
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from everstep.dataloader.sources import JsonlSource, ParquetSource\n"
        "from everstep.core.errors import UsageError\n"
        f"open({str(tmp_path / 'a.jsonl')!r}, 'w').write('1')\n"
        f"assert JsonlSource({str(tmp_path / 'a.jsonl')!r}).get_bytes(0) == b'1'\n"
        f"open({str(tmp_path / 'a.parquet')!r}, 'w').write('PAR1' + chr(0) * 4 + 'PAR1')\n"
        f"try: ParquetSource({str(tmp_path / 'a.parquet')!r})\n"
        "except UsageError as exc: print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert (
        "ParquetSource needs pyarrow, which is not installed (pip install 'everstep[arrow]')" in done.stdout
    )
