"""What a running node holds, as views. Reads the registry: on the event loop only, but for `store_view`."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...checkpoint.keep import Keep
from ...core.ids import CheckpointId
from ...proto import frames
from ..devices.stores import OpenStore
from ..registry import RankRecord, RunRecord
from .views import (
    DaemonView,
    DeviceStatus,
    DeviceView,
    PaceView,
    RankState,
    RankView,
    RunView,
    ScrubView,
    SlotView,
    StoreView,
    Verdict,
)

if TYPE_CHECKING:
    from ...checkpoint.run_store import RunStore
    from ..node import Node

PERSISTED = "everstep_shards_persisted_total"
FAILED = "everstep_shards_failed_total"
SILENT_AFTER_S = 10.0
"""A device that is asked every second and does not answer for so long hangs, or sleeps."""


def daemon_view(node: "Node", *, began_s: float, is_draining: bool) -> DaemonView:
    """Return the daemon itself; `began_s` is of the monotonic clock."""
    return DaemonView(
        version=node.version,
        pid=os.getpid(),
        is_private=node.private,
        uptime_s=time.monotonic() - began_s,
        socket=str(node.config.socket_path()),
        uid=os.getuid(),
        arena_bytes=node.arenas.size_bytes,
        metrics_port=node.metrics_port,
        metrics_url="" if node.site is None else f"{node.site.origin}/metrics",
        is_draining=is_draining,
        persisted_count=total(node, PERSISTED),
        failed_count=total(node, FAILED),
    )


def total(node: "Node", name: str) -> int:
    """Return one of the daemon's counters, summed over its labels."""
    families = node.metrics.registry.restricted_registry([name]).collect()
    return int(sum(sample.value for family in families for sample in family.samples if sample.name == name))


def run_views(node: "Node", uid: int | None) -> tuple[RunView, ...]:
    """Return the runs of this user (None: all), by name, then owner."""
    records = [run for run in node.registry.runs.values() if uid is None or run.uid == uid]
    return tuple(
        _run_view(run, node.keep_of(run)) for run in sorted(records, key=lambda run: (run.name, run.uid))
    )


def attached_count(node: "Node") -> int:
    """Return how many trainers hold a lease."""
    return sum(rank.lease is not None for rank in node.registry.ranks())


def busy_reason(node: "Node", run: "RunStore") -> str:
    """Return why a run's checkpoints cannot all be removed now; empty when they can."""
    record = record_of(node, run)
    for rank in record.ranks.values() if record else ():
        if rank.lessee is not None and rank.lessee.alive:
            return f"rank {rank.rank} of run {run.name!r} is held by a living trainer"
        if rank.persisting:
            return f"a snapshot of rank {rank.rank} of run {run.name!r} is being written"
    return ""


def record_of(node: "Node", run: "RunStore") -> RunRecord | None:
    """Return what the registry knows of a stored run; None when nobody attached to it in this store."""
    record = node.registry.runs.get((run.owner_uid, run.run_id))
    return record if record is not None and record.store is run else None


def in_memory(node: "Node", run: "RunStore") -> frozenset[CheckpointId]:
    """Return the checkpoints of which this daemon holds every shard that is on its devices in memory, too."""
    record = record_of(node, run)
    if record is None:
        return frozenset()
    held = {rank.rank: _held(rank) for rank in record.ranks.values()}
    return frozenset(
        info.checkpoint
        for info in run.checkpoints()
        if all(info.checkpoint in held.get(rank, ()) for rank in info.ranks)
    )


def store_view(
    opened: OpenStore, verified: Sequence[Verdict], scrub: ScrubView, names: Mapping[str, str]
) -> StoreView:
    """Return an open store and what was found of its checkpoints; asks the file systems: for a thread.

    `names`: those in the configuration, by directory.
    """
    store = opened.store
    present = tuple(_device_view(opened, device.device_id, str(device.path)) for device in store.devices)
    missing = tuple(_missing_view(device.device_id, device.path, device.reason) for device in store.missing)
    return StoreView(
        store_id=store.store_id,
        devices=tuple(
            replace(each, name=names.get(each.path, ""))
            for each in sorted(present + missing, key=lambda each: (each.path, each.device_id))
        ),
        notes=(*opened.notes, *(_verified_text(each) for each in verified if each.is_intact)),
        problems=(
            *opened.report.problems,
            *(_verified_text(each) for each in verified if not each.is_intact),
        ),
        scrub=scrub,
    )


def for_others(view: StoreView) -> StoreView:
    """Return what a user may know of a store whose runs are another's: no sentence that may name one."""
    return replace(view, notes=(), problems=(), scrub=replace(view.scrub, newest=None))


def _verified_text(verdict: Verdict) -> str:
    if verdict.is_intact:
        return f"{verdict.summary.title} was verified: every byte is what was committed"
    problems = [*verdict.problems, *(segment.problem for segment in verdict.segments if segment.problem)]
    return f"{verdict.summary.title} is damaged: {'; '.join(problems)}"


def _held(rank: RankRecord) -> set[CheckpointId]:
    """Return what a restore could take from this rank's memory."""
    return {
        snapshot.checkpoint
        for (number, _), snapshot in rank.snapshots.items()
        if not rank.arenas[number].shared_with_dead
    }


def _run_view(run: RunRecord, keep: Keep) -> RunView:
    ranks = [run.ranks[number] for number in sorted(run.ranks)]
    newest = run.store.newest_offered()
    return RunView(
        name=run.name,
        run_id=run.run_id,
        owner_uid=run.uid,
        attempt=max(run.attempt, run.store.highest_attempt()),
        world_size=max((rank.world_size for rank in run.present), default=0),
        ranks=tuple(_rank_view(rank) for rank in ranks),
        complete_floor=run.store.complete_floor(),
        keep=keep,
        is_own_keep=run.keep is not None,
        pace=_pace_view([rank.costs for rank in run.present if rank.costs is not None]),
        newest=None if newest is None else newest.checkpoint,
        newest_unix_s=0.0 if newest is None else newest.created_unix_s,
        newest_bytes=0 if newest is None else newest.size_bytes,
    )


def _pace_view(costs: Sequence[frames.Costs]) -> PaceView | None:
    if not costs:
        return None
    dearest = max(costs, key=lambda each: each.added_share)
    return PaceView(
        interval_steps=dearest.interval_steps,
        reason=dearest.reason,
        goal_missed=dearest.goal_missed,
        cost_share=dearest.added_share,
        skipped_count=max(sum(each.skipped.values()) for each in costs),
        steps=dearest.steps,
        train_s=dearest.train_s,
        stall_s=dearest.added_s,
        data_s=dearest.data_s,
        budget=dearest.budget,
        paused_until_unix_s=dearest.paused_until_unix_s,
    )


def _rank_view(rank: RankRecord) -> RankView:
    state = RankState.CLOSED if rank.kept_until_s is None else RankState.LINGERING
    if rank.lease is not None:
        state = RankState.ATTACHED
    return RankView(
        rank=rank.rank,
        state=state,
        step=max(rank.step, rank.costs.step if rank.costs is not None else 0),
        slots=tuple(
            SlotView(state=slot.state, checkpoint=slot.checkpoint)
            for arena in rank.arenas.values()
            for slot in arena.machine.slots
        ),
        arena_bytes=sum(arena.size_bytes for arena in rank.arenas.values()),
        pid=0 if rank.lessee is None else rank.lessee.pid,
        left=rank.left,
    )


def _device_view(opened: OpenStore, device_id: str, path: str) -> DeviceView:
    state, reason = opened.store.device_state(device_id)
    choice = opened.queues[device_id].choice
    found, device = opened.space.reading(device_id), opened.store.device(device_id)
    free_bytes = total_bytes = 0
    if found.space is not None:
        free_bytes, total_bytes = found.space.free_bytes, found.space.total_bytes
        reason = reason or ("" if device is None else opened.store.space.shortage(device, free_bytes))
    reason = reason or found.reason or _silence(found.age_s)
    return DeviceView(
        device_id=device_id,
        path=path,
        free_bytes=free_bytes,
        pool_bytes=opened.store.pool.size_bytes(device_id),
        total_bytes=total_bytes,
        engine=opened.queues[device_id].name,
        engine_reason=choice.reason,
        is_direct=choice.alignment is not None,
        state=DeviceStatus(state.value),
        reason=reason,
        write_bytes_per_s=round(opened.store.speeds.reading(device_id).bytes_per_s or 0),
        queued_bytes=opened.queues[device_id].queued_bytes,
    )


def _silence(age_s: float) -> str:
    """Return what a device says that does not answer; empty while it does."""
    return "" if age_s < SILENT_AFTER_S else f"it has not answered for {age_s:.0f} s"


def _missing_view(device_id: str, path: str, reason: str) -> DeviceView:
    return DeviceView(
        device_id=device_id,
        path=path,
        free_bytes=0,
        pool_bytes=0,
        total_bytes=0,
        engine="",
        engine_reason="",
        is_direct=False,
        state=DeviceStatus.MISSING,
        reason=f"{reason or 'mount it'}; nothing is deleted while a member is missing",
        write_bytes_per_s=0,
    )
