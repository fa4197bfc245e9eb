"""Where a reader of leaves gets the files of segments from: the store itself, or whoever lends them."""

from typing import Protocol

from ..core.errors import CorruptDataError
from .damage import record_damage
from .engine import Engine
from .manifest_types import Manifest, SegmentRecord
from .run_store import RunStore
from .segment_check import check_segment_file
from .storage_ops import ArenaRange, SegmentHandle


class SegmentFiles(Protocol):
    """The committed segments of a run."""

    def open(self, manifest: Manifest, record: SegmentRecord) -> SegmentHandle:
        """Return a segment of this shard, opened for reading; its owner closes it by `close`.

        Raises:
            IncompleteError, NotFoundError: it or its device is not there.
            CorruptDataError: it is not what was committed, as far as size and stamp tell.
            StorageError: it cannot be read.
        """
        ...

    def read(
        self,
        handle: SegmentHandle,
        arena: ArenaRange,
        offset_bytes: int,
        size_bytes: int,
        engine: Engine,
        *,
        file_offset_bytes: int,
    ) -> None:
        """Read bytes of a segment to this place of the memory; StorageError where they cannot be."""
        ...

    def close(self, handle: SegmentHandle) -> None:
        """Let go of an opened segment."""
        ...

    def report(self, manifest: Manifest, error: CorruptDataError) -> None:
        """Take notice of a block of this shard that is not what was committed."""
        ...


class StoredSegments:
    """Those of a run in an opened store; a SegmentFiles."""

    def __init__(self, run: RunStore) -> None:
        self._run = run

    def open(self, manifest: Manifest, record: SegmentRecord) -> SegmentHandle:
        """See SegmentFiles."""
        path, ops = self._run.segment_path(record), self._run.store.ops
        check_segment_file(ops, path, manifest, record)
        return ops.open_segment_for_read(path)

    def read(
        self,
        handle: SegmentHandle,
        arena: ArenaRange,
        offset_bytes: int,
        size_bytes: int,
        engine: Engine,
        *,
        file_offset_bytes: int,
    ) -> None:
        """See SegmentFiles."""
        self._run.store.ops.read_segment(
            handle, arena, offset_bytes, size_bytes, engine, file_offset_bytes=file_offset_bytes
        )

    def close(self, handle: SegmentHandle) -> None:
        """See SegmentFiles."""
        self._run.store.ops.close(handle)

    def report(self, manifest: Manifest, error: CorruptDataError) -> None:
        """See SegmentFiles: this process offers the shard no more."""
        record_damage(self._run, manifest.checkpoint, manifest.rank, error, generation=manifest.generation)
