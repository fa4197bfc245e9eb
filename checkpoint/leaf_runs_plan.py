"""Where the bytes of each leaf lie in the segment files of a shard, by the manifest and the files' own headers."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ..core.errors import CorruptDataError, IncompleteError
from .manifest_types import Manifest, Piece, SegmentRecord
from .segment_format import header_size_of, parse_header


class LeafRun(Struct, frozen=True, kw_only=True, gc=False):
    """Consecutive bytes [begin, end) of a leaf, and where they lie."""

    begin: int
    end: int
    segment: int
    file_offset_bytes: int


def leaf_runs(manifest: Manifest, headers: Mapping[int, bytes]) -> dict[str, tuple[LeafRun, ...]]:
    """Return the runs of each leaf in order; together they cover it exactly.

    `headers` holds of each segment at least its whole header.

    Raises:
        CorruptDataError: a header or a piece does not fit the manifest.
        IncompleteError: a segment has no header.
    """
    entries = {record.segment: _entries(record, headers) for record in manifest.segments}
    runs: dict[str, list[LeafRun]] = {leaf.name: [] for leaf in manifest.leaves}
    for piece in sorted(manifest.pieces, key=lambda piece: piece.offset_in_leaf_bytes):
        if piece.leaf not in runs:
            raise CorruptDataError(f"piece {piece.key!r} belongs to no leaf")
        runs[piece.leaf].append(_run(piece, entries))
    for leaf in manifest.leaves:
        _check_cover(leaf.name, leaf.size_bytes, runs[leaf.name])
    return {name: tuple(found) for name, found in runs.items()}


def _entries(record: SegmentRecord, headers: Mapping[int, bytes]) -> dict[str, tuple[int, int]]:
    """Return offset in the file and size of each entry of a segment."""
    header = headers.get(record.segment)
    if header is None:
        raise IncompleteError(f"segment {record.segment} of the checkpoint was not read")
    begin = header_size_of(header, record.file_size_bytes)
    _, entries = parse_header(header, record.file_size_bytes)
    return {entry.key: (begin + entry.begin, entry.end - entry.begin) for entry in entries}


def _run(piece: Piece, entries: Mapping[int, Mapping[str, tuple[int, int]]]) -> LeafRun:
    file_offset_bytes, size_bytes = entries.get(piece.segment, {}).get(piece.key, (0, None))
    if size_bytes != piece.size_bytes:
        raise CorruptDataError(
            f"segment {piece.segment} has no entry {piece.key!r} of {piece.size_bytes} bytes"
        )
    begin = piece.offset_in_leaf_bytes
    return LeafRun(
        begin=begin,
        end=begin + piece.size_bytes,
        segment=piece.segment,
        file_offset_bytes=file_offset_bytes,
    )


def _check_cover(leaf: str, size_bytes: int, runs: Sequence[LeafRun]) -> None:
    end = 0
    for run in runs:
        if run.begin != end:
            raise CorruptDataError(f"leaf {leaf!r} has no piece at byte {end}")
        end = run.end
    if end != size_bytes:
        raise CorruptDataError(f"the pieces of leaf {leaf!r} hold {end} of {size_bytes} bytes")
