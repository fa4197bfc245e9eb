"""Arenas of ranks: from a trainer's wish for one to the return of its memory. ArenaBook makes and frees them.

Runs on the event loop; memory is made in a thread (arena.py).
"""

import asyncio
import contextlib
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from ..checkpoint.draft_format import DraftReader
from ..checkpoint.late_writes import LateWrites
from ..checkpoint.manifest_format import ManifestEncoder
from ..core.errors import MemoryBusyError, MemoryRefusedError, NoSpaceError, UsageError
from ..core.ids import CheckpointId
from ..proto import frames
from .access.usage import check_arena
from .admission_plan import PAGE_BYTES, Wish
from .arena import Arena
from .arena_book import Admitted
from .blocking import in_thread
from .fd_store.fd_store import StoredArena
from .fd_store.state_format import ArenaHead
from .registry import Lease, RankRecord
from .slot_machine import Drop

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)


class ArenaDesk:
    """What trainers ask of their arenas, and what becomes of these when nobody needs them any more."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    async def make_arena(self, lease: Lease, frame: frames.MakeArena) -> tuple[frames.Reply, int]:
        """Allocate an arena for new snapshots, in the background of the trainer's steps."""
        try:
            return await self._make_arena(lease, frame)
        finally:
            if lease.is_valid:  # else another one's may be under way
                lease.rank.is_making = False

    async def _make_arena(self, lease: Lease, frame: frames.MakeArena) -> tuple[frames.Reply, int]:
        sizes_bytes = (frame.slot_size_bytes, frame.spare_size_bytes)
        aligned = frame.slot_size_bytes > 0 and not any(size % PAGE_BYTES for size in sizes_bytes)
        if (
            not aligned
            or not 1 <= frame.slot_count <= 64
            or min(frame.ring_size_bytes, frame.files_size_bytes, frame.spare_size_bytes) < 0
        ):
            raise UsageError(
                f"an arena of {frame.slot_count} slots of {frame.slot_size_bytes} bytes is not possible"
            )
        rank = lease.rank
        wish = Wish(
            slot_size_bytes=frame.slot_size_bytes,
            slot_count=frame.slot_count,
            ring_size_bytes=frame.ring_size_bytes,
            spare_size_bytes=frame.spare_size_bytes,
        )
        arena = await self._allocate(lease, wish, frame.layout_digest)
        try:
            await self._store_arena(lease, arena)
            lease.check()
        except BaseException:  # the trainer was fenced meanwhile, or died
            self._node.arenas.close(arena, rank.run.opened.forget_arena)
            raise
        rank.arenas[arena.number] = arena
        rank.current = arena.number
        rank.files_size_bytes = frame.files_size_bytes
        self._node.spawn(self._judge_room(lease), "judging room for checkpoints")
        self.drop_outdated(rank)
        ready = frames.ArenaReady(
            re=frame.request_id,
            arena=arena.number,
            slot_size_bytes=arena.slot_size_bytes,
            slot_count=len(arena.machine.slots),
            allocation_s=arena.allocation_s,
            is_ring=arena.is_ring,
            reason=arena.reason,
        )
        return ready, arena.fd

    async def _store_arena(self, lease: Lease, arena: Arena) -> None:
        """Let an arena outlive this process, so that a daemon after it writes what is sealed there.

        A ring holds no snapshot whole.
        """
        rank, opened = lease.rank, lease.rank.run.opened
        if arena.is_ring or not self._node.fd_store.enabled:
            return
        head = ArenaHead(
            run_name=rank.run.name,
            uid=rank.run.uid,
            store_id=opened.store.store_id,
            rank=rank.rank,
            world_size=rank.world_size,
            device_ids=sorted(rank.device_ids),
            layout_digest=arena.layout_digest,
            slot_size_bytes=arena.slot_size_bytes,
            slot_count=len(arena.machine.slots),
            arena_inode=os.fstat(arena.fd).st_ino,
        )
        putting = asyncio.ensure_future(self._node.fd_store.put(arena.fd, head, mapper_pid=lease.holder.pid))
        try:
            arena.stored = await asyncio.shield(putting)
        except asyncio.CancelledError:
            # It comes to its end: what is in the store is taken out with the arena.
            arena.stored = await putting
            raise

    async def forget_stored(self) -> None:
        """At a clean end: keep in the FD store only what holds a snapshot that could not be written."""
        empty: list[StoredArena] = []
        for rank in self._node.registry.ranks():  # in one go: from the first wait on, arenas may be closed
            for arena in rank.arenas.values():
                if (stored := arena.stored) is not None and not stored.state.sealed:
                    arena.stored = None
                    empty.append(stored)
        for stored in empty:
            await self._node.fd_store.remove(stored)

    async def _judge_room(self, lease: Lease) -> None:
        """Tell the trainer, once for an attempt, that one checkpoint has no room, whatever is collected for it."""
        rank, run = lease.rank, lease.rank.run
        needed_bytes = sum(each.files_size_bytes for each in run.ranks.values() if each.lease is not None)
        held_bytes = sum(info.size_bytes for info in run.store.checkpoints())
        reason = await in_thread(run.store.store.space.too_small, rank.device_ids, needed_bytes, held_bytes)
        if reason and lease.is_valid and run.room_judged < rank.attempt:
            run.room_judged = rank.attempt
            logger.warning("room_too_small run=%s reason=%s", run.run_id, reason)
            lease.holder.send(frames.Notice(code=NoSpaceError.__name__, message=reason))

    async def _allocate(self, lease: Lease, wish: Wish, layout_digest: str) -> Arena:
        """Return an arena that leaves room for those of the run's other ranks that have none yet."""
        rank, arenas = lease.rank, self._node.arenas
        async with arenas.admitting:
            admitted = await self._admit(lease, wish)
        rank.is_making = True
        return await arenas.allocate(admitted, layout_digest=layout_digest)

    async def _admit(self, lease: Lease, wish: Wish) -> Admitted:
        """Admit what there is room for, once what must go for it is given up."""
        rank = lease.rank
        sharers = 1 + rank.run.waiting(lambda other: not other.is_without_arena, besides=rank)
        admit = partial(self._node.arenas.admit, sharers=sharers)
        try:
            allowed = self._within_quota(rank, wish)
            await self._make_room_for_all(lease, allowed, sharers)
            return await admit(allowed)
        except MemoryBusyError:
            raise
        except MemoryRefusedError as refused:
            if rank.persisting or self._node.arenas.is_closing:
                raise MemoryBusyError(refused.message, hint=refused.hint) from refused
            if not await self._unused_are_in_the_way(rank, wish, sharers):
                raise
        # No checkpoint could follow: what memory alone has is better given up than all that comes.
        lease.check()
        self._give_up(rank, self._unused(rank))
        return await admit(check_arena(self._node, rank.run.uid, wish))

    async def _make_room_for_all(self, lease: Lease, wish: Wish, sharers: int) -> None:
        """Where so many cannot have what is wished for, give up what is durable in arenas that nobody uses.

        Those of its run's other ranks, too: they go as soon as these have taken checkpoints, or come back no more.

        Raises:
            MemoryBusyError: more such arenas can go when they are written.
        """
        if await self._node.arenas.has_room(wish, sharers=sharers):
            return
        lease.check()
        idle = _idle(lease.rank)
        self._give_up_durable(idle)
        if any(rank.persisting for rank in idle) and not await self._node.arenas.has_room(
            wish, sharers=sharers
        ):
            raise MemoryBusyError(  # else it would have less than it could, for good
                f"{wish.text()} waits until what is in the arenas before it is written",
                hint="the next checkpoint asks again",
            )

    def _within_quota(self, rank: RankRecord, wish: Wish) -> Wish:
        """Return what its user may wish for, without arenas that no trainer of the run uses where that must be."""
        with contextlib.suppress(MemoryRefusedError):
            return check_arena(self._node, rank.run.uid, wish)
        idle = _idle(rank)
        durable = [arena for each in idle for arena in self._durable(each)]
        allowed = check_arena(self._node, rank.run.uid, wish, without=durable)
        self._give_up_durable(idle)
        return allowed

    async def _unused_are_in_the_way(self, rank: RankRecord, wish: Wish, sharers: int) -> bool:
        """Tell whether something would be granted without the arenas that its trainer uses no more, and only so."""
        return await self._would_get(rank, wish, self._unused(rank), sharers) and not await self._would_get(
            rank, wish, [], sharers
        )

    async def _would_get(self, rank: RankRecord, wish: Wish, without: list[Arena], sharers: int) -> bool:
        try:
            allowed = check_arena(self._node, rank.run.uid, wish, without=without)
        except MemoryRefusedError:
            return False
        freed_bytes = sum(arena.size_bytes for arena in without)
        return await self._node.arenas.would_grant(allowed, sharers=sharers, freed_bytes=freed_bytes)

    async def make_room(self, lease: Lease, wish: Wish) -> None:
        """Where there is too little, give up arenas that a rank's trainer uses no more, if what they hold is durable.

        To be called when it asks for what is on the devices: then it uses none it had before.
        While `ArenaBook.admitting` is held.
        """
        if lease.rank.arenas and not await self._node.arenas.has_room(wish):
            lease.check()
            self._give_up_durable([lease.rank])

    @staticmethod
    def _unused(rank: RankRecord) -> list[Arena]:
        """Return the arenas that may be closed, of a rank whose trainer uses none of them: nobody writes or reads."""
        return [
            arena
            for arena in rank.arenas.values()
            if arena.machine.is_settled or (arena.shared_with_dead and not arena.machine.busy)
        ]

    def _durable(self, rank: RankRecord) -> list[Arena]:
        """Return those of which nothing is lost: the devices can give back all that a restart could take from them.

        Or nothing but what the run has gone back from, which shall not make its new attempt slow.
        """
        unsaved = rank.unsaved_arenas(besides=rank.gone_back_from)
        return [arena for arena in self._unused(rank) if arena.number not in unsaved]

    def _give_up_durable(self, ranks: list[RankRecord]) -> None:
        """Close what is durable of ranks whose trainers use none of their arenas."""
        for rank in ranks:
            self._give_up(rank, self._durable(rank))

    def _give_up(self, rank: RankRecord, unused: list[Arena]) -> None:
        """Close unused arenas of a rank."""
        if not unused:
            return
        unsaved, rank.current = rank.in_memory_only, None
        for arena in unused:
            self._close_arena(rank, arena.number)
        if unsaved is not None and rank.in_memory_only != unsaved:
            logger.warning(
                "unsaved_given_up run=%s rank=%d checkpoint=%s", rank.run.run_id, rank.rank, unsaved
            )

    def begin_snapshot(self, rank: RankRecord, frame: frames.BeginSnapshot) -> None:
        """The trainer starts to copy; what the slot still held can be restored from memory no more."""
        rank.check_attempt(frame.attempt)
        arena = rank.arena(frame.arena)
        checkpoint = CheckpointId(frame.attempt, frame.step)
        arena.machine.begin(frame.slot, checkpoint, world_size=rank.world_size)
        arena.forget(frame.slot)
        self._node.traces.copy_begun(rank, frame.arena, frame.slot)
        rank.snapshots.pop((frame.arena, frame.slot), None)

    def abandon(self, rank: RankRecord, arena: int, slot: int, why: Drop) -> None:
        """A copy comes to nothing."""
        self._node.metrics.persists.abandoned_total.labels(why.value).inc()
        self.free_slots(rank, arena, rank.arena(arena).machine.abandon(slot))
        if (arena, slot) in rank.overlaps:
            rank.overlaps[arena, slot].gate.abandon()

    def sealed_everywhere(self, rank: RankRecord, checkpoint: CheckpointId) -> None:
        """Every rank has sealed `checkpoint`: what is older may be overwritten."""
        rank.check_attempt(checkpoint.attempt)
        for number, arena in rank.arenas.items():
            self.free_slots(rank, number, arena.machine.sealed_everywhere(checkpoint))
        self.drop_outdated(rank)

    def restored(
        self, rank: RankRecord, checkpoint: CheckpointId, *, in_memory: bool, goes_back: bool
    ) -> None:
        """Every rank has restored `checkpoint`: its new attempt overwrites the others.

        Where it goes back, newer ones that memory alone has stay until one of the attempt is sealed everywhere:
        nothing has happened before. They go all the same if there were no slot left for that one.
        """
        rank.gone_back_from = rank.unsaved_after(checkpoint) if goes_back else frozenset()
        for number, arena in rank.arenas.items():
            freed = arena.machine.restored(checkpoint, besides=rank.gone_back_from)
            if in_memory and number == rank.current and not arena.machine.usable_slots:
                freed += arena.machine.restored(checkpoint)
            self.free_slots(rank, number, freed)
        self.drop_outdated(rank)

    def free_slots(self, rank: RankRecord, arena: int, slots: list[int]) -> None:
        """Forget the snapshots of freed slots, and tell the trainer of all that it may use and does not know of."""
        for slot in slots:
            rank.snapshots.pop((arena, slot), None)
            if arena in rank.arenas:
                rank.arenas[arena].forget(slot)
        if rank.lessee is not None and arena in rank.arenas:
            for slot in rank.arenas[arena].machine.offer():
                if arena == rank.current:
                    rank.arenas[arena].forget(slot)
                rank.lessee.send(frames.SlotFree(arena=arena, slot=slot))

    def hold_slot(self, rank: RankRecord, arena: Arena, slot: int, late: LateWrites) -> None:
        """Let a slot be used no more until the writes that nobody waits for are over: the kernel may read from it."""
        if late.are_over:
            return
        arena.machine.hold(slot)
        loop = asyncio.get_running_loop()

        def let_go() -> None:
            self.free_slots(rank, arena.number, arena.machine.let_go(slot))
            self.drop_outdated(rank)

        def over() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(let_go)

        late.when_over(over)

    def drop_outdated(self, rank: RankRecord) -> None:
        """Close arenas that nobody fills any more and whose snapshots are outdated or on the devices.

        One that nobody else may be given goes as soon as memory alone has nothing of what it holds.
        """
        for number, arena in list(rank.arenas.items()):
            outdated = number != rank.current and not arena.machine.busy
            is_left = arena.shared_with_dead and number not in rank.unsaved_arenas()
            if outdated and (arena.machine.is_free() or is_left):
                self._close_arena(rank, number)

    def drop_copies(self, rank: RankRecord) -> None:
        """Its trainer copies no more, neither into slots nor out of them."""
        rank.end_streams()
        for overlap in rank.overlaps.values():
            overlap.gate.abandon()
        for number, arena in rank.arenas.items():
            dropped = arena.machine.trainer_gone()
            self._node.metrics.persists.abandoned_total.labels(Drop.TRAINER_GONE.value).inc(len(dropped))
            self.free_slots(rank, number, dropped)

    def drop_memory(self, rank: RankRecord) -> "list[asyncio.Task[None]]":
        """Close all arenas of a rank that nobody comes back to; done when their memory is free."""
        rank.end_streams()
        rank.drafts, rank.manifests = DraftReader(), ManifestEncoder()
        return [self._close_arena(rank, number) for number in list(rank.arenas)]

    def _close_arena(self, rank: RankRecord, number: int) -> "asyncio.Task[None]":
        arena = rank.arenas.pop(number)
        for place in [place for place in rank.snapshots if place[0] == number]:
            del rank.snapshots[place]
        if rank.current == number:
            rank.current = None
        return self._node.arenas.close(arena, rank.run.opened.forget_arena)


def _idle(rank: RankRecord) -> list[RankRecord]:
    """Return whose arenas nobody uses when a rank's trainer asks for another one: it, and others of its run."""
    return [rank, *rank.run.without_arena(besides=rank)]
