"""WebDataset tar shards with random access, by an index of each that is built once."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence

from ...core.errors import EverstepError, SourceChangedError, UsageError
from .index_file import file_stamp
from .index_format import Buffer
from .indexed_files import IndexedFiles, Place
from .open_files import open_data, read_indexed
from .parts_format import encode_parts
from .paths import Paths, joined_fingerprint, listed
from .protocol import checked_index
from .tar_format import BLOCK_BYTES, Member, goes_on, has_end, header_check, scan_members
from .tar_index_format import KIND, Part, check_tar_index, encode_tar_index, key_at, parts_at

logger = logging.getLogger(__name__)

BUILDERS = 8
"""Shards that are indexed at a time: on network storage each waits for its headers."""

KEY = "__key__"
"""Name of the part that holds a sample's key, as in WebDataset."""


class TarSource:
    """Samples of tar shards: files that follow each other with the same name up to the first dot are one sample.

        images = TarSource("shards/train-{000..146}.tar", part="jpg")

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
        self._wanted = None if part is None else (part,) if isinstance(part, str) else tuple(part)
        directory = None if index is None else os.fspath(index)
        self._shards = IndexedFiles(
            listed(paths, (".tar",)), KIND, directory, check=check_tar_index, build=_build, builders=BUILDERS
        )

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return len(self._shards)

    def get_bytes(self, index: int) -> bytes:
        """Return the wanted part, or all parts and the key in one piece; errors as in the protocol.

        UsageError where the sample has no part of that name.
        """
        if self._wanted is None:
            parts = self.get_parts(index)
            return encode_parts([(KEY, self.key(index).encode("utf-8", "surrogateescape")), *parts.items()])
        place = self._locate(index)
        named = {each.name: each for each in parts_at(place.index, place.number)}
        for name in self._wanted:
            if name in named:
                return self._read(place, named[name], index)
        raise UsageError(
            f"sample {index} ({self.key(index)!r} in {place.path}) has no part "
            f"{' or '.join(self._wanted)}, only {', '.join(named)}",
            hint="give part= that every sample has, or none and use read_parts",
        )

    def get_parts(self, index: int) -> Mapping[str, bytes]:
        """Return name -> bytes of all parts of a sample."""
        place = self._locate(index)
        return {each.name: self._read(place, each, index) for each in parts_at(place.index, place.number)}

    def key(self, index: int) -> str:
        """Return the name of a sample up to its first dot, folders included."""
        place = self._locate(index)
        return key_at(place.index, place.number)

    def part_names(self, index: int) -> list[str]:
        """Return the names of the parts of a sample, in the order of the shard."""
        place = self._locate(index)
        return [each.name for each in parts_at(place.index, place.number)]

    def fingerprint(self) -> str:
        """Return a digest over the indices of all shards and the choice of parts."""
        return joined_fingerprint("tar-1", [*self._shards.digests(), *(self._wanted or ())])

    def files(self) -> Iterator[str]:
        """Yield the paths of the shards."""
        return self._shards.paths()

    def block_sizes(self) -> list[int]:
        """Return the number of samples of each shard."""
        return self._shards.counts()

    def _locate(self, index: int) -> Place:
        return self._shards.locate(checked_index(index, len(self._shards), self))

    def _read(self, place: Place, part: Part, index: int) -> bytes:
        """Return a part's data, read together with the header before it, which must be the indexed one."""
        file = self._shards.opened(place.file, index)
        data = read_indexed(file, part.offset - BLOCK_BYTES, part.size_bytes + BLOCK_BYTES, index)
        if header_check(data[:BLOCK_BYTES]) != part.check:
            raise SourceChangedError(
                f"{place.path} has another header before sample {index} (at {part.offset}) than when it was indexed",
                hint="make the source anew: it builds the index again",
            )
        return data[BLOCK_BYTES:]


def _build(path: str) -> list[Buffer]:
    stamp = file_stamp(path, time.time())
    file = open_data(path)
    end = 0

    def members() -> Iterator[Member]:
        nonlocal end
        end = yield from scan_members(file.read, file.size_bytes)

    try:
        pieces = encode_tar_index(members(), [stamp])
    except EverstepError as exc:
        raise type(exc)(f"{path}: {exc.message}", hint=exc.hint) from exc
    if not has_end(file.read, file.size_bytes):
        logger.warning("tar_without_end path=%s its end may be cut off", path)
    elif (more := goes_on(file.read, end, file.size_bytes)) is not None:
        logger.warning(
            "tar_goes_on path=%s offset=%d what follows the end mark there is not read", path, more
        )
    return pieces
