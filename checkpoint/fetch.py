"""Reading one shard back: from the devices into a slot, every byte verified before anybody sees it."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core.errors import CorruptDataError, DataError, MemoryRefusedError
from .damage import record_damage
from .engine import Engine
from .manifest_types import Manifest, Piece, SegmentRecord
from .run_store import RunStore
from .segment_format import parse_header, slot_offsets
from .shard_reader import ShardReader, Target
from .storage_ops import ArenaRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPiece:
    """Where the bytes of a piece of a leaf lie in the slot."""

    leaf: str
    offset_in_leaf_bytes: int
    slot_offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedShard:
    """A shard in memory, verified."""

    pieces: tuple[PlacedPiece, ...]
    """In the order of the manifest's."""
    size_bytes: int
    read_s: float
    """From the call to the last verified byte."""
    reread_count: int
    """Chunks that were right only the second time: worth a look at the drive."""


def shard_slot_offsets(manifest: Manifest) -> tuple[tuple[int, ...], int]:
    """Return where each of the manifest's segments goes in a slot, and the room they need: the layout's own rule."""
    return slot_offsets(record.file_size_bytes for record in manifest.segments)


def read_shard(
    run: RunStore, manifest: Manifest, arena: ArenaRange, *, engines: Mapping[str, Engine]
) -> FetchedShard:
    """Return when the shard's segments lie in the slot (at `shard_slot_offsets`) and every block has been verified.

    `engines` holds one engine per device id, each for several threads at once. After an error the slot's content is
    worthless; a data error also takes the checkpoint out of those that are offered.

    Raises:
        CorruptDataError: a file is not what was committed; the message names it and the block.
        IncompleteError: a segment or its device is not there.
        MemoryRefusedError: the slot is too small.
        StorageError: a device failed.
        DeadlineError: a device hangs and may still write into the slot: do not use it again.
    """
    started_s = time.perf_counter()
    offsets, needed_bytes = shard_slot_offsets(manifest)
    if needed_bytes > arena.slot_size_bytes:
        raise MemoryRefusedError(
            f"the shard needs {needed_bytes} bytes, its slot has {arena.slot_size_bytes}",
            hint="make an arena for this checkpoint",
        )
    begin = {record.segment: offset for record, offset in zip(manifest.segments, offsets, strict=True)}
    target = Target(
        arena=arena,
        place=lambda found: begin[found.segment.record.segment] + found.chunk.file_offset_bytes,
        deliver=lambda _: None,
    )
    with ShardReader(run, manifest) as reader:
        reread_count = reader.read(reader.chunks(), target, engines)
        try:
            pieces = _place(manifest, arena, zip(manifest.segments, offsets, strict=True))
        except DataError as exc:
            record_damage(run, manifest.checkpoint, manifest.rank, exc, generation=manifest.generation)
            raise
    return FetchedShard(
        pieces=pieces,
        size_bytes=sum(record.file_size_bytes for record in manifest.segments),
        read_s=time.perf_counter() - started_s,
        reread_count=reread_count,
    )


def _place(
    manifest: Manifest, arena: ArenaRange, placed: Iterable[tuple[SegmentRecord, int]]
) -> tuple[PlacedPiece, ...]:
    """Return where each piece lies, by the headers that were just verified."""
    found: dict[tuple[str, int, str], tuple[int, int]] = {}
    for record, offset in placed:
        with arena.view(offset, record.header_size_bytes) as header:
            _, entries = parse_header(bytes(header), record.file_size_bytes)
        data = offset + record.header_size_bytes
        for entry in entries:
            key = (record.generation, record.segment, entry.key)
            found[key] = (data + entry.begin, entry.end - entry.begin)
    return tuple(_placed_piece(piece, found) for piece in manifest.pieces)


def _placed_piece(piece: Piece, found: Mapping[tuple[str, int, str], tuple[int, int]]) -> PlacedPiece:
    place = found.get((piece.generation, piece.segment, piece.key))
    if place is None or place[1] != piece.size_bytes:
        raise CorruptDataError(
            f"segment {piece.segment} of generation {piece.generation} has no entry {piece.key!r}"
            f" of {piece.size_bytes} bytes"
        )
    return PlacedPiece(
        leaf=piece.leaf,
        offset_in_leaf_bytes=piece.offset_in_leaf_bytes,
        slot_offset_bytes=place[0],
        size_bytes=piece.size_bytes,
    )
