"""Reading every block of a checkpoint and comparing it with what was committed; needs no daemon and little memory."""

import mmap
import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ..core.errors import CorruptDataError, DataError, StorageError
from ..core.ids import CheckpointId
from .catalogue import disagreements
from .damage import clear_damage, record_damage
from .engine import Engine
from .manifest_types import Manifest, SegmentRecord
from .plain_engine import PlainEngine
from .run_store import RunStore
from .segment_check import (
    CHUNK_SIZE_BYTES,
    Chunk,
    bad_block,
    check_segment_file,
    chunks_of,
    corrupt_block,
    read_chunk,
)
from .segment_format import parse_header
from .storage_ops import ArenaRange, SegmentHandle, StorageOps


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentVerdict:
    """What reading a segment showed."""

    rank: int
    segment: int
    device: str
    """Path of its device."""
    path: str
    size_bytes: int
    bad_block: int | None = None
    """Index of the first 4 MiB block that is not what was committed."""
    error: DataError | StorageError | None = None
    """None when every byte is what was committed."""

    @property
    def problem(self) -> str:
        """The error as text; empty when there is none."""
        return "" if self.error is None else str(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerdict:
    """What reading a checkpoint showed."""

    checkpoint: CheckpointId
    segments: tuple[SegmentVerdict, ...]
    problems: tuple[str, ...]
    """Of its manifests, and of what they say together."""

    @property
    def is_intact(self) -> bool:
        """Tell whether all that is here is what was committed."""
        return not self.problems and not any(segment.problem for segment in self.segments)


def verify_checkpoint(
    run: RunStore, checkpoint: CheckpointId, *, engines: Mapping[str, Engine] | None = None
) -> CheckpointVerdict:
    """Return what every byte of the checkpoint's shards is worth; damaged ones are offered no more.

    What an earlier reading has shown of a shard that is intact is taken back.

    `engines` (one per device id, nobody else's during the call) make it faster; without them files are read block by
    block, with direct I/O where they can do it. Takes 16 MiB of memory per device.

    Raises:
        NotFoundError: no such checkpoint here.
    """
    info = run.info(checkpoint)
    segments: list[SegmentVerdict] = []
    with run.reading(checkpoint):
        problems = disagreements([run.shard(checkpoint, rank) for rank in info.ranks])
        for rank in info.ranks:
            generation = run.shard(checkpoint, rank).generation
            try:
                manifest = run.manifest(checkpoint, rank)
            except (DataError, StorageError) as exc:
                problems.append(str(exc))
                mark = run.mark_unread if isinstance(exc, StorageError) else run.mark_damaged
                mark(checkpoint, rank, str(exc), generation=generation)
                continue
            found = _verify_shard(run, manifest, engines or {})
            segments += found
            _remember(run, manifest, [segment.error for segment in found if segment.error is not None])
    return CheckpointVerdict(checkpoint=checkpoint, segments=tuple(segments), problems=tuple(problems))


def _remember(run: RunStore, manifest: Manifest, errors: Sequence[DataError | StorageError]) -> None:
    """Remember what a shard is worth; of several errors one that a restart would not show by itself."""
    checkpoint, rank, generation = manifest.checkpoint, manifest.rank, manifest.generation
    if errors:
        worst = min(
            errors,
            key=lambda error: (not isinstance(error, CorruptDataError), isinstance(error, StorageError)),
        )
        record_damage(run, checkpoint, rank, worst, generation=generation)
    else:
        clear_damage(run, checkpoint, rank, generation=generation)


def _verify_shard(run: RunStore, manifest: Manifest, engines: Mapping[str, Engine]) -> list[SegmentVerdict]:
    by_device: dict[str, list[SegmentRecord]] = {}
    for record in manifest.segments:
        by_device.setdefault(record.device_id, []).append(record)

    def verify_device(device_id: str) -> list[SegmentVerdict]:
        with _scratch() as arena, _engine(engines.get(device_id), arena) as engine:
            return [_verify_segment(run, manifest, record, arena, engine) for record in by_device[device_id]]

    with ThreadPoolExecutor(len(by_device) or 1, thread_name_prefix="everstep-verify") as pool:
        found = [verdict for verdicts in pool.map(verify_device, by_device) for verdict in verdicts]
    return sorted(found, key=lambda verdict: verdict.segment)


def _verify_segment(
    run: RunStore, manifest: Manifest, record: SegmentRecord, arena: ArenaRange, engine: Engine
) -> SegmentVerdict:
    path, bad = "", None
    error: DataError | StorageError | None = None
    try:
        path = str(run.segment_path(record))
        bad = _first_bad_block(run, manifest, record, arena, engine)
        if bad is not None:
            error = corrupt_block(run.segment_path(record), bad)
    except (DataError, StorageError) as exc:
        error = (_away(run, record) or exc).with_traceback(None)
    return SegmentVerdict(
        rank=manifest.rank,
        segment=record.segment,
        device=run.store.device_name(record.device_id),
        path=path,
        size_bytes=record.file_size_bytes,
        bad_block=bad,
        error=error,
    )


def _away(run: RunStore, record: SegmentRecord) -> StorageError | None:
    """Return that the whole device is not where it was, which says more than that one of its files is not."""
    device = run.store.device(record.device_id)
    try:
        if device is not None:
            run.store.check_in_place(device)
    except StorageError as exc:
        return exc
    return None


def _first_bad_block(
    run: RunStore, manifest: Manifest, record: SegmentRecord, arena: ArenaRange, engine: Engine
) -> int | None:
    ops, path = run.store.ops, run.segment_path(record)
    check_segment_file(ops, path, manifest, record)
    handle = ops.open_segment_for_read(path)
    try:
        for chunk in chunks_of(record, path):
            bad = _bad_block(ops, handle, arena, chunk, engine)
            if bad is not None:  # again: that tells a bad transfer from bad data
                bad = _bad_block(ops, handle, arena, chunk, engine)
            if bad is not None:
                return bad
    finally:
        ops.close(handle)
    _check_pieces(manifest, record, ops.read_head(path, record.header_size_bytes))
    return None


def _bad_block(
    ops: StorageOps, handle: SegmentHandle, arena: ArenaRange, chunk: Chunk, engine: Engine
) -> int | None:
    read_chunk(ops, handle, arena, chunk, engine)
    return bad_block(arena, chunk)


def _check_pieces(manifest: Manifest, record: SegmentRecord, header: bytes) -> None:
    """Return if the segment has every piece that the manifest says it has; CorruptDataError names the first other."""
    _, entries = parse_header(header, record.file_size_bytes)
    sizes = {entry.key: entry.end - entry.begin for entry in entries}
    for piece in manifest.pieces:
        here = (piece.generation, piece.segment) == (record.generation, record.segment)
        if here and sizes.get(piece.key) != piece.size_bytes:
            raise CorruptDataError(
                f"segment {record.segment} of generation {record.generation} has no entry {piece.key!r}"
                f" of {piece.size_bytes} bytes"
            )


@contextmanager
def _scratch() -> Generator[ArenaRange]:
    """Give memory for one chunk, as an engine wants it."""
    fd = os.memfd_create("everstep-verify", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, CHUNK_SIZE_BYTES)
        with mmap.mmap(fd, CHUNK_SIZE_BYTES) as mapping, memoryview(mapping) as view:
            yield ArenaRange(fd=fd, map=view, slot_offset_bytes=0, slot_size_bytes=CHUNK_SIZE_BYTES)
    finally:
        os.close(fd)


@contextmanager
def _engine(given: Engine | None, arena: ArenaRange) -> Generator[Engine]:
    """Give the engine to use; it forgets the scratch memory afterwards."""
    engine = given or PlainEngine()
    try:
        yield engine
    finally:
        engine.forget(arena.fd)
        if given is None:
            engine.close()
