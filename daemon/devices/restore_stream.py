"""A shard on its way from the devices to a trainer: chunk by chunk, verified, through a ring of shared memory."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

from ...checkpoint.chunk_ring import ChunkRing, RingClosedError
from ...checkpoint.segment_check import CHUNK_SIZE_BYTES
from ...checkpoint.shard_reader import FileRange, ShardChunk, ShardReader, Target
from ...checkpoint.storage_ops import ArenaRange
from ...core.errors import DataError, EverstepError, UsageError
from ...proto import frames
from ..arena import Arena
from ..blocking import in_executor, in_thread
from ..registry import Lease

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

RING_CHUNKS_PER_DEVICE = 4
"""Two being read, one verified, one copied out."""
RING_CHUNKS_MIN = 8
"""On one device as many again, for when one of the two sides pauses."""
RING_CHUNKS_MAX = 64
"""1 GiB. The ring is allocated before anything is read (ADR 0025), so that it is no larger than it has to be."""


def ring_slots(reader: ShardReader) -> int:
    """Return how many slots the ring of a shard gets: none that would stay empty."""
    wanted = max(RING_CHUNKS_MIN, RING_CHUNKS_PER_DEVICE * reader.device_count)
    return max(1, min(len(reader.chunks()), wanted, RING_CHUNKS_MAX))


class RestoreStream:
    """From `Streaming` to `Release` or the end of the lease. Owned by the event loop."""

    def __init__(
        self, node: "Node", lease: Lease, reader: ShardReader, arena: Arena, threads: Executor
    ) -> None:
        self._node, self._lease, self._reader, self._arena = node, lease, reader, arena
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._ring = ChunkRing(len(arena.machine.slots), CHUNK_SIZE_BYTES)
        self._streams = lease.rank.streams
        self._streams[arena.number] = self
        self._reading: asyncio.Task[None] | None = None
        self._measured = node.metrics.restores.begin()

    def begin(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Read the blocks of these ranges, or everything.

        Raises:
            UsageError: it is being read already.
        """
        if self._reading is not None and not self._reading.done():
            raise UsageError(f"the shard of arena {self._arena.number} is being read already")
        self._measured.reading()
        self._reading = self._node.spawn(self._run(ranges), "streaming a shard")

    def taken(self, slot: int) -> None:
        """The trainer has copied a chunk."""
        self._ring.give(slot)

    def end(self) -> None:
        """The trainer has all it wants, or is gone: stop, and give the memory back when no device writes to it."""
        del self._streams[self._arena.number]
        self._measured.close()
        self._ring.close()
        self._node.arenas.close(self._arena, self._let_go)

    async def _let_go(self, arena_fd: int) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await in_thread(self._reader.close)
        await self._lease.rank.run.opened.forget_arena(arena_fd)

    async def _run(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        end = frames.StreamEnd(arena=self._arena.number, code="", message="", hint="")
        try:
            with self._lease.rank.run.opened.needed():
                await in_executor(self._threads, partial(self._read, ranges))
        except RingClosedError:
            return
        except EverstepError as error:
            end = self._failed(error)
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            end = self._failed(self._node.bug("streaming a shard", error))
        else:
            self._measured.done()
        self._send(end)

    def _read(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        reader, arena = self._reader, self._arena
        wanted = [FileRange(segment=segment, begin=begin, end=end) for segment, begin, end in ranges]
        with memoryview(arena.view) as view:
            target = Target(
                arena=ArenaRange(
                    fd=arena.fd, map=view, slot_offset_bytes=0, slot_size_bytes=arena.size_bytes
                ),
                place=lambda _: self._ring.take(),
                deliver=self._deliver,
                stop=self._ring.close,
            )
            chunks = reader.blocks_of(wanted) if ranges else reader.chunks()
            reader.read(chunks, target, self._lease.rank.run.opened.queues)

    def _deliver(self, found: ShardChunk) -> None:
        """Announce a chunk; called by the reading threads."""
        frame = frames.Chunk(
            arena=self._arena.number,
            slot=self._ring.deliver(found.chunk.slot_offset_bytes),
            segment=found.segment.record.segment,
            file_offset_bytes=found.chunk.file_offset_bytes,
            size_bytes=found.chunk.size_bytes,
        )
        self._measured.delivered(found.chunk.size_bytes)
        self._loop.call_soon_threadsafe(self._send, frame)

    def _failed(self, error: EverstepError) -> frames.StreamEnd:
        if isinstance(error, DataError):
            self._node.metrics.restores.failed_total.labels(error.code).inc()
        logger.error("restore_failed run=%s reason=%s", self._lease.rank.run.run_id, error)
        return frames.StreamEnd(
            arena=self._arena.number, code=error.code, message=error.message, hint=error.hint
        )

    def _send(self, frame: frames.Reply) -> None:
        if self._lease.is_valid:
            self._lease.holder.send(frame)
