"""Rows of Arrow files and of Hugging Face datasets on disk, mapped into memory: only the row is copied."""

import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import CorruptDataError, SourceChangedError, UsageError
from .arrow_rows import arrow_errors, cell_bytes, check_column, check_names, row_bytes
from .extras import import_extra
from .hf_format import JSON_BYTES_MAX, SPLITS_FILE, STATE_FILE, parse_splits, parse_state
from .open_files import OPEN_MAX, OpenFile, open_data, open_indexed, sampled_digest
from .paths import Paths, joined_fingerprint, listed
from .per_process import PerProcess
from .protocol import checked_index
from .shard_plan import ShardTable

FILE_MAGIC = b"ARROW1"


class ArrowSource:
    """Each row is a sample: one cell's bytes, or the row as an Arrow IPC stream (`read_row`).

        rows = SourceDataset(ArrowSource("saved", split="train"), decode=read_row)  # dicts

    Reads IPC files and IPC streams, and what `datasets.save_to_disk` wrote, without `datasets`. At the opening the
    position of each record batch is found, without reading their data. The page cache holds the data once for all
    processes: to cache these bytes again gains nothing. The fingerprint covers the sizes of the files, 16 pages of
    each, and the fingerprint that `datasets` gave.

    Args:
        paths: a folder of `save_to_disk`, or Arrow files: a path, a list, a folder (`*.arrow`), or a pattern.
        split: which split of a saved DatasetDict.
        column: the column of bytes or text whose cell is the sample; `image.bytes` names a field of a struct.
        columns: the columns of a row, all by default; not together with `column`.

    Raises:
        UsageError: pyarrow is not installed, no file, no such split or column, a selection saved by old `datasets`.
        CorruptDataError: a file is no Arrow file, or is cut off.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        split: str | None = None,
        column: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        if column is not None and columns is not None:
            raise UsageError("column= and columns= were both given", hint="give one of them")
        self._column = column
        self._wanted = None if columns is None else list(columns)
        self._paths, given = _files_of(paths, split)
        self._digests = [given]
        self._sizes: list[int] = []
        self._batches: list[array[int]] = []
        counts: list[int] = []
        file_batches: list[int] = []
        for path in self._paths:
            mapped = _Mapped(path, open_data(path))
            self._check_columns(mapped.schema, path)
            positions, rows = mapped.scan()
            self._batches.append(positions)
            counts += rows
            file_batches.append(len(rows))
            self._sizes.append(mapped.size_bytes)
            self._digests.append(sampled_digest(path))
        self._rows = ShardTable(counts)
        self._file_batches = ShardTable(file_batches)
        self._mapped = PerProcess(_MappedFiles)

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return len(self._rows)

    def get_bytes(self, index: int) -> bytes:
        """Return a cell, or a row as an IPC stream; errors as in the protocol. UsageError where the cell is null."""
        batch, row = self._rows.locate(checked_index(index, len(self._rows), self))
        file, number = self._file_batches.locate(batch)
        pa = import_extra("pyarrow", "arrow", "ArrowSource")
        mapped = self._mapped.value().get(self._paths[file], self._sizes[file], index)
        try:
            table = pa.Table.from_batches([mapped.batch(self._batches[file], number).slice(row, 1)])
            table.validate(full=True)  # of this row: offsets that lead out of the file end here
            if table.num_rows != 1:
                raise IndexError(f"it has no row {row}")
        except arrow_errors() as exc:
            raise CorruptDataError(f"{self._paths[file]}, batch {number} (sample {index}): {exc}") from exc
        if self._column is not None:
            return cell_bytes(table, 0, self._column, index)
        return row_bytes(table if self._wanted is None else table.select(self._wanted), 0)

    def fingerprint(self) -> str:
        """Return a digest over the files' sizes and sampled pages, the dataset's own fingerprint, and the columns."""
        columns = [self._column] if self._column is not None else ["*", *(self._wanted or ())]
        return joined_fingerprint("arrow-1", [*self._digests, *columns])

    def files(self) -> Iterator[str]:
        """Yield the paths of the files."""
        yield from dict.fromkeys(self._paths)

    def _check_columns(self, schema: Any, path: str) -> None:
        if self._column is not None:
            check_column(schema, self._column, path)
        else:
            check_names(schema, self._wanted, path)

    def __getstate__(self) -> dict[str, object]:
        """Return everything but mappings."""
        return {name: value for name, value in self.__dict__.items() if name != "_mapped"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._mapped = PerProcess(_MappedFiles)


class _Mapped:
    """One Arrow file, mapped by this process."""

    def __init__(self, path: str, file: OpenFile) -> None:
        pa = import_extra("pyarrow", "arrow", "ArrowSource")
        self._ipc = import_extra("pyarrow.ipc", "arrow", "ArrowSource")
        self._errors = arrow_errors()
        self.path = path
        self.file = file
        self.size_bytes = file.size_bytes
        try:
            self._map = pa.memory_map(path, "r")
            if self._map.size() != self.size_bytes:
                raise SourceChangedError(f"{path} was replaced while it was opened", hint=_GONE)
            self._file = self._ipc.open_file(self._map) if self._has_footer() else None
            self.schema = self._file.schema if self._file else self._ipc.open_stream(self._map).schema
            list(self.schema.names)  # which must be text
        except self._errors as exc:
            raise CorruptDataError(f"{path} is no Arrow file: {exc}") from exc
        self._lock = threading.Lock()

    def scan(self) -> "tuple[array[int], list[int]]":
        """Return where each record batch starts (a stream) or its number (a file), and the rows of each."""
        try:
            if self._file is not None:
                count = self._file.num_record_batches
                rows = [self._file.get_batch(i).num_rows for i in range(count)]
                return array("Q", range(count)), rows
            return self._scan_stream()
        except self._errors as exc:
            raise CorruptDataError(f"{self.path}: {exc}") from exc

    def batch(self, positions: "array[int]", number: int) -> Any:
        """Return a record batch that points into the mapping."""
        if self._file is not None:
            return self._file.get_batch(positions[number])
        with self._lock:
            self._map.seek(positions[number])
            message = self._ipc.read_message(self._map)
        return self._ipc.read_record_batch(message, self.schema)

    def _scan_stream(self) -> "tuple[array[int], list[int]]":
        positions, rows = array("Q"), list[int]()
        self._map.seek(0)
        self._ipc.read_message(self._map)  # the schema
        while self._map.tell() < self.size_bytes:
            start = self._map.tell()
            try:
                message = self._ipc.read_message(self._map)
            except EOFError:
                break  # the mark at the end
            if message.type == "dictionary":
                raise UsageError(
                    f"{self.path} is a stream with dictionary-encoded columns, which cannot be read by position",
                    hint="write it as an Arrow file (pyarrow.ipc.new_file) or as Parquet",
                )
            positions.append(start)
            rows.append(self._ipc.read_record_batch(message, self.schema).num_rows)
        return positions, rows

    def _has_footer(self) -> bool:
        start = self._map.read(len(FILE_MAGIC))
        self._map.seek(0)
        return bool(start == FILE_MAGIC)


class _MappedFiles:
    """The most recently used mappings of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _Mapped] = OrderedDict()

    def get(self, path: str, size_bytes: int, index: int) -> _Mapped:
        """Return a mapping whose file has its size still: to read beyond the end of one that shrank is fatal."""
        with self._lock:
            found = self._files.get(path)
            if found is None:
                found = self._files[path] = _Mapped(path, open_indexed(path, size_bytes, index))
                if len(self._files) > OPEN_MAX:
                    self._files.popitem(last=False)
            self._files.move_to_end(path)
        if found.file.current_size() != size_bytes:
            raise SourceChangedError(
                f"{path} has not {size_bytes} bytes any more (sample {index})", hint=_GONE
            )
        return found


_GONE = "put the file back, or make the source anew"


def _files_of(paths: Paths, split: str | None) -> tuple[list[str], str]:
    """Return the Arrow files of a saved dataset and its fingerprint, or the files that were named and ""."""
    if isinstance(paths, str | os.PathLike):
        folder = Path(paths).absolute()
        if (folder / SPLITS_FILE).is_file():
            folder /= _chosen(parse_splits(_json(folder / SPLITS_FILE)), split, folder)
        elif split is not None:
            raise UsageError(f"{folder} has no splits", hint="leave split= away")
        if (folder / STATE_FILE).is_file():
            names, fingerprint = parse_state(_json(folder / STATE_FILE))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise CorruptDataError(f"{folder / STATE_FILE} names {missing[0]}, which is not there")
            return [str(folder / name) for name in names], fingerprint
    return listed(paths, (".arrow",)), ""


def _chosen(splits: list[str], split: str | None, folder: Path) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        raise UsageError(
            f"{folder} has the splits {', '.join(splits)}, not {split}", hint="name one by split="
        )
    return split


def _json(path: Path) -> bytes:
    if path.stat().st_size > JSON_BYTES_MAX:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes")
    return path.read_bytes()
