"""A device was lost that held committed segments: the newest snapshot of a rank that is in memory is written again."""

import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...checkpoint.commit import lost_segments, persist_again
from ...checkpoint.late_writes import LateWrites
from ...checkpoint.publication import PersistResult
from ...checkpoint.slot_manifest import slot_manifest
from ...core.errors import DeadlineError, EverstepError, NotFoundError
from ...core.ids import CheckpointId
from ...proto import frames
from ..arena import Arena
from ..blocking import in_executor, in_thread
from ..registry import KeptManifest, RankRecord, Snapshot
from ..slot_machine import SlotState
from .restore import verify_memory

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """One snapshot to be written again; its slot is taken for that."""

    rank: RankRecord
    arena: Arena
    slot: int
    snapshot: Snapshot
    lost: tuple[int, ...]

    @property
    def checkpoint(self) -> CheckpointId:
        """Which one."""
        return self.snapshot.checkpoint


class Mender:
    """Decides on the event loop; bytes move in threads and in the kernel."""

    def __init__(self, node: "Node", threads: Executor) -> None:
        self._node, self._threads = node, threads

    def begin(self, rank: RankRecord) -> Mending | None:
        """Take the slot of a rank's newest snapshot, where it is committed and has lost segments; None: nothing to do.

        While another snapshot of the rank is being written, that one comes first: its end asks again.
        """
        if rank.writing or not rank.snapshots:
            return None
        (number, slot), snapshot = max(rank.snapshots.items(), key=lambda item: item[1].checkpoint)
        arena = rank.arenas[number]
        if arena.shared_with_dead or arena.machine.slots[slot].state is not SlotState.KEPT:
            return None
        if arena.machine.may_be_taken(slot) and rank.lessee is not None:
            return None
        try:
            shard = rank.run.store.shard(snapshot.checkpoint, rank.rank)
        except NotFoundError:
            return None
        lost = lost_segments(rank.run.store, shard.segments)
        if not lost or lost == snapshot.again_failed_for:
            return None
        arena.machine.persist_again(slot)
        return Mending(rank=rank, arena=arena, slot=slot, snapshot=snapshot, lost=lost)

    async def carry_out(self, work: Mending) -> None:
        """Write it; however it goes, the slot is kept again, but for a device that hangs with it."""
        try:
            await in_thread(verify_memory, work.arena, work.snapshot)
            result = await self._write(work)
        except DeadlineError as error:
            work.arena.machine.lose(work.slot)
            work.rank.snapshots.pop((work.arena.number, work.slot), None)
            self._failed(work, error)
        except EverstepError as error:
            work.snapshot.again_failed_for = work.lost
            self._failed(work, error)
        else:
            work.snapshot.manifest = KeptManifest(result.content, result.manifest.segments)
            self._done(work, result)
        if work.arena.machine.slots[work.slot].state is SlotState.PERSISTING:
            self._node.arena_desk.free_slots(
                work.rank, work.arena.number, work.arena.machine.settle(work.slot)
            )

    async def _write(self, work: Mending) -> PersistResult:
        store, checkpoint = work.rank.run.store, work.checkpoint
        committed = await in_thread(store.manifest, checkpoint, work.rank.rank)
        place, late = work.arena.slot_range(work.slot), LateWrites()
        try:
            with work.rank.run.opened.needed():
                write = partial(
                    persist_again,
                    store,
                    work.snapshot.draft,
                    committed,
                    place,
                    engines=work.rank.run.opened.queues,
                    device_ids=work.rank.device_ids,
                    late_writes=late,
                )
                return await in_executor(self._threads, write)
        except DeadlineError:
            raise
        except EverstepError:
            # The headers in the slot may be those of a generation that was abandoned.
            draft = work.snapshot.draft
            head = await in_thread(slot_manifest, store, draft, place)
            work.snapshot.manifest = await in_thread(KeptManifest.of, head, draft)
            raise
        finally:
            place.map.release()
            self._node.arena_desk.hold_slot(work.rank, work.arena, work.slot, late)

    def _done(self, work: Mending, result: PersistResult) -> None:
        self._node.metrics.persists.rewritten_total.inc()
        self._node.metrics.add_writes(work.rank.run.opened.store, result.writes)
        logger.warning(
            "shard_mended run=%s rank=%d checkpoint=%s segments=%d persist_s=%.3f",
            work.rank.run.run_id,
            work.rank.rank,
            work.checkpoint,
            len(work.lost),
            result.persist_s,
        )
        self._tell(work, "", "was written again to the devices that are left")

    def _failed(self, work: Mending, error: EverstepError) -> None:
        self._node.metrics.persists.rewrite_failed_total.inc()
        logger.error(
            "shard_not_mended run=%s rank=%d checkpoint=%s reason=%s",
            work.rank.run.run_id,
            work.rank.rank,
            work.checkpoint,
            error,
        )
        self._tell(work, error.code, f"lost a device and could not be written again: {error}")

    def _tell(self, work: Mending, code: str, what: str) -> None:
        if work.rank.lessee is not None:
            message = f"rank {work.rank.rank} of checkpoint {work.checkpoint} {what}"
            work.rank.lessee.send(frames.Notice(code=code, message=message))
