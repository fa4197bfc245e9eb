"""Lines of JSONL files with random access, by an index of offsets beside each file."""

import os
import time
from collections.abc import Iterator

from ...core.errors import SourceChangedError, UsageError
from .index_file import file_stamp
from .index_format import Buffer
from .indexed_files import IndexedFiles
from .line_format import KIND, LineScanner, check_line_index, line_at, line_check
from .open_files import open_data, read_indexed
from .paths import Paths, joined_fingerprint, listed
from .protocol import checked_index

CHUNK_BYTES = 1 << 20
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class JsonlSource:
    """Each line that is not blank is a sample, without its line ending; nothing is parsed (line_format.py).

        dataset = SourceDataset(JsonlSource("text.jsonl"), decode=json.loads)

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
        directory = None if index is None else os.fspath(index)
        self._files = IndexedFiles(
            listed(paths, (".jsonl", ".ndjson")), KIND, directory, check=check_line_index, build=_build
        )

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._files)

    def get_bytes(self, index: int) -> bytes:
        """Return a line without its ending; errors as in the protocol."""
        place = self._files.locate(checked_index(index, len(self._files), self))
        start, length, check = line_at(place.index, place.number)
        line = read_indexed(self._files.opened(place.file, index), start, length, index)
        if line_check(line) != check:
            raise SourceChangedError(
                f"{place.path} has another line at {start} than when it was indexed (sample {index})",
                hint="make the source anew: it builds the index again",
            )
        return line

    def fingerprint(self) -> str:
        """Return a digest over the indices of all files."""
        return joined_fingerprint("jsonl-1", self._files.digests())

    def files(self) -> Iterator[str]:
        """Yield the paths of the files."""
        return self._files.paths()


def _build(path: str) -> list[Buffer]:
    stamp = file_stamp(path, time.time())
    file = open_data(path)
    if file.read(0, 6).startswith(_COMPRESSED):
        raise UsageError(f"{path} is compressed", hint="decompress it: lines are read by position")
    if file.read(0, 2) in _UTF_16:
        raise UsageError(f"{path} is UTF-16", hint="store it as UTF-8: iconv -f UTF-16 -t UTF-8")
    scanner = LineScanner()
    for offset in range(
        0, stamp.size_bytes, CHUNK_BYTES
    ):  # what is appended meanwhile is left to the next opening
        scanner.feed(file.read(offset, min(CHUNK_BYTES, stamp.size_bytes - offset)))
    return scanner.encode([stamp])
