"""Reading leaves of committed shards in bounded memory: every block is verified before one of its bytes is handed on.

For what reads a checkpoint without an arena as large as the state (export). The segment files are opened first and
stay open: retention of a daemon beside us may remove their names meanwhile, not their bytes.
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .checksum import first_bad_block
from .engine import EngineConfig
from .leaf_runs_plan import LeafRun, leaf_runs
from .manifest_types import BLOCK_SIZE_BYTES, Manifest, SegmentRecord
from .plain_engine import PlainEngine
from .segment_check import corrupt_block
from .segment_files import SegmentFiles
from .storage_ops import ArenaRange, SegmentHandle

BLOCKS_KEPT = 16
"""64 MiB: leaves of several ranks and segments take turns, and small ones share a block."""


@dataclass(frozen=True, slots=True)
class _Segment:
    manifest: Manifest
    record: SegmentRecord
    handle: SegmentHandle


class LeafReader:
    """Reads leaves of the shards of one checkpoint. For one thread; a context manager."""

    def __init__(self, files: SegmentFiles, manifests: Mapping[int, Manifest]) -> None:
        """Open every segment of these shards (by rank) and read their headers.

        Raises:
            IncompleteError: a segment or its device is not there.
            CorruptDataError: one is not what was committed.
            StorageError: one cannot be read.
        """
        self._files = files
        self._engine = PlainEngine(EngineConfig(block_size_bytes=BLOCK_SIZE_BYTES))
        self._kept: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self._segments: dict[tuple[int, int], _Segment] = {}
        self._runs: dict[tuple[int, str], tuple[LeafRun, ...]] = {}
        with ExitStack() as stack:
            self._arena = _scratch(stack, BLOCKS_KEPT * BLOCK_SIZE_BYTES)
            stack.callback(self._engine.close)
            for rank, manifest in manifests.items():
                headers: dict[int, bytes] = {}
                for record in manifest.segments:
                    segment = self._open(stack, manifest, record)
                    self._segments[rank, record.segment] = segment
                    headers[record.segment] = self._header(segment)
                for leaf, runs in leaf_runs(manifest, headers).items():
                    self._runs[rank, leaf] = runs
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, rank: int, leaf: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes [begin, end) of a leaf in storage order; each view holds until the next one is asked for.

        Raises:
            CorruptDataError: a block is not what was committed; the checkpoint is not offered again by this process.
            StorageError: a device failed.
        """
        for run in self._runs.get((rank, leaf), ()):
            first, last = max(begin, run.begin), min(end, run.end)
            if first < last:
                at = run.file_offset_bytes + first - run.begin
                yield from self._file_bytes(self._segments[rank, run.segment], at, at + last - first)

    def _open(self, stack: ExitStack, manifest: Manifest, record: SegmentRecord) -> _Segment:
        handle = self._files.open(manifest, record)
        stack.callback(self._files.close, handle)
        return _Segment(manifest, record, handle)

    def _header(self, segment: _Segment) -> bytes:
        """Return a segment's header, verified like all that it describes."""
        return b"".join(map(bytes, self._file_bytes(segment, 0, segment.record.header_size_bytes)))

    def _file_bytes(self, segment: _Segment, begin: int, end: int) -> Iterator[memoryview]:
        for block in range(begin // BLOCK_SIZE_BYTES, -(-end // BLOCK_SIZE_BYTES)):
            base = block * BLOCK_SIZE_BYTES
            first, last = max(begin, base), min(end, base + BLOCK_SIZE_BYTES)
            slot = self._verified(segment, block)
            with self._arena.view(slot * BLOCK_SIZE_BYTES + first - base, last - first) as view:
                yield view

    def _verified(self, segment: _Segment, block: int) -> int:
        """Return where in the scratch memory a block lies, read and verified now or before."""
        record = segment.record
        key = (record.generation, record.segment, block)
        slot = self._kept.pop(key, None)
        if slot is None:
            slot = self._kept.popitem(last=False)[1] if len(self._kept) == BLOCKS_KEPT else len(self._kept)
            self._read_block(segment, block, slot)
        self._kept[key] = slot
        return slot

    def _read_block(self, segment: _Segment, block: int, slot: int) -> None:
        """Read a block; one that is wrong is read once more, as a restore does."""
        record, base = segment.record, block * BLOCK_SIZE_BYTES
        size = min(BLOCK_SIZE_BYTES, record.file_size_bytes - base)
        expected = record.block_checksums[block : block + 1]
        for _ in range(2):
            self._files.read(
                segment.handle,
                self._arena,
                slot * BLOCK_SIZE_BYTES,
                size,
                self._engine,
                file_offset_bytes=base,
            )
            with self._arena.view(slot * BLOCK_SIZE_BYTES, size) as view:
                if first_bad_block(view, size, expected) is None:
                    return
        error = corrupt_block(segment.handle.path, block)
        self._files.report(segment.manifest, error)
        raise error


def _scratch(stack: ExitStack, size_bytes: int) -> ArenaRange:
    """Return memory as an engine wants it, given back by the stack."""
    fd = os.memfd_create("everstep-read", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    os.ftruncate(fd, size_bytes)
    mapping = stack.enter_context(mmap.mmap(fd, size_bytes))
    view = memoryview(mapping)
    stack.callback(view.release)
    return ArenaRange(fd=fd, map=view, slot_offset_bytes=0, slot_size_bytes=size_bytes)
