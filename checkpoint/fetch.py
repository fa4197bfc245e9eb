"""Reading one shard back: from the devices into a slot, every byte verified before anybody sees it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..core.errors import CorruptDataError, DataError, MemoryRefusedError
from .engine import Engine
from .manifest_types import Manifest, Piece, SegmentRecord
from .run_store import RunStore
from .segment_check import Chunk, bad_block, check_segment_file, chunks_of, corrupt_block, read_chunk
from .segment_format import parse_header, slot_offsets
from .storage_ops import ArenaRange, SegmentHandle


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

    `engines` holds one engine per device id that nobody else uses during the call. After an error the slot's content
    is worthless; a data error also takes the checkpoint out of those that are offered.

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
    placed = list(zip(manifest.segments, offsets, strict=True))
    fetch = _Fetch(run, manifest, arena, engines)
    with run.reading(manifest.checkpoint):
        try:
            reread_count = fetch.read(placed)
            pieces = _place(manifest, arena, placed)
        except DataError as exc:
            run.mark_damaged(manifest.checkpoint, manifest.rank, str(exc))
            raise
    return FetchedShard(
        pieces=pieces,
        size_bytes=sum(record.file_size_bytes for record in manifest.segments),
        read_s=time.perf_counter() - started_s,
        reread_count=reread_count,
    )


class _Fetch:
    """Two threads per device: one reads chunk after chunk, the other checks what was read before."""

    def __init__(
        self, run: RunStore, manifest: Manifest, arena: ArenaRange, engines: Mapping[str, Engine]
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._arena = arena
        self._engines = engines

    def read(self, placed: Iterable[tuple[SegmentRecord, int]]) -> int:
        """Read and verify all segments, and return how many chunks had to be read twice."""
        by_device: dict[str, list[tuple[SegmentRecord, int]]] = {}
        for record, offset in placed:
            by_device.setdefault(record.device_id, []).append((record, offset))
        with ThreadPoolExecutor(len(by_device) or 1, thread_name_prefix="everstep-fetch") as pool:
            devices = [pool.submit(self._read_device, *each) for each in by_device.items()]
        return sum(device.result() for device in devices)

    def _read_device(self, device_id: str, placed: Sequence[tuple[SegmentRecord, int]]) -> int:
        ops, engine = self._run.store.ops, self._engines.get(device_id)
        reread_count = 0
        for record, offset in placed:
            path = self._run.segment_path(
                record
            )  # a missing device ends here, before its engine is asked for
            with self._run.store.watching(device_id):
                check_segment_file(ops, path, self._manifest, record)
                handle = ops.open_segment_for_read(path)
                try:
                    assert engine is not None, f"no engine for device {device_id}"
                    reread_count += self._read_segment(handle, chunks_of(record, path, offset), engine)
                finally:
                    ops.close(handle)
        return reread_count

    def _read_segment(self, handle: SegmentHandle, chunks: Sequence[Chunk], engine: Engine) -> int:
        with ThreadPoolExecutor(1, thread_name_prefix="everstep-check") as checker:
            checks: list[tuple[Chunk, Future[int | None]]] = []
            for chunk in chunks:
                read_chunk(self._run.store.ops, handle, self._arena, chunk, engine)
                checks.append((chunk, checker.submit(bad_block, self._arena, chunk)))
        bad = [chunk for chunk, check in checks if check.result() is not None]
        for chunk in bad:
            read_chunk(self._run.store.ops, handle, self._arena, chunk, engine)
            block = bad_block(self._arena, chunk)
            if block is not None:
                raise corrupt_block(chunk.path, block)
        return len(bad)


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
