"""From a sealed slot to an acknowledged shard: checks the draft, writes, reports; completer.py goes on."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...checkpoint.commit import FailedTry, persist_shard
from ...checkpoint.copy_gate import CopyAbandonedError, CopyGate
from ...checkpoint.device_set import DeviceState
from ...checkpoint.draft_format import DraftReader
from ...checkpoint.late_writes import LateWrites
from ...checkpoint.manifest_types import Draft
from ...checkpoint.publication import PersistResult
from ...checkpoint.slot_manifest import slot_manifest
from ...checkpoint.store import Store
from ...core.errors import CorruptDataError, DeadlineError, EverstepError, NoSpaceError, StorageError
from ...core.ids import CheckpointId
from ...proto import frames
from ..access.usage import check_disk
from ..arena import Arena
from ..blocking import in_executor, in_thread
from ..processor_class import take_turn_at_once
from ..registry import KeptManifest, Overlap, RankRecord, RunRecord, Snapshot
from ..slot_machine import Drop, SlotState
from .completer import Completer
from .mend import Mender, Mending
from .stores import OpenStore

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

WRITES_MAX = 256
"""Snapshots written at once: one for each rank of a node, and more. Threads are made when needed."""


class Persister:
    """Writes sealed snapshots. Decides on the event loop; bytes move in threads and in the kernel."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._settled = asyncio.Condition()
        self._being_written = Counter[int]()
        """Bytes by user, which its quota counts before they are committed."""
        self._completer = Completer(node, self._notify)
        # Of their own: a trainer that stops in the middle of a copy, or a device that hangs, must not hold the threads
        # that all others need.
        self._threads = ThreadPoolExecutor(
            WRITES_MAX, thread_name_prefix="everstep-write", initializer=take_turn_at_once
        )
        self._mender = Mender(node, self._threads)

    def seal(self, rank: RankRecord, frame: frames.Seal) -> None:
        """Take over a slot: from here on its snapshot is written, whatever happens to the trainer."""
        checkpoint = CheckpointId(frame.attempt, frame.step)
        rank.check_attempt(frame.attempt)
        arena = rank.arena(frame.arena)
        if (frame.arena, frame.slot) in rank.overlaps:
            self._seal_overlap(rank, arena, frame, rank.overlaps[frame.arena, frame.slot])
            return
        if arena.is_ring:  # writing it has failed, as was said: nothing holds its bytes any more
            self._node.arena_desk.abandon(rank, frame.arena, frame.slot, Drop.NOT_WRITTEN)
            return
        arena.machine.seal(frame.slot, checkpoint)
        expected = _Expected(checkpoint=checkpoint, rank=rank.rank, world_size=rank.world_size)
        self._node.spawn(self._take_over(rank, arena, frame, expected), f"persisting {checkpoint}")

    def announce(self, rank: RankRecord, frame: frames.Announce) -> None:
        """Begin to write a snapshot that is still being copied: each segment when it is whole."""
        checkpoint = CheckpointId(frame.attempt, frame.step)
        rank.check_attempt(frame.attempt)
        arena = rank.arena(frame.arena)
        arena.machine.stream(frame.slot, checkpoint)
        gate = CopyGate(self._telling_written(rank, frame) if arena.is_ring else None)
        overlap = Overlap(checkpoint=checkpoint, draft_sha256=frame.draft_sha256, gate=gate)
        rank.overlaps[frame.arena, frame.slot] = overlap
        self._node.spawn(
            self._write_copying(rank, arena, frame, overlap), f"writing {checkpoint} as it comes"
        )

    @staticmethod
    def _telling_written(rank: RankRecord, frame: frames.Announce) -> Callable[[int], object]:
        """Return what a writing thread calls when a segment has given up its place in a ring."""
        loop = asyncio.get_running_loop()

        def tell(segment: int) -> None:
            if rank.lessee is not None:
                rank.lessee.send(frames.SegmentWritten(arena=frame.arena, slot=frame.slot, segment=segment))

        return lambda segment: loop.call_soon_threadsafe(tell, segment)

    @staticmethod
    def copied(rank: RankRecord, frame: frames.Copied) -> None:
        """A segment of an announced snapshot is whole; nothing where writing it has ended already."""
        overlap = rank.overlaps.get((frame.arena, frame.slot))
        if overlap is not None:
            overlap.gate.copied(frame.segment)

    def _seal_overlap(self, rank: RankRecord, arena: Arena, frame: frames.Seal, overlap: Overlap) -> None:
        """The copy of an announced snapshot is finished: what is left of it is written, then its manifest."""
        if frame.draft_sha256 != overlap.draft_sha256:
            self._node.arena_desk.abandon(rank, frame.arena, frame.slot, Drop.DRAFT)
            error = CorruptDataError("the draft of the manifest is not the one that was announced")
            self._report_failure(rank, overlap.checkpoint, error)
            return
        arena.machine.seal_streaming(frame.slot, CheckpointId(frame.attempt, frame.step))
        arena.seal(frame.slot)
        self._node.metrics.persists.sealed_total.inc()
        rank.step = frame.step
        self._node.reporter.sealed(rank, overlap.checkpoint)
        overlap.sealed_at_s = time.monotonic()
        overlap.gate.seal()

    async def _write_copying(
        self, rank: RankRecord, arena: Arena, frame: frames.Announce, overlap: Overlap
    ) -> None:
        expected = _Expected(checkpoint=overlap.checkpoint, rank=rank.rank, world_size=rank.world_size)
        try:
            draft = await self._read(rank, arena, frame, expected)
            await self._persist(rank, arena, frame.slot, draft, overlap)
        except EverstepError as error:  # of the draft: the seal, which refuses it, tells the trainer
            self._end_early(rank, arena, frame.slot, overlap, error)
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.drop(frame.slot))
            self._report_failure(rank, overlap.checkpoint, self._node.bug("writing a copy", error))
        finally:
            rank.overlaps.pop((arena.number, frame.slot), None)
            await self._has_settled(rank)

    def _end_early(
        self, rank: RankRecord, arena: Arena, slot: int, overlap: Overlap, error: EverstepError
    ) -> None:
        """What was written of a snapshot in the copying is dropped; the seal begins anew, or there will be none.

        None of a ring's, whose trainer waits to copy on: it hears of the end at once.
        """
        logger.warning("written_in_vain checkpoint=%s reason=%s", overlap.checkpoint, error)
        if arena.machine.slots[slot].state is SlotState.ABANDONED:
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.abandoned_written(slot))
        elif overlap.sealed_at_s is None:
            arena.machine.stream_failed(slot)
            if arena.is_ring:
                self._report_failure(rank, overlap.checkpoint, error)
        else:
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.drop(slot))
            self._report_failure(rank, overlap.checkpoint, error)

    def adopt(self, rank: RankRecord, arena: Arena, slot: int, draft: Draft) -> None:
        """Write what a daemon before this one had sealed, and has not written."""
        arena.machine.adopt(slot, draft.checkpoint, world_size=draft.world_size)
        self._node.spawn(self._write_adopted(rank, arena, slot, draft), f"writing adopted {draft.checkpoint}")

    async def _write_adopted(self, rank: RankRecord, arena: Arena, slot: int, draft: Draft) -> None:
        try:
            arena.machine.persist(slot)
            await self._persist(rank, arena, slot, draft)
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.drop(slot))
            self._report_failure(rank, draft.checkpoint, self._node.bug("writing an adopted snapshot", error))
        finally:
            await self._has_settled(rank)

    def mend(self, opened: OpenStore) -> None:
        """A device of a store was lost, perhaps: what ranks hold in memory that needs it is written again."""
        for rank in self._node.registry.ranks():
            if rank.run.opened is opened:
                self._mend_rank(rank)

    def _mend_rank(self, rank: RankRecord) -> None:
        work = self._mender.begin(rank)
        if work is not None:
            self._node.spawn(self._mended(rank, work), f"writing {work.checkpoint} again")

    async def _mended(self, rank: RankRecord, work: Mending) -> None:
        try:
            await self._mender.carry_out(work)
        except Exception:
            self._node.arena_desk.free_slots(rank, work.arena.number, work.arena.machine.drop(work.slot))
            raise
        finally:
            await self._has_settled(rank)

    def is_completing(self, run: RunRecord) -> bool:
        """Tell whether a completion of a run is being recorded, or what is outdated of it deleted."""
        return self._completer.is_busy_with(run)

    async def settled(self, rank: RankRecord) -> None:
        """Return when nothing that `rank` sealed is being written."""
        async with self._settled:
            await self._settled.wait_for(lambda: not rank.writing)

    async def idle(self) -> None:
        """Return when nothing is being written and every completion is recorded."""
        async with self._settled:
            await self._settled.wait_for(
                lambda: (
                    not self._completer.is_busy
                    and not any(rank.writing for rank in self._node.registry.ranks())
                )
            )

    async def settled_by_now(self) -> None:
        """Return when all that is sealed now is committed or has failed, and its trainers were told."""
        sealed = [
            (rank, number, slot, rank.arenas[number].machine.slots[slot].checkpoint)
            for rank in self._node.registry.ranks()
            for number, slot in rank.writing_slots
        ]

        def is_settled() -> bool:
            return not any(
                (number, slot) in rank.writing_slots
                and rank.arenas[number].machine.slots[slot].checkpoint == checkpoint
                for rank, number, slot, checkpoint in sealed
            )

        async with self._settled:
            await self._settled.wait_for(is_settled)

    def complete(self, run: RunRecord, checkpoint: CheckpointId) -> None:
        """All ranks have committed `checkpoint`: remember it durably, then collect what is outdated."""
        self._completer.complete(run, checkpoint)

    def give_up(self, run: RunRecord, checkpoint: CheckpointId) -> None:
        """`checkpoint` will never be complete: what is durable of it goes, lest such halves fill the devices."""
        run.store.give_up(checkpoint)
        self._completer.collect(run)

    async def _take_over(
        self, rank: RankRecord, arena: Arena, frame: frames.Seal, expected: "_Expected"
    ) -> None:
        """Check a sealed slot's draft and write it; however it goes, the trainer hears of it."""
        try:
            sealed_at_s = time.monotonic()
            draft = await self._accept(rank, arena, frame, expected)
            if draft is not None:
                await self._persist(rank, arena, frame.slot, draft, sealed_at_s=sealed_at_s)
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.drop(frame.slot))
            bug = self._node.bug(f"persisting {expected.checkpoint}", error)
            self._report_failure(rank, expected.checkpoint, bug)
        finally:
            await self._has_settled(rank)

    async def _has_settled(self, rank: RankRecord) -> None:
        self._node.arena_desk.drop_outdated(rank)
        await self._notify()
        self._mend_rank(rank)

    async def _accept(
        self, rank: RankRecord, arena: Arena, frame: frames.Seal, expected: "_Expected"
    ) -> Draft | None:
        """Return the draft; None where it was refused, and its slot is free again."""
        try:
            draft = await self._read(rank, arena, frame, expected)
        except EverstepError as error:
            self._node.metrics.persists.abandoned_total.labels(Drop.DRAFT.value).inc()
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.drop(frame.slot))
            self._report_failure(rank, expected.checkpoint, error)
            return None
        self._node.metrics.persists.sealed_total.inc()
        rank.step = frame.step
        self._node.reporter.sealed(rank, expected.checkpoint)
        arena.machine.persist(frame.slot)
        arena.seal(frame.slot)
        return draft

    async def _read(
        self, rank: RankRecord, arena: Arena, frame: frames.Seal | frames.Announce, expected: "_Expected"
    ) -> Draft:
        """Return the draft; the first of a layout takes 14 µs a leaf."""
        async with rank.for_drafts.answering(self._node.rests_beside(rank)) as answer:
            return await in_thread(answer.timed(_read_draft), rank.drafts, arena, frame, expected)

    async def _persist(
        self,
        rank: RankRecord,
        arena: Arena,
        slot: int,
        draft: Draft,
        overlap: Overlap | None = None,
        *,
        sealed_at_s: float | None = None,
    ) -> None:
        began_s = time.monotonic() if sealed_at_s is None else sealed_at_s
        place, late = arena.slot_range(slot), LateWrites()
        self._node.metrics.persists.begin(arena.number, slot, began_s, arena.slot_size_bytes)
        try:
            with rank.run.opened.needed():
                write = partial(
                    persist_shard,
                    rank.run.store,
                    draft,
                    place,
                    engines=rank.run.opened.queues,
                    device_ids=rank.device_ids,
                    on_failed_try=self._from_thread(rank, draft.checkpoint),
                    gate=overlap.gate if overlap else None,
                    late_writes=late,
                    manifests=rank.manifests,
                    is_checked=True,
                )
                try:
                    result = await self._written(rank.run, write, _size_bytes(draft))
                finally:
                    self._node.arena_desk.hold_slot(rank, arena, slot, late)
        except CopyAbandonedError:
            self._node.arena_desk.free_slots(rank, arena.number, arena.machine.abandoned_written(slot))
        except DeadlineError as error:
            arena.machine.lose(slot)
            self._report_failure(rank, draft.checkpoint, error)
        except EverstepError as error:
            if overlap is not None and (overlap.sealed_at_s is None or arena.is_ring):
                self._end_early(rank, arena, slot, overlap, error)
                return
            head = await in_thread(slot_manifest, rank.run.store, draft, place)
            self._keep(rank, arena, slot, draft, await in_thread(KeptManifest.of, head, draft))
            self._report_failure(rank, draft.checkpoint, error)
        else:
            arena.forget(slot)
            if not arena.is_ring:
                self._keep(rank, arena, slot, draft, KeptManifest(result.content, result.manifest.segments))
            sealed_at_s = overlap.sealed_at_s if overlap else None
            persist_s = time.monotonic() - (sealed_at_s or began_s)
            trace = self._node.traces.committed(
                rank,
                (arena.number, slot),
                draft.checkpoint,
                sealed_ago_s=persist_s,
                writing_ago_s=time.monotonic() - began_s,
                writes=result.writes,
            )
            self._report_success(rank, result, persist_s, trace)
        finally:
            place.map.release()
            self._node.metrics.persists.end(arena.number, slot)
        if arena.machine.slots[slot].state is SlotState.PERSISTING:
            settled = arena.machine.drop if arena.is_ring else arena.machine.settle
            self._node.arena_desk.free_slots(rank, arena.number, settled(slot))
            # Which its trainer may overwrite from now on, written or not; where none is there, it is offered to nobody.
            if arena.machine.is_alone and rank.lessee is not None and rank.current == arena.number:
                arena.forget(slot)

    async def _written(
        self, run: RunRecord, write: Callable[[], PersistResult], size_bytes: int
    ) -> PersistResult:
        """Return what `write` does; where there is no room for it, what is outdated goes first.

        Else that would wait for the next checkpoint to be complete, which none can be on full devices: after fewer
        were asked to be kept, or while nothing could be deleted before.
        """
        try:
            return await self._within_quota(run, write, size_bytes)
        except NoSpaceError:
            with contextlib.suppress(
                StorageError
            ):  # a device is suspect now; the second try says what that means
                await self._completer.collected(run)
        try:
            return await self._within_quota(run, write, size_bytes)
        except NoSpaceError as error:
            raise NoSpaceError(error.message, hint=_keeps_all(run.opened.store) or error.hint) from error

    async def _within_quota(
        self, run: RunRecord, write: Callable[[], PersistResult], size_bytes: int
    ) -> PersistResult:
        """Return what `write` does; NoSpaceError where all that the user's ranks write now would be too much."""
        check_disk(self._node, run.uid, size_bytes + self._being_written[run.uid])
        self._being_written[run.uid] += size_bytes
        try:
            return await in_executor(self._threads, write)
        finally:
            self._being_written[run.uid] -= size_bytes

    async def _notify(self) -> None:
        async with self._settled:
            self._settled.notify_all()
        self._node.lifetime.changed()

    def _keep(self, rank: RankRecord, arena: Arena, slot: int, draft: Draft, manifest: KeptManifest) -> None:
        rank.snapshots[arena.number, slot] = Snapshot(
            checkpoint=draft.checkpoint,
            world_size=draft.world_size,
            manifest=manifest,
            draft=draft,
            offsets_bytes=tuple(
                arena.slot_offset_bytes(slot) + segment.slot_offset_bytes for segment in draft.segments
            ),
        )

    def _report_success(self, rank: RankRecord, result: PersistResult, persist_s: float, trace: str) -> None:
        checkpoint = result.manifest.checkpoint
        size_bytes = sum(segment.file_size_bytes for segment in result.manifest.segments)
        metrics = self._node.metrics
        metrics.persists.persisted_total.inc()
        metrics.persists.persist_s.observe(persist_s)
        metrics.add_writes(rank.run.opened.store, result.writes)
        metrics.persists.last_commit_s.set_to_current_time()
        rank.commits.committed(time.monotonic())
        self._node.reporter.committed(rank, checkpoint, size_bytes, persist_s)
        facts = (rank.run.run_id, rank.rank, checkpoint, size_bytes, persist_s)
        if trace:
            logger.info(
                "shard_persisted run=%s rank=%d checkpoint=%s size_bytes=%d persist_s=%.3f trace=%s",
                *facts,
                trace,
            )
        else:
            logger.info("shard_persisted run=%s rank=%d checkpoint=%s size_bytes=%d persist_s=%.3f", *facts)
        if result.is_under_replicated:
            logger.warning("manifest_under_replicated checkpoint=%s reasons=%s", checkpoint, result.problems)
        persisted = frames.Persisted(
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            size_bytes=size_bytes,
            persist_s=persist_s,
            devices_s=max((write.write_s + write.sync_s for write in result.writes), default=0.0),
            under_replicated=result.is_under_replicated,
        )
        if rank.lessee is not None:
            rank.lessee.send(persisted)
        elif result.manifest.world_size == 1:  # several ranks have agreed on its failure by now
            rank.unheard.append(persisted)
        if result.manifest.world_size == 1:
            self.complete(rank.run, checkpoint)

    def _from_thread(self, rank: RankRecord, checkpoint: CheckpointId) -> Callable[[FailedTry], object]:
        """Return what a persisting thread calls when a generation was abandoned and the next one begins."""
        loop = asyncio.get_running_loop()
        return lambda failed: loop.call_soon_threadsafe(self._report_failed_try, rank, checkpoint, failed)

    def _report_failed_try(self, rank: RankRecord, checkpoint: CheckpointId, failed: FailedTry) -> None:
        self._node.metrics.persists.retried_total.labels(failed.code).inc()
        logger.warning(
            "shard_written_again run=%s rank=%d checkpoint=%s without=%s reason=%s",
            rank.run.run_id,
            rank.rank,
            checkpoint,
            ",".join(failed.device_paths),
            failed.message,
        )
        if rank.lessee is not None:
            message = f"rank {rank.rank} of checkpoint {checkpoint} is written again without {failed.message}"
            rank.lessee.send(frames.Notice(code=failed.code, message=message))

    def _report_failure(self, rank: RankRecord, checkpoint: CheckpointId, error: EverstepError) -> None:
        self._node.metrics.persists.failed_total.labels(error.code).inc()
        self._node.reporter.failed(rank, checkpoint, error)
        logger.error(
            "shard_failed run=%s rank=%d checkpoint=%s reason=%s",
            rank.run.run_id,
            rank.rank,
            checkpoint,
            error,
        )
        if rank.lessee is not None:
            rank.lessee.send(
                frames.PersistFailed(
                    attempt=checkpoint.attempt,
                    step=checkpoint.step,
                    code=error.code,
                    message=error.message,
                    hint=error.hint,
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """What a draft must be of: as it stood when the slot was sealed, whoever holds the rank later."""

    checkpoint: CheckpointId
    rank: int
    world_size: int

    def text(self) -> str:
        """Return it for a message."""
        return f"{self.checkpoint} rank {self.rank} of {self.world_size}"


def _size_bytes(draft: Draft) -> int:
    """Return what a shard takes on the devices."""
    return sum(segment.file_size_bytes for segment in draft.segments)


def _read_draft(
    drafts: DraftReader, arena: Arena, frame: frames.Seal | frames.Announce, expected: _Expected
) -> Draft:
    """Copy the draft out of shared memory, check its digest, then parse: the trainer can still write there.

    Complete, here: whoever uses a draft after this, also to describe a write that failed, needs no check.
    """
    begin = frame.draft_offset_bytes
    end = begin + frame.draft_size_bytes
    if not 0 <= begin <= end <= arena.slot_size_bytes:
        raise CorruptDataError(f"the draft [{begin}, {end}) of slot {frame.slot} does not lie in the arena")
    base = arena.slot_offset_bytes(frame.slot)
    content = bytes(arena.view[base + begin : base + end])
    if hashlib.sha256(content).hexdigest() != frame.draft_sha256:
        raise CorruptDataError("the draft of the manifest changed after it was sealed")
    draft = drafts.read(content, arena.slot_size_bytes, is_ring=arena.is_ring)
    found = _Expected(checkpoint=draft.checkpoint, rank=draft.rank, world_size=draft.world_size)
    if found != expected:
        raise CorruptDataError(f"the draft is of {found.text()}, expected {expected.text()}")
    if arena.stored is not None:
        arena.stored.state.write(frame.slot, content)
    return draft


def _keeps_all(store: Store) -> str:
    """Return what to do where nothing outdated goes, since a device is missing or has failed; empty: it does go."""
    failed = [
        device.path
        for device in store.devices
        if store.device_state(device.device_id)[0] is DeviceState.SUSPECT
    ]
    absent = [device.path for device in store.missing]
    when = " when no run of the store is attached" if absent else " once it is well"
    who = [f"{path} is suspect" for path in failed] + [f"{path} is missing" for path in absent]
    if not who:
        return ""
    what = f"`everstep device readmit` it{when}, `retire` it, or add a device"
    return f"nothing is deleted while {' and '.join(who)}: {what}"
