"""Giving a shard back: from the memory of a crashed trainer's arena, else from the devices; verified in both cases."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from ...checkpoint.catalogue import CheckpointInfo
from ...checkpoint.checksum import first_bad_block
from ...checkpoint.lineage_plan import WENT_BACK_NOTE
from ...checkpoint.manifest_format import decode_manifest
from ...checkpoint.segment_check import CHUNK_SIZE_BYTES
from ...checkpoint.shard_reader import ShardReader
from ...core.errors import CorruptDataError, DataError
from ...core.ids import CheckpointId
from ...proto import frames
from ..admission_plan import Wish
from ..arena import Arena
from ..blocking import in_executor, in_thread
from ..registry import Lease, RankRecord, Snapshot
from .restore_stream import RestoreStream, ring_slots

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

OTHERS_WAIT_S = 120.0
"""For what other ranks had sealed: a drive that is late is left behind by then, one that hangs for ever may not be."""
STREAMS_MAX = 256
"""Shards on their way at once: one for each rank of a node, and more. Threads are made when needed."""


class Restorer:
    """Answers what can be restored, and brings it."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        # Of their own: a trainer that takes no chunks must not hold the threads that all others need.
        self._streaming = ThreadPoolExecutor(STREAMS_MAX, thread_name_prefix="everstep-stream")

    async def offers(self, rank: RankRecord, request_id: int) -> frames.Offers:
        """Return every checkpoint that this rank might restore, the newest first, and what is set aside.

        What a dead trainer sealed is on its way to the devices: its end is awaited, so that what is offered is
        known to be whole in memory or on disk. So is what other ranks' have, which may be more than there are now.
        """
        await self._node.persister.settled(rank)
        await self._others_settled(rank)
        store = rank.run.store
        floor = store.fresh_floor()
        offers = {info.checkpoint: _offer(info) for info in store.checkpoints()}
        for checkpoint, problem in store.lost.items():
            if checkpoint not in offers:
                offers[checkpoint] = _lost_offer(checkpoint, problem)
        for (number, _), snapshot in rank.snapshots.items():
            if rank.arenas[number].shared_with_dead:
                continue
            if snapshot.world_size == rank.world_size:
                known = offers.get(snapshot.checkpoint)
                offers[snapshot.checkpoint] = frames.Offer(
                    attempt=snapshot.checkpoint.attempt,
                    step=snapshot.checkpoint.step,
                    world_size=snapshot.world_size,
                    shards=known.shards if known else [],
                    in_memory=True,
                    problem="",
                    turns=snapshot.draft.notes.get(WENT_BACK_NOTE, ""),
                )
        newest_first = sorted(offers, reverse=True)
        left = {checkpoint for checkpoint in newest_first if store.is_set_aside(checkpoint)}
        items = [offers[checkpoint] for checkpoint in newest_first if checkpoint not in left]
        set_aside = [offers[checkpoint] for checkpoint in newest_first if checkpoint in left]
        complete = store.complete_floor()
        had_complete = complete is not None and complete.attempt >= floor
        return frames.Offers(re=request_id, items=items, had_complete=had_complete, set_aside=set_aside)

    async def _others_settled(self, rank: RankRecord) -> None:
        """Wait for what other ranks had sealed at another world size: all of its parts are needed, whoever comes back.

        Who asks has begun no checkpoint yet, so that what is written is of attempts before: of any of them, since
        who took the run up since then may have ended without one.
        """
        others = [each for each in rank.run.ranks.values() if each.writing_world_sizes - {rank.world_size}]
        try:
            async with asyncio.timeout(OTHERS_WAIT_S):
                for each in others:
                    await self._node.persister.settled(each)
        except TimeoutError:
            logger.warning("offers_incomplete run=%s waited_s=%.0f", rank.run.run_id, OTHERS_WAIT_S)

    async def fetch(self, lease: Lease, frame: frames.Fetch) -> tuple[frames.Fetched | frames.Streaming, int]:
        """Return one shard: in the arena where it is, else the begin of its stream from the devices.

        The trainer verifies what it takes out of memory; what it finds damaged it asks for again, from the devices.

        Raises:
            CorruptDataError: file and block are named; the catalogue remembers it.
            NotFoundError: it is neither in memory nor on the devices.
        """
        checkpoint = CheckpointId(frame.attempt, frame.step)
        self._node.reporter.fetching(lease.rank, checkpoint)
        self._node.traces.restore_begun(lease.rank, checkpoint)
        await self._node.persister.settled(lease.rank)  # what is written again has other headers meanwhile
        found = self._in_memory(lease.rank, checkpoint) if frame.rank == lease.rank.rank else None
        if frame.from_devices:
            self._node.metrics.restores.failed_total.labels(CorruptDataError.__name__).inc()
            logger.error("memory_damaged run=%s checkpoint=%s", lease.rank.run.run_id, checkpoint)
        elif found is not None:
            return self._from_memory(lease, *found, frame.request_id)
        try:
            return await self._from_disk(lease, checkpoint, frame)
        except DataError as error:
            self._node.metrics.restores.failed_total.labels(error.code).inc()
            raise

    async def manifest(self, rank: RankRecord, frame: frames.GetManifest) -> frames.ManifestBytes:
        """Return a committed shard's manifest."""
        checkpoint = CheckpointId(frame.attempt, frame.step)
        async with rank.for_manifests.answering(self._node.rests_beside(rank)) as answer:
            read = answer.timed(rank.run.store.manifest_content)
            encoded = await in_thread(read, checkpoint, frame.rank)
        return frames.ManifestBytes(re=frame.request_id, manifest=encoded)

    def _in_memory(self, rank: RankRecord, checkpoint: CheckpointId) -> tuple[Arena, Snapshot] | None:
        for (number, _), snapshot in rank.snapshots.items():
            arena = rank.arenas[number]
            if snapshot.checkpoint == checkpoint and not arena.shared_with_dead:
                return arena, snapshot
        return None

    def _from_memory(
        self, lease: Lease, arena: Arena, snapshot: Snapshot, request_id: int
    ) -> tuple[frames.Fetched, int]:
        """Return where the snapshot lies."""
        lease.check()
        rank = lease.rank
        rank.current = arena.number
        if arena.stored is not None:
            arena.stored.state.add_mapper(lease.holder.pid)
        usable = arena.machine.offer_anew()
        for slot in usable:
            arena.forget(slot)  # the trainer may write there from now on
        logger.info(
            "restore_from_memory run=%s rank=%d checkpoint=%s",
            rank.run.run_id,
            rank.rank,
            snapshot.checkpoint,
        )
        fetched = frames.Fetched(
            re=request_id,
            arena=arena.number,
            arena_size_bytes=arena.size_bytes,
            slot_size_bytes=arena.slot_size_bytes,
            slot_count=len(arena.machine.slots),
            layout_digest=arena.layout_digest,
            manifest=snapshot.manifest.content,
            segment_offsets_bytes=list(snapshot.offsets_bytes),
            free_slots=usable,
        )
        return fetched, arena.fd

    async def _from_disk(
        self, lease: Lease, checkpoint: CheckpointId, frame: frames.Fetch
    ) -> tuple[frames.Streaming, int]:
        node, run = self._node, lease.rank.run
        # With the threads of streams, too: what hangs here hangs on the drive that the stream would read.
        encoded = await in_executor(
            self._streaming, partial(run.store.manifest_content, checkpoint, frame.rank)
        )
        manifest = await in_thread(decode_manifest, encoded)
        reader = await in_executor(self._streaming, partial(ShardReader, run.store, manifest))
        try:
            wish = Wish(slot_size_bytes=CHUNK_SIZE_BYTES, slot_count=ring_slots(reader))
            async with node.arenas.admitting:
                await node.arena_desk.make_room(lease, wish)
                sharers = lease.rank.run.waiting(lambda other: bool(other.streams), besides=lease.rank)
                admitted = await node.arenas.admit(wish, sharers=1 + sharers)
            arena = await node.arenas.allocate(admitted, layout_digest="")
        except BaseException:
            await in_thread(reader.close)
            raise
        stream = RestoreStream(node, lease, reader, arena, self._streaming)
        if not lease.is_valid:
            stream.end()
            lease.check()
        logger.info(
            "restore_from_disk run=%s rank=%d checkpoint=%s shard=%d",
            run.run_id,
            lease.rank.rank,
            checkpoint,
            frame.rank,
        )
        streaming = frames.Streaming(
            re=frame.request_id,
            arena=arena.number,
            slot_size_bytes=arena.slot_size_bytes,
            slot_count=len(arena.machine.slots),
            manifest=encoded,
            headers=[segment.header for segment in reader.segments],
        )
        return streaming, arena.fd


def _offer(info: CheckpointInfo) -> frames.Offer:
    return frames.Offer(
        attempt=info.checkpoint.attempt,
        step=info.checkpoint.step,
        world_size=info.world_size,
        shards=list(info.ranks),
        in_memory=False,
        problem="; ".join(info.problems),
        turns=info.notes.get(WENT_BACK_NOTE, ""),
    )


def _lost_offer(checkpoint: CheckpointId, problem: str) -> frames.Offer:
    """A checkpoint without a readable manifest: nothing of it can be had, but the user shall know."""
    return frames.Offer(
        attempt=checkpoint.attempt,
        step=checkpoint.step,
        world_size=0,
        shards=[],
        in_memory=False,
        problem=problem,
    )


def verify_memory(arena: Arena, snapshot: Snapshot) -> None:
    """Compare every block with its checksum: the dead trainer could write to the slot until it died."""
    with memoryview(arena.view) as view:
        for segment, offset in zip(snapshot.manifest.segments, snapshot.offsets_bytes, strict=True):
            with view[offset : offset + segment.file_size_bytes] as content:
                bad = first_bad_block(content, segment.file_size_bytes, segment.block_checksums)
            if bad is not None:
                raise CorruptDataError(
                    f"block {bad} of segment {segment.segment} of {snapshot.checkpoint} changed in memory"
                )
