"""Where a stored state takes the bytes of its leaves from: an arena that holds them all, or what has been received."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..checkpoint.leaf_runs_plan import LeafRun, leaf_runs
from ..checkpoint.manifest_types import Manifest, SegmentRecord
from ..checkpoint.segment_format import header_size_of
from ..core.errors import CorruptDataError, IncompleteError
from .tensor_bytes import BufferPin, copy_bytes


class LeafBytes(Protocol):
    """The verified bytes of every leaf of one shard."""

    def read(self, leaf: str, begin: int, end: int, to_address: int) -> None:
        """Copy bytes [begin, end) of a leaf to consecutive memory; nothing where they lie there already."""
        ...

    def hand_over(self, leaf: str) -> torch.Tensor | None:
        """Return a tensor on the CPU that is exactly this leaf and the caller's from now on; None: read it."""
        ...

    def close(self) -> None:
        """Let the memory go; nothing can be read any more. Again is nothing."""
        ...


class ArenaLeaves:
    """Leaves in a buffer that holds whole segment files; it may be read-only, and cannot be closed before this is.

    `runs` says where each lies in the files.
    """

    def __init__(self, manifest: Manifest, buffer: memoryview, segment_offsets: Mapping[int, int]) -> None:
        """Read the segments' headers.

        Args:
            manifest: of this rank.
            buffer: a C-contiguous readable buffer (the slot's mapping, or whatever the files were read into).
            segment_offsets: number of each segment -> offset in the buffer of its file's first byte.

        Raises:
            CorruptDataError: a header or a piece does not fit the manifest or the buffer.
            IncompleteError: a segment has no place in the buffer.
        """
        headers = {record.segment: _header(record, buffer, segment_offsets) for record in manifest.segments}
        self.runs = leaf_runs(manifest, headers)
        self._offsets = dict(segment_offsets)
        self._pin = BufferPin(buffer)

    def read(self, leaf: str, begin: int, end: int, to_address: int) -> None:
        """See LeafBytes; every offset is checked again before memory is read."""
        for run in _overlapping(self.runs[leaf], begin, end):
            first, last = max(begin, run.begin), min(end, run.end)
            source = self._offsets[run.segment] + run.file_offset_bytes + first - run.begin
            if source + last - first > self._pin.size_bytes:
                raise CorruptDataError(f"leaf {leaf!r} lies outside of the buffer, or it was closed")
            copy_bytes(to_address + first - begin, self._pin.address + source, last - first)

    def hand_over(self, leaf: str) -> torch.Tensor | None:
        """See LeafBytes."""
        return None

    def close(self) -> None:
        """See LeafBytes."""
        self._pin.release()


def _overlapping(runs: Sequence[LeafRun], begin: int, end: int) -> Sequence[LeafRun]:
    first = max(0, bisect_right(runs, begin, key=lambda run: run.begin) - 1)
    return [run for run in runs[first:] if run.begin < end and begin < run.end]


def _header(record: SegmentRecord, buffer: memoryview, segment_offsets: Mapping[int, int]) -> bytes:
    """Return a segment's header out of the buffer, in which the whole file must lie."""
    offset = segment_offsets.get(record.segment)
    if offset is None:
        raise IncompleteError(f"segment {record.segment} of the checkpoint was not read")
    data = memoryview(buffer).cast("B")[offset : offset + record.file_size_bytes]
    if offset < 0 or len(data) != record.file_size_bytes:
        raise CorruptDataError(f"segment {record.segment} ends outside of the buffer")
    return bytes(data[: header_size_of(bytes(data[:8]), record.file_size_bytes)])
