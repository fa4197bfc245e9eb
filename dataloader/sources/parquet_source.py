"""Rows of Parquet files: whole row groups are decoded, a few of them are kept by each process."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from ...core.errors import CorruptDataError, SourceChangedError, UsageError
from .arrow_rows import arrow_errors, cell_bytes, check_column, check_names, row_bytes, top_column
from .extras import import_extra
from .open_files import OpenFile, open_data, open_indexed
from .paths import Paths, joined_fingerprint, listed
from .per_process import PerProcess
from .protocol import checked_index
from .shard_plan import ShardTable

CACHE_BYTES = 256 << 20
_MAGIC = b"PAR1"


class ParquetSource:
    """Each row of Parquet files is a sample: one cell's bytes, or the row as an Arrow IPC stream (`read_row`).

        images = ParquetSource("part-*.parquet", column="image.bytes")
        rows = SourceDataset(ParquetSource("part-*.parquet"), decode=read_row)  # dicts

    A row can only be had by decoding its whole row group (often 10-100 MB). Each process keeps the groups it used
    last, up to `cache_bytes` of decoded data, so read in an order that stays in a group for a while: `block_sizes()`
    are the rows of each group. pyarrow's threads are not used, and nothing of pyarrow crosses a fork. The fingerprint
    covers the size and footer of each file (statistics and positions of all column chunks).

    Args:
        paths: a path, a list, a folder (`*.parquet`), or a pattern.
        column: the column of bytes or text whose cell is the sample; `image.bytes` names a field of a struct.
        columns: the columns of a row, all by default; not together with `column`.
        cache_bytes: limit of the decoded row groups of each process; one is always kept.

    Raises:
        UsageError: pyarrow is not installed, no file, no such column, or files of different columns.
        CorruptDataError: a file is no Parquet file.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        column: str | None = None,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if column is not None and columns is not None:
            raise UsageError("column= and columns= were both given", hint="give one of them")
        self._paths = listed(paths, (".parquet",))
        self._column = column
        self._wanted = None if columns is None else list(columns)
        self._cache_bytes = cache_bytes
        self._footers: list[str] = []
        self._sizes: list[int] = []
        group_counts: list[int] = []
        file_groups: list[int] = []
        names: list[str] | None = None
        for path in self._paths:
            opened = _open(path, None, 0)
            schema, counts = _schema_and_counts(opened)
            self._check_columns(schema, path)
            if names is None:
                names = self._wanted or list(schema.names)
            elif self._column is None and not set(names) <= set(schema.names):
                raise UsageError(
                    f"{path} has other columns than {self._paths[0]}",
                    hint="name those that all have by columns=",
                )
            file_groups.append(len(counts))
            group_counts += counts
            self._footers.append(opened.footer)
            self._sizes.append(opened.size_bytes)
        self._names = names or []
        self._groups = ShardTable(group_counts)
        self._files = ShardTable(file_groups)
        self._cache = PerProcess(self._new_cache)

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return len(self._groups)

    def get_bytes(self, index: int) -> bytes:
        """Return a cell, or a row as an IPC stream; errors as in the protocol. UsageError where the cell is null."""
        group, row = self._groups.locate(checked_index(index, len(self._groups), self))
        table = self._cache.value().get(group, index)
        if self._column is not None:
            return cell_bytes(table, row, self._column, index)
        return row_bytes(table, row)

    def fingerprint(self) -> str:
        """Return a digest over the footers of all files and the columns."""
        columns = [self._column] if self._column is not None else ["*", *self._names]
        return joined_fingerprint("parquet-1", [*self._footers, *columns])

    def files(self) -> Iterator[str]:
        """Yield the paths of the files."""
        yield from dict.fromkeys(self._paths)

    def block_sizes(self) -> list[int]:
        """Return the number of rows of each row group."""
        return self._groups.counts()

    def _check_columns(self, schema: Any, path: str) -> None:
        if self._column is not None:
            check_column(schema, self._column, path)
        else:
            check_names(schema, self._wanted, path)

    def _new_cache(self) -> "_GroupCache":
        return _GroupCache(self._decode, self._cache_bytes)

    def _decode(self, group: int, index: int, opened: "dict[int, _Opened]") -> Any:
        file, number = self._files.locate(group)
        path = self._paths[file]
        if file not in opened:
            opened.clear()  # one file open at a time: groups are read in order, or are far apart anyway
            opened[file] = _open(path, self._sizes[file], index)
            if opened[file].footer != self._footers[file]:
                raise SourceChangedError(
                    f"{path} has another footer than before (sample {index})", hint=_GONE
                )
        parquet = opened[file].parquet
        columns = self._names if self._column is None else [top_column(parquet.schema_arrow, self._column)]
        try:
            table = parquet.read_row_group(number, columns=columns, use_threads=False)
        except arrow_errors() as exc:
            raise CorruptDataError(f"{path}, row group {number} (sample {index}): {exc}") from exc
        expected = self._groups.count(group)
        if table.num_rows != expected:
            raise CorruptDataError(
                f"{path}, row group {number} (sample {index}) has {table.num_rows} rows, its footer says {expected}"
            )
        return table if self._column is not None else table.select(self._names)

    def __getstate__(self) -> dict[str, object]:
        """Return everything but what this process has read."""
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._cache = PerProcess(self._new_cache)


_GONE = "put the file back, or make the source anew"


class _GroupCache:
    """The decoded row groups of one process. One thread decodes at a time, so that memory stays bounded."""

    def __init__(self, decode: Any, limit_bytes: int) -> None:
        self._decode = decode
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._opened: dict[int, _Opened] = {}
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._held_bytes = 0

    def get(self, group: int, index: int) -> Any:
        with self._lock:
            if group in self._tables:
                self._tables.move_to_end(group)
                return self._tables[group]
            table = self._decode(group, index, self._opened)
            self._tables[group] = table
            self._held_bytes += table.nbytes
            while self._held_bytes > self._limit_bytes and len(self._tables) > 1:
                _, dropped = self._tables.popitem(last=False)
                self._held_bytes -= dropped.nbytes
            return table


class _Opened:
    """A Parquet file, open in this process."""

    def __init__(self, path: str, size_bytes: int, footer: str, parquet: Any) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.footer = footer
        self.parquet = parquet


def _open(path: str, size_bytes: int | None, index: int) -> _Opened:
    """Return `path`, opened; where `size_bytes` is given it must have that size."""
    file = open_data(path) if size_bytes is None else open_indexed(path, size_bytes, index)
    footer = _footer_digest(file)
    import_extra("pyarrow", "arrow", "ParquetSource")  # whose absence is told by its own name
    parquet_module = import_extra("pyarrow.parquet", "arrow", "ParquetSource")
    try:
        parquet = parquet_module.ParquetFile(path, memory_map=False, pre_buffer=False)
    except arrow_errors() as exc:
        raise CorruptDataError(f"{path}: {exc}") from exc
    return _Opened(path, file.size_bytes, footer, parquet)


def _schema_and_counts(opened: _Opened) -> tuple[Any, list[int]]:
    """Return a file's Arrow schema and the rows of each row group."""
    try:
        metadata = opened.parquet.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        schema = opened.parquet.schema_arrow
        list(schema.names)  # which must be text
    except arrow_errors() as exc:
        raise CorruptDataError(f"{opened.path}: {exc}") from exc
    return schema, counts


def _footer_digest(file: OpenFile) -> str:
    tail = file.read(max(0, file.size_bytes - 8), 8)
    length = int.from_bytes(tail[:4], "little") + 8
    if file.read(0, 4) != _MAGIC or tail[4:] != _MAGIC or length > file.size_bytes:
        raise CorruptDataError(f"{file.path} is no whole Parquet file: it ends in {tail!r}")
    digest = xxhash.xxh3_128(file.size_bytes.to_bytes(8, "little"))
    for start in range(file.size_bytes - length, file.size_bytes, 1 << 20):
        digest.update(file.read(start, min(1 << 20, file.size_bytes - start)))
    return digest.hexdigest()
