"""Lines of JSONL files with random access, by an index of offsets beside each file."""

import os
import time
from collections.abc import Iterator

from ...core.errors import SourceChangedError, UsageError
from .index_file import IndexHandle, file_stamp, index_path, is_as_stamped, open_or_build
from .index_format import Buffer, Index
from .line_format import KIND, LineScanner, check_line_index, line_at, line_check
from .open_files import OpenFile, files_per_process, read_indexed
from .paths import Paths, joined_fingerprint, listed
from .protocol import checked_index
from .shard_plan import ShardTable

CHUNK_BYTES = 1 << 20
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class JsonlSource:
    """Each line that is not blank is a sample, without its line ending; nothing is parsed (line_format.py).

    Each file is read whole once, for its index: beside it, or in the directory `index`. It is built again when the
    file's size or time has changed. The fingerprint covers the contents of all lines by 32-bit checks, and each line
    is compared with its check when it is read.

    Args:
        paths: a path, a list, a folder (`*.jsonl`, `*.ndjson`), or a pattern like `part-*.jsonl`.
        index: a directory for the indices, for data that cannot be written to.

    Raises:
        UsageError: no file, a compressed one, or no place for an index.
    """

    def __init__(self, paths: Paths, *, index: str | os.PathLike[str] | None = None) -> None:
        self._paths = listed(paths, (".jsonl", ".ndjson"))
        directory = None if index is None else os.fspath(index)
        self._handles: list[IndexHandle] = [_open_file(path, directory) for path in self._paths]
        self._sizes = [handle.get().file_stamp().size_bytes for handle in self._handles]
        self._table = ShardTable(handle.count for handle in self._handles)
        self._files = files_per_process()

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._table)

    def get_bytes(self, index: int) -> bytes:
        """Return a line without its ending; errors as in the protocol."""
        shard, number = self._table.locate(checked_index(index, len(self._table), self))
        path = self._paths[shard]
        start, length, check = line_at(self._handles[shard].get(), number)
        file = self._files.value().get(path, self._sizes[shard], index)
        line = read_indexed(file, start, length, index)
        if line_check(line) != check:
            raise SourceChangedError(
                f"{path} has another line at {start} than when it was indexed (sample {index})",
                hint="make the source anew: it builds the index again",
            )
        return line

    def fingerprint(self) -> str:
        """Return a digest over the indices of all files."""
        return joined_fingerprint("jsonl-1", [handle.digest for handle in self._handles])

    def files(self) -> Iterator[str]:
        """Yield the paths of the files."""
        yield from dict.fromkeys(self._paths)

    def __getstate__(self) -> dict[str, object]:
        """Return everything but open files."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._files = files_per_process()


def _open_file(path: str, directory: str | None) -> IndexHandle:
    def is_current(index: Index) -> bool:
        check_line_index(index)
        return is_as_stamped(path, index.file_stamp())

    return open_or_build(index_path(path, directory), KIND, path, is_current, lambda: _build(path))


def _build(path: str) -> list[Buffer]:
    stamp = file_stamp(path, time.time())
    file = OpenFile(path)
    if file.read(0, 6).startswith(_COMPRESSED):
        raise UsageError(f"{path} is compressed", hint="decompress it: lines are read by position")
    scanner = LineScanner()
    for offset in range(
        0, stamp.size_bytes, CHUNK_BYTES
    ):  # what is appended meanwhile is left to the next opening
        scanner.feed(file.read(offset, min(CHUNK_BYTES, stamp.size_bytes - offset)))
    return scanner.encode([stamp])
