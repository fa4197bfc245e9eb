"""Whether a segment file is the one that a manifest lists: by size and stamp, and block by block while it is read."""

from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CorruptDataError, DataError, IncompleteError
from .checksum import first_bad_block
from .engine import Engine
from .manifest_types import BLOCK_SIZE_BYTES, ManifestHead, SegmentRecord
from .segment_format import STAMP_PREFIX_BYTES, header_size_of, read_stamp
from .storage_ops import ArenaRange, FileKind, SegmentHandle, StorageOps

CHUNK_SIZE_BYTES = 4 * BLOCK_SIZE_BYTES
"""Read in one call: with two calls at once the device's queue never runs empty, and it is checked beside the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some whole blocks of a segment file (the last chunk ends where the file does), and their place in a slot."""

    path: Path
    file_offset_bytes: int
    size_bytes: int
    slot_offset_bytes: int
    expected: tuple[int, ...]
    """Checksums of its blocks."""


def chunks_of(
    record: SegmentRecord, path: Path, *, chunk_size_bytes: int = CHUNK_SIZE_BYTES
) -> tuple[Chunk, ...]:
    """Return the chunks of a segment, in order, each of whole blocks and at the beginning of the slot."""
    return tuple(
        Chunk(
            path=path,
            file_offset_bytes=offset,
            size_bytes=min(chunk_size_bytes, record.file_size_bytes - offset),
            slot_offset_bytes=0,
            expected=record.block_checksums[
                offset // BLOCK_SIZE_BYTES : (offset + chunk_size_bytes) // BLOCK_SIZE_BYTES
            ],
        )
        for offset in range(0, record.file_size_bytes, chunk_size_bytes)
    )


def read_chunk(
    ops: StorageOps, handle: SegmentHandle, arena: ArenaRange, chunk: Chunk, engine: Engine
) -> None:
    """Read a chunk to its place in the slot; what was read is not checked yet."""
    ops.read_segment(
        handle,
        arena,
        chunk.slot_offset_bytes,
        chunk.size_bytes,
        engine,
        file_offset_bytes=chunk.file_offset_bytes,
    )


def bad_block(arena: ArenaRange, chunk: Chunk) -> int | None:
    """Return the index in the file of the first block that is not what was committed, or None."""
    with arena.view(chunk.slot_offset_bytes, chunk.size_bytes) as view:
        bad = first_bad_block(view, chunk.size_bytes, chunk.expected)
    return None if bad is None else chunk.file_offset_bytes // BLOCK_SIZE_BYTES + bad


def corrupt_header(path: Path) -> CorruptDataError:
    """Return the error that names the file."""
    return CorruptDataError(
        f"{path}: the header is not what was committed",
        hint="restore an older checkpoint, and look at the drive",
    )


def corrupt_block(path: Path, block: int) -> CorruptDataError:
    """Return the error that names file and block."""
    return CorruptDataError(
        f"{path}: block {block} (from byte {block * BLOCK_SIZE_BYTES} on) is not what was committed",
        hint="restore an older checkpoint, and look at the drive",
    )


def check_segment_file(ops: StorageOps, path: Path, head: ManifestHead, record: SegmentRecord) -> None:
    """Return if the file has the recorded size and the stamp of this very write; its data are not read.

    Raises:
        IncompleteError: it is gone.
        CorruptDataError: it does not; the message names the file.
        StorageError: it cannot be read.
    """
    found = ops.stat(path)
    if found is None:
        raise IncompleteError(f"{path} is gone", hint="restore an older checkpoint")
    if found.kind is not FileKind.REGULAR:
        raise CorruptDataError(f"{path} is no regular file")
    if found.size_bytes != record.file_size_bytes:
        raise CorruptDataError(f"{path} has {found.size_bytes} bytes, expected {record.file_size_bytes}")
    prefix = ops.read_head(path, STAMP_PREFIX_BYTES)
    try:
        header_bytes = header_size_of(prefix, found.size_bytes)
        stamp = read_stamp(prefix)
    except DataError as exc:
        raise CorruptDataError(f"{path}: {exc.message}") from exc
    same = (header_bytes, stamp.run_id, stamp.generation, stamp.segment) == (
        record.header_size_bytes,
        head.run_id,
        record.generation,
        record.segment,
    )
    if record.generation == head.generation:
        same = same and (stamp.checkpoint, stamp.rank) == (head.checkpoint, head.rank)
    if not same:
        raise CorruptDataError(
            f"{path} carries the stamp of segment {stamp.segment}, rank {stamp.rank}, checkpoint"
            f" {stamp.checkpoint}, generation {stamp.generation}: it is not the file that was committed"
        )
