"""The segments of one shard, read from all devices at once, every block verified before anybody sees it."""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ..core.errors import DataError, IncompleteError, NotFoundError
from .chunk_ring import RingClosedError
from .damage import record_damage
from .engine import Engine
from .manifest_types import BLOCK_SIZE_BYTES, Manifest, SegmentRecord
from .run_store import RunStore
from .segment_check import (
    Chunk,
    bad_block,
    check_segment_file,
    chunks_of,
    corrupt_block,
    corrupt_header,
    read_chunk,
)
from .segment_format import parse_header
from .storage_ops import ArenaRange, SegmentHandle

READERS_PER_DEVICE = 3
"""Two keep the device busy without a gap (engine_lanes has as many lanes), the third verifies meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes [begin, end) of a segment file."""

    segment: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSegment:
    """A segment file of the right size and stamp."""

    record: SegmentRecord
    handle: SegmentHandle
    header: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChunk:
    """A chunk and the segment that it is of."""

    segment: OpenSegment
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where chunks go. The functions are called by several threads; what they raise ends the reading."""

    arena: ArenaRange
    place: Callable[[ShardChunk], int]
    """Returns the offset in the slot for a chunk that is to be read; may wait, until `stop`: then RingClosedError."""
    deliver: Callable[[ShardChunk], None]
    """Takes a chunk that is read and verified; those of a segment come in any order."""
    stop: Callable[[], None] = lambda: None
    """The reading has failed."""


class ShardReader:
    """One shard, its files open. Keeps the checkpoint from being collected until `close`.

    What it finds broken is marked so in the run's catalogue: the checkpoint is offered no more.
    """

    def __init__(self, run: RunStore, manifest: Manifest) -> None:
        """Open the files and read their headers, which say where each piece lies; no data yet.

        Raises:
            CorruptDataError, IncompleteError: a file is not the one that was committed; the message names it.
            IncompleteError: the checkpoint was removed after its manifest was read.
            StorageError: a device failed.
        """
        self._run, self._manifest = run, manifest
        self._files = contextlib.ExitStack()
        try:
            self._files.enter_context(run.reading(manifest.checkpoint))
            _check_is_there(run, manifest)
            with self._marking_damage():
                self.segments = tuple(self._open(record) for record in manifest.segments)
        except BaseException:
            self.close()
            raise

    @property
    def device_count(self) -> int:
        """Number of devices that the shard lies on."""
        return len({segment.record.device_id for segment in self.segments})

    def chunks(self) -> list[ShardChunk]:
        """Return all chunks, in the order of the files."""
        return [
            ShardChunk(segment=segment, chunk=chunk)
            for segment in self.segments
            for chunk in chunks_of(segment.record, self._path(segment))
        ]

    def blocks_of(self, ranges: Iterable[FileRange]) -> list[ShardChunk]:
        """Return the single blocks that hold these ranges and the headers of their segments."""
        sizes = {segment.record.segment: segment.record.file_size_bytes for segment in self.segments}
        wanted: dict[int, set[int]] = {}
        for each in ranges:
            end = min(each.end, sizes.get(each.segment, 0))
            blocks = range(max(each.begin, 0) // BLOCK_SIZE_BYTES, -(-end // BLOCK_SIZE_BYTES))
            wanted.setdefault(each.segment, set()).update(blocks)
        return [
            ShardChunk(segment=segment, chunk=block)
            for segment in self.segments
            if segment.record.segment in wanted
            for block in chunks_of(segment.record, self._path(segment), chunk_size_bytes=BLOCK_SIZE_BYTES)
            if block.file_offset_bytes < len(segment.header)
            or block.file_offset_bytes // BLOCK_SIZE_BYTES in wanted[segment.record.segment]
        ]

    def read(self, chunks: Sequence[ShardChunk], target: Target, engines: Mapping[str, Engine]) -> int:
        """Read chunks; return how many were right only the second time: worth a look at the drive.

        `engines` holds one engine per device id, which several threads use at once.

        Raises:
            CorruptDataError: a block is not what was committed; the message names it.
            StorageError: a device failed.
            DeadlineError: a device hangs and may still write into the slot: do not use it again.
        """
        by_device: dict[str, list[ShardChunk]] = {}
        for chunk in chunks:
            by_device.setdefault(chunk.segment.record.device_id, []).append(chunk)
        stop = threading.Event()
        works = [
            _DeviceWork(self._run, engines[device], target, by_device[device], stop) for device in by_device
        ]
        workers = READERS_PER_DEVICE * len(works) or 1
        with self._marking_damage(), ThreadPoolExecutor(workers, thread_name_prefix="everstep-read") as pool:
            reading = [pool.submit(work.run) for work in works for _ in range(READERS_PER_DEVICE)]
            return sum(each.result() for each in reading)

    def close(self) -> None:
        """Close the files and let the checkpoint go. Again is nothing."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _marking_damage(self) -> Generator[None]:
        try:
            yield
        except DataError as exc:
            read = self._manifest
            record_damage(self._run, read.checkpoint, read.rank, exc, generation=read.generation)
            raise

    def _path(self, segment: OpenSegment) -> Path:
        return self._run.segment_path(segment.record)

    def _open(self, record: SegmentRecord) -> OpenSegment:
        ops, path = self._run.store.ops, self._run.segment_path(record)
        with self._run.store.watching(record.device_id):
            check_segment_file(ops, path, self._manifest, record)
            header = ops.read_head(path, record.header_size_bytes)
            handle = ops.open_segment_for_read(path)
            self._files.callback(ops.close, handle)
        try:
            parse_header(header, record.file_size_bytes)
        except DataError as exc:
            raise corrupt_header(path) from exc
        return OpenSegment(record=record, handle=handle, header=header)


def _check_is_there(run: RunStore, manifest: Manifest) -> None:
    """To be asked under `reading`: else files that a removal takes away meanwhile would look like a drive's fault."""
    try:
        run.shard(manifest.checkpoint, manifest.rank)
    except NotFoundError as error:
        raise IncompleteError(
            f"checkpoint {manifest.checkpoint} was removed while it was asked for",
            hint="restore another one",
        ) from error


class _DeviceWork:
    """The chunks of one device, which several threads take in their order."""

    def __init__(
        self,
        run: RunStore,
        engine: Engine,
        target: Target,
        chunks: Iterable[ShardChunk],
        stop: threading.Event,
    ) -> None:
        self._store = run.store
        self._engine, self._target, self._stop = engine, target, stop
        self._chunks = iter(chunks)
        self._lock = threading.Lock()

    def run(self) -> int:
        """Read and deliver until nothing is left or another thread has failed; return the count of second readings."""
        try:
            return self._run()
        except RingClosedError:
            if self._stop.is_set():  # by another thread, which says why
                return 0
            raise
        except BaseException:
            self._stop.set()
            self._target.stop()
            raise

    def _run(self) -> int:
        reread_count = 0
        while (found := self._next()) is not None:
            offset_bytes = self._target.place(found)
            placed = replace(found, chunk=replace(found.chunk, slot_offset_bytes=offset_bytes))
            with self._store.watching(found.segment.record.device_id):
                reread_count += self._read_verified(placed)
            self._target.deliver(placed)
        return reread_count

    def _next(self) -> ShardChunk | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._chunks, None)

    def _read_verified(self, found: ShardChunk) -> bool:
        """Read a chunk, again if it is not right: that tells a bad transfer from bad data. Tell whether it was."""
        again = self._read(found) is not None
        if again:
            bad = self._read(found)
            if bad is not None:
                raise corrupt_block(found.chunk.path, bad)
        self._check_header(found)
        return again

    def _read(self, found: ShardChunk) -> int | None:
        """Return the first block that is not what was committed."""
        read_chunk(self._store.ops, found.segment.handle, self._target.arena, found.chunk, self._engine)
        return bad_block(self._target.arena, found.chunk)

    def _check_header(self, found: ShardChunk) -> None:
        """Compare what was believed of the header with what has been verified now."""
        believed = found.segment.header[found.chunk.file_offset_bytes :][: found.chunk.size_bytes]
        with self._target.arena.view(found.chunk.slot_offset_bytes, len(believed)) as verified:
            if bytes(verified) != believed:
                raise corrupt_header(found.chunk.path)
