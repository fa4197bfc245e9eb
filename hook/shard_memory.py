"""Taking a shard out of memory that a daemon has kept: each block is verified, then copied while it is in the cache.

The trainer that died could write to its slot until then, so that no byte is used unverified.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import torch

from ..checkpoint.checksum import block_checksum
from ..checkpoint.manifest_types import BLOCK_SIZE_BYTES, Manifest, SegmentRecord
from ..checkpoint.segment_format import header_size_of
from ..core.errors import CorruptDataError, IncompleteError
from .leaf_bytes import ArenaLeaves
from .new_memory import NewMemory
from .received_leaves import ReceivedLeaves, copy_thread_count, of_components
from .tensor_bytes import BufferPin

Block = tuple[SegmentRecord, int]
"""A segment, and the number of a block of its file."""


class DamagedMemoryError(CorruptDataError):
    """What lies in memory is not what was sealed; the devices may have it intact."""


class ShardMemory:
    """The `LeafBytes` of a shard that lies whole in a buffer. What is read must have been received before."""

    def __init__(
        self,
        manifest: Manifest,
        buffer: memoryview,
        segment_offsets: Mapping[int, int],
        *,
        ahead: bool = True,
        unclaimed: Sequence[str] = (),
    ) -> None:
        """Verify the segments' headers, then read them.

        Args:
            manifest: of this rank.
            buffer: a C-contiguous readable buffer, which cannot be closed before this is.
            segment_offsets: number of each segment -> offset in the buffer of its file's first byte.
            ahead: what nobody claims is copied as well, to memory of its own. Else it is read where it lies, a leaf
                after the other, so that what goes on to a GPU is not in the host's memory twice.
            unclaimed: components of which nobody claims a leaf.

        Raises:
            DamagedMemoryError: a block with a header is not what was sealed.
            CorruptDataError: a header or a piece does not fit the manifest or the
                buffer.
            IncompleteError: a segment has no place in the buffer.
        """
        self._manifest, self._buffer, self._offsets = manifest, memoryview(buffer).cast("B"), segment_offsets
        self._ahead = ahead
        specs = {leaf.name: leaf for leaf in manifest.leaves}
        self._threads = _started_threads()
        new = NewMemory(specs, of_components(unclaimed, specs) if ahead else ())
        try:
            for record in manifest.segments:
                self._check_header(record)
            self._in_place = ArenaLeaves(manifest, buffer, segment_offsets)
        except BaseException:
            new.close()
            self._threads.shutdown()
            raise
        self._copied = ReceivedLeaves(manifest, self._in_place.runs, new)
        self._pin = BufferPin(buffer)

    @property
    def leaves(self) -> ReceivedLeaves:
        """Those that are copied, and may be claimed."""
        return self._copied

    def receive(self, components: Sequence[str] | None = None) -> None:
        """Return when the leaves of these components are verified; None: when all are, and copied where they belong.

        Raises:
            DamagedMemoryError: a block is not what was sealed; some bytes are in their places.
        """
        if components is not None:
            self._in_threads(self._check, self._blocks(self._copied.expect(components)))
            return
        self._copied.expect(claimed_only=not self._ahead)
        whole = [(record.segment, 0, record.file_size_bytes) for record in self._manifest.segments]
        self._in_threads(self._take, self._blocks(whole))
        self._copied.check_received()

    def read(self, leaf: str, begin: int, end: int, to_address: int) -> None:
        """See LeafBytes."""
        source = self._copied if self._copied.has(leaf) else self._in_place
        source.read(leaf, begin, end, to_address)

    def hand_over(self, leaf: str) -> torch.Tensor | None:
        """See LeafBytes."""
        return self._copied.hand_over(leaf) if self._copied.has(leaf) else None

    def close(self) -> None:
        """See LeafBytes."""
        self._threads.shutdown()
        self._copied.close()
        self._in_place.close()
        self._pin.release()
        self._buffer.release()  # an arena stays mapped as long as any view of it is there

    def _check_header(self, record: SegmentRecord) -> None:
        if record.segment not in self._offsets:
            raise IncompleteError(f"segment {record.segment} of the checkpoint was not read")
        self._check((record, 0))
        begin = self._offsets[record.segment]
        size_bytes = header_size_of(bytes(self._buffer[begin : begin + 8]), record.file_size_bytes)
        for block in range(1, -(-size_bytes // BLOCK_SIZE_BYTES)):
            self._check((record, block))

    def _blocks(self, ranges: Iterable[tuple[int, int, int]]) -> list[Block]:
        """Return the blocks that hold these ranges of segments' files, each once, in the order of the files."""
        records = {record.segment: record for record in self._manifest.segments}
        wanted = {
            (segment, block)
            for segment, begin, end in ranges
            for block in range(begin // BLOCK_SIZE_BYTES, -(-end // BLOCK_SIZE_BYTES))
        }
        return [(records[segment], block) for segment, block in sorted(wanted)]

    def _check(self, which: Block) -> tuple[int, int]:
        """Return a block's begin and size in its file; raise CorruptDataError when it is not what was sealed."""
        record, block = which
        begin = block * BLOCK_SIZE_BYTES
        size_bytes = min(BLOCK_SIZE_BYTES, record.file_size_bytes - begin)
        at = self._offsets[record.segment] + begin
        content = self._buffer[at : at + size_bytes]
        if at < 0 or len(content) != size_bytes:
            raise CorruptDataError(f"segment {record.segment} ends outside of the buffer")
        if block_checksum(content) != record.block_checksums[block]:
            raise DamagedMemoryError(f"block {block} of segment {record.segment} changed in memory")
        return begin, size_bytes

    def _in_threads(self, act: Callable[[Block], object], blocks: Sequence[Block]) -> None:
        """Do it to all blocks, several at once; what fails first is raised, and what has not begun is left."""
        doing = deque(self._threads.submit(act, block) for block in blocks)
        try:
            while doing:
                # Not kept: it and its failure's traceback would hold each other, and the buffer.
                doing.popleft().result()
        finally:
            wait([each for each in doing if not each.cancel()])
            doing.clear()

    def _take(self, which: Block) -> None:
        begin, size_bytes = self._check(which)
        segment = which[0].segment
        source = self._pin.address + self._offsets[segment] + begin
        self._copied.receive(segment, begin, source, size_bytes)


def _started_threads() -> ThreadPoolExecutor:
    """Return threads that are all there: made while memory is mapped ahead they waited, it seems for that.

    A restore of 74 MiB took 27.3 instead of 29.4 ms (2 cores, 2026-11-27, 21 of each in turn).
    """
    count = copy_thread_count()
    threads, all_there = ThreadPoolExecutor(count, thread_name_prefix="everstep-receive"), Barrier(count)
    try:
        wait([threads.submit(all_there.wait) for _ in range(count)])
    except BaseException:
        all_there.abort()
        threads.shutdown()
        raise
    return threads
