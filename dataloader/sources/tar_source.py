"""WebDataset tar shards with random access, by an index of each that is built once."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...core.errors import EverstepError, SourceChangedError, UsageError
from .index_file import IndexHandle, file_stamp, index_path, is_as_stamped, open_or_build
from .index_format import Buffer, Index
from .open_files import OpenFile, files_per_process, read_indexed
from .parts_format import encode_parts
from .paths import Paths, joined_fingerprint, listed
from .protocol import checked_index
from .shard_plan import ShardTable
from .tar_format import BLOCK_BYTES, has_end, header_check, scan_members
from .tar_index_format import KIND, Part, check_tar_index, encode_tar_index, key_at, parts_at

logger = logging.getLogger(__name__)

BUILDERS = 8
"""Shards that are indexed at a time: on network storage each waits for its headers."""

KEY = "__key__"
"""Name of the part that holds a sample's key, as in WebDataset."""


class TarSource:
    """Samples of tar shards: files that follow each other with the same name up to the first dot are one sample.

    `get_bytes` returns one part of each sample where `part` names it; else all of them with the key in one piece
    that `read_parts` takes apart (parts_format.py). An index lies beside each shard, or in the directory `index`; it
    is built again when the shard's size or time has changed. The fingerprint covers keys, and of each member the size
    and header block, so also its time of modification; data changed under unchanged headers is not seen.

    Args:
        paths: shards: a path, a list, a folder, or a pattern like `train-{000..146}.tar`.
        part: the ending of the part that is wanted, in lower case ("jpg", "seg.png"), or several to choose from.
        index: a directory for the indices, for data that cannot be written to.

    Raises:
        UsageError: no shard, a compressed or sparse one, or no place for an index.
        CorruptDataError: a shard is damaged or cut off.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        part: str | Sequence[str] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        self._paths = listed(paths, (".tar",))
        self._wanted = None if part is None else (part,) if isinstance(part, str) else tuple(part)
        directory = None if index is None else os.fspath(index)

        def open_shard(path: str) -> IndexHandle:
            return _open_shard(path, directory)

        with ThreadPoolExecutor(min(BUILDERS, len(self._paths))) as pool:
            self._handles = list(pool.map(open_shard, self._paths))
        self._sizes = [handle.get().file_stamp().size_bytes for handle in self._handles]
        self._table = ShardTable(handle.count for handle in self._handles)
        self._files = files_per_process()

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return len(self._table)

    def get_bytes(self, index: int) -> bytes:
        """Return the wanted part, or all parts and the key in one piece; errors as in the protocol.

        UsageError where the sample has no part of that name.
        """
        if self._wanted is None:
            parts = self.get_parts(index)
            return encode_parts([(KEY, self.key(index).encode("utf-8", "surrogateescape")), *parts.items()])
        shard, number = self._locate(index)
        parts = parts_at(self._handles[shard].get(), number)
        named = {each.name: each for each in parts}
        for name in self._wanted:
            if name in named:
                return self._read(shard, named[name], index)
        raise UsageError(
            f"sample {index} ({self.key(index)!r} in {self._paths[shard]}) has no part "
            f"{' or '.join(self._wanted)}, only {', '.join(named)}",
            hint="give part= that every sample has, or none and use read_parts",
        )

    def get_parts(self, index: int) -> Mapping[str, bytes]:
        """Return name -> bytes of all parts of a sample."""
        shard, number = self._locate(index)
        parts = parts_at(self._handles[shard].get(), number)
        return {each.name: self._read(shard, each, index) for each in parts}

    def key(self, index: int) -> str:
        """Return the name of a sample up to its first dot, folders included."""
        shard, number = self._locate(index)
        return key_at(self._handles[shard].get(), number)

    def part_names(self, index: int) -> list[str]:
        """Return the names of the parts of a sample, in the order of the shard."""
        shard, number = self._locate(index)
        return [each.name for each in parts_at(self._handles[shard].get(), number)]

    def fingerprint(self) -> str:
        """Return a digest over the indices of all shards and the choice of parts."""
        return joined_fingerprint("tar-1", [*(each.digest for each in self._handles), *(self._wanted or ())])

    def files(self) -> Iterator[str]:
        """Yield the paths of the shards."""
        yield from dict.fromkeys(self._paths)

    def block_sizes(self) -> list[int]:
        """Return the number of samples of each shard."""
        return self._table.counts()

    def _locate(self, index: int) -> tuple[int, int]:
        return self._table.locate(checked_index(index, len(self._table), self))

    def _read(self, shard: int, part: Part, index: int) -> bytes:
        """Return a part's data, read together with the header before it, which must be the indexed one."""
        path = self._paths[shard]
        file = self._files.value().get(path, self._sizes[shard], index)
        data = read_indexed(file, part.offset - BLOCK_BYTES, part.size_bytes + BLOCK_BYTES, index)
        if header_check(data[:BLOCK_BYTES]) != part.check:
            raise SourceChangedError(
                f"{path} has another header before sample {index} (at {part.offset}) than when it was indexed",
                hint="make the source anew: it builds the index again",
            )
        return data[BLOCK_BYTES:]

    def __getstate__(self) -> dict[str, object]:
        """Return everything but open files."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what __getstate__ returned."""
        self.__dict__.update(state)
        self._files = files_per_process()


def _open_shard(path: str, directory: str | None) -> IndexHandle:
    def is_current(index: Index) -> bool:
        check_tar_index(index)
        return is_as_stamped(path, index.file_stamp())

    return open_or_build(index_path(path, directory), KIND, path, is_current, lambda: _build(path))


def _build(path: str) -> list[Buffer]:
    stamp = file_stamp(path, time.time())
    file = OpenFile(path)
    try:
        pieces = encode_tar_index(scan_members(file.read, file.size_bytes), [stamp])
    except EverstepError as exc:
        raise type(exc)(f"{path}: {exc.message}", hint=exc.hint) from exc
    if not has_end(file.read, file.size_bytes):
        logger.warning("tar_without_end path=%s its end may be cut off", path)
    return pieces
