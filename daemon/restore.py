"""Giving a shard back: from the memory of a crashed trainer's arena, else from the devices; verified in both cases."""

import logging
from typing import TYPE_CHECKING

from ..checkpoint.catalogue import CheckpointInfo
from ..checkpoint.checksum import first_bad_block
from ..checkpoint.fetch import read_shard, shard_slot_offsets
from ..checkpoint.manifest_format import encode_manifest
from ..checkpoint.manifest_types import Manifest
from ..checkpoint.storage_ops import ArenaRange
from ..core.errors import CorruptDataError, DataError, FencedError
from ..core.ids import CheckpointId
from ..proto import frames
from .arena import Arena, make_arena
from .blocking import in_thread
from .registry import RankRecord, Snapshot

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)


class Restorer:
    """Answers what can be restored, and brings it."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    async def offers(self, rank: RankRecord, request_id: int) -> frames.Offers:
        """Return every checkpoint that this rank might restore, the newest first.

        What a dead trainer sealed is on its way to the devices: its end is awaited, so that what is offered is
        known to be whole in memory or on disk.
        """
        await self._node.persister.settled(rank)
        store = rank.run.store
        floor = store.fresh_floor()
        offers = {
            info.checkpoint: _offer(info)
            for info in store.checkpoints()
            if info.checkpoint.attempt >= floor and (info.is_offered or info.problems)
        }
        for checkpoint, problem in store.lost.items():
            if checkpoint.attempt >= floor and checkpoint not in offers:
                offers[checkpoint] = _lost_offer(checkpoint, problem)
        for (number, _), snapshot in rank.snapshots.items():
            if rank.arenas[number].shared_with_dead:
                continue
            if snapshot.checkpoint.attempt >= floor and snapshot.world_size == rank.world_size:
                known = offers.get(snapshot.checkpoint)
                offers[snapshot.checkpoint] = frames.Offer(
                    attempt=snapshot.checkpoint.attempt,
                    step=snapshot.checkpoint.step,
                    world_size=snapshot.world_size,
                    shards=known.shards if known else [],
                    in_memory=True,
                    problem="",
                )
        items = [offers[checkpoint] for checkpoint in sorted(offers, reverse=True)]
        return frames.Offers(re=request_id, items=items)

    async def fetch(
        self, rank: RankRecord, checkpoint: CheckpointId, shard: int, request_id: int
    ) -> tuple[frames.Fetched, int]:
        """Return one shard, verified, in an arena.

        Raises:
            CorruptDataError: file and block are named; the catalogue remembers it.
            NotFoundError: it is neither in memory nor on the devices.
        """
        if shard == rank.rank:
            found = self._in_memory(rank, checkpoint)
            if found is not None:
                try:
                    return await self._from_memory(rank, *found, request_id)
                except CorruptDataError as error:
                    self._node.metrics.restore_failed_total.inc()
                    logger.error("memory_damaged checkpoint=%s reason=%s", checkpoint, error)
        try:
            return await self._from_disk(rank, checkpoint, shard, request_id)
        except DataError:
            self._node.metrics.restore_failed_total.inc()
            raise

    async def manifest(self, rank: RankRecord, frame: frames.GetManifest) -> frames.ManifestBytes:
        """Return a committed shard's manifest."""
        checkpoint = CheckpointId(frame.attempt, frame.step)
        manifest = await in_thread(rank.run.store.manifest, checkpoint, frame.rank)
        return frames.ManifestBytes(re=frame.request_id, manifest=encode_manifest(manifest))

    def _in_memory(self, rank: RankRecord, checkpoint: CheckpointId) -> tuple[Arena, Snapshot] | None:
        for (number, _), snapshot in rank.snapshots.items():
            arena = rank.arenas[number]
            if snapshot.checkpoint == checkpoint and not arena.shared_with_dead:
                return arena, snapshot
        return None

    async def _from_memory(
        self, rank: RankRecord, arena: Arena, snapshot: Snapshot, request_id: int
    ) -> tuple[frames.Fetched, int]:
        await in_thread(_verify_memory, arena, snapshot)
        rank.current = arena.number
        logger.info(
            "restore_from_memory run=%s rank=%d checkpoint=%s",
            rank.run.run_id,
            rank.rank,
            snapshot.checkpoint,
        )
        return self._fetched(
            arena, snapshot.manifest, snapshot.offsets_bytes, frames.Source.MEMORY, request_id
        )

    async def _from_disk(
        self, rank: RankRecord, checkpoint: CheckpointId, shard: int, request_id: int
    ) -> tuple[frames.Fetched, int]:
        node, run, lessee = self._node, rank.run, rank.lessee
        manifest = await in_thread(run.store.manifest, checkpoint, shard)
        offsets, size_bytes = shard_slot_offsets(manifest)
        arena = await make_arena(
            node.registry.next_arena_number(),
            slot_size_bytes=max(size_bytes, 4096),
            slot_count=1,
            layout_digest=manifest.layout_digest,
            reserve_bytes=node.config.memory.reserve_bytes,
            limit_bytes=node.arena_budget_bytes(),
        )
        try:
            await in_thread(_read, rank, manifest, arena)
        except BaseException:
            run.opened.forget_arena(arena.fd)
            arena.close()
            raise
        if rank.lessee is not lessee:
            run.opened.forget_arena(arena.fd)
            arena.close()
            raise FencedError("the trainer is gone; what was read for it was dropped")
        rank.arenas[arena.number] = arena
        arena.machine.keep(0, checkpoint)
        node.update_arena_gauge()
        logger.info(
            "restore_from_disk run=%s rank=%d checkpoint=%s shard=%d",
            run.run_id,
            rank.rank,
            checkpoint,
            shard,
        )
        return self._fetched(arena, manifest, offsets, frames.Source.DISK, request_id)

    def _fetched(
        self,
        arena: Arena,
        manifest: Manifest,
        offsets: tuple[int, ...],
        source: frames.Source,
        request_id: int,
    ) -> tuple[frames.Fetched, int]:
        self._node.metrics.restored_total.labels(source.value).inc()
        fetched = frames.Fetched(
            re=request_id,
            arena=arena.number,
            arena_size_bytes=arena.size_bytes,
            slot_size_bytes=arena.slot_size_bytes,
            slot_count=len(arena.machine.slots),
            layout_digest=arena.layout_digest,
            source=source,
            manifest=encode_manifest(manifest),
            segment_offsets_bytes=list(offsets),
            free_slots=arena.machine.free_slots,
        )
        return fetched, arena.fd


def _offer(info: CheckpointInfo) -> frames.Offer:
    return frames.Offer(
        attempt=info.checkpoint.attempt,
        step=info.checkpoint.step,
        world_size=info.world_size,
        shards=list(info.ranks),
        in_memory=False,
        problem="; ".join(info.problems),
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


def _read(rank: RankRecord, manifest: Manifest, arena: Arena) -> None:
    with memoryview(arena.view) as view:
        place = ArenaRange(fd=arena.fd, map=view, slot_offset_bytes=0, slot_size_bytes=arena.slot_size_bytes)
        read_shard(rank.run.store, manifest, place, engines=rank.run.opened.queues)


def _verify_memory(arena: Arena, snapshot: Snapshot) -> None:
    """Compare every block with its checksum: the dead trainer could write to the slot until it died."""
    with memoryview(arena.view) as view:
        for segment, offset in zip(snapshot.manifest.segments, snapshot.offsets_bytes, strict=True):
            with view[offset : offset + segment.file_size_bytes] as content:
                bad = first_bad_block(content, segment.file_size_bytes, segment.block_checksums)
            if bad is not None:
                raise CorruptDataError(
                    f"block {bad} of segment {segment.segment} of {snapshot.checkpoint} changed in memory"
                )
