"""Views to and from the messages of the control API: each pair of functions stands together. Pure translation."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import cast

from ...checkpoint.findings import Finding, Severity
from ...checkpoint.keep import Keep
from ...core.errors import UsageError
from ...core.ids import CheckpointId
from ...proto import node_pb2 as pb
from ..devices.scrub_plan import Scrub
from ..slot_machine import SlotState
from .views import (
    CacheView,
    CheckpointDetail,
    CheckpointStatus,
    CheckpointView,
    DaemonView,
    DeviceStatus,
    DeviceView,
    LeafView,
    LoaderRecord,
    MemberView,
    PaceView,
    PinView,
    RankState,
    RankView,
    RunView,
    ScrubView,
    SegmentVerdictView,
    SegmentView,
    ShareGroupView,
    SlotView,
    StatusView,
    StoreView,
    Verdict,
)

LEAVES_BYTES_MAX = 12 * 1024 * 1024
"""Of an answer's 16 MiB: where names are long, fewer leaves are listed."""

_RANK_STATES = {
    RankState.ATTACHED: pb.RANK_STATE_ATTACHED,
    RankState.LINGERING: pb.RANK_STATE_LINGERING,
    RankState.CLOSED: pb.RANK_STATE_CLOSED,
}
SLOT_STATES = {
    SlotState.FREE: pb.SLOT_STATE_FREE,
    SlotState.COPYING: pb.SLOT_STATE_COPYING,
    SlotState.SEALED: pb.SLOT_STATE_SEALED,
    SlotState.PERSISTING: pb.SLOT_STATE_PERSISTING,
    SlotState.KEPT: pb.SLOT_STATE_KEPT,
    SlotState.LOST: pb.SLOT_STATE_LOST,
    SlotState.STREAMING: pb.SLOT_STATE_STREAMING,
    SlotState.ABANDONED: pb.SLOT_STATE_ABANDONED,
}
DEVICE_STATES = {
    DeviceStatus.OK: pb.DEVICE_STATE_OK,
    DeviceStatus.SUSPECT: pb.DEVICE_STATE_SUSPECT,
    DeviceStatus.MISSING: pb.DEVICE_STATE_MISSING,
    DeviceStatus.DRAINING: pb.DEVICE_STATE_DRAINING,
    DeviceStatus.RETIRED: pb.DEVICE_STATE_RETIRED,
    DeviceStatus.SLOW: pb.DEVICE_STATE_SLOW,
}
_CHECKPOINT_STATES = {
    CheckpointStatus.COMPLETE: pb.CHECKPOINT_STATE_COMPLETE,
    CheckpointStatus.LOCAL: pb.CHECKPOINT_STATE_LOCAL,
    CheckpointStatus.DAMAGED: pb.CHECKPOINT_STATE_DAMAGED,
}
_SEVERITIES = {
    Severity.NOTE: pb.SEVERITY_NOTE,
    Severity.REPAIRABLE: pb.SEVERITY_REPAIRABLE,
    Severity.LOST: pb.SEVERITY_LOST,
}
_SEVERITY_OF = {number: severity for severity, number in _SEVERITIES.items()}
_RANK_STATE_OF = {number: state for state, number in _RANK_STATES.items()}
SLOT_STATE_OF = {number: state for state, number in SLOT_STATES.items()}
DEVICE_STATE_OF = {number: state for state, number in DEVICE_STATES.items()}
_CHECKPOINT_STATE_OF = {number: state for state, number in _CHECKPOINT_STATES.items()}


def id_to_text(checkpoint: CheckpointId | None) -> str:
    """Return `<attempt>.<step>`, or nothing for None."""
    return "" if checkpoint is None else str(checkpoint)


def id_from_text(text: str) -> CheckpointId | None:
    """Return the checkpoint of a text, None of an empty one; UsageError on anything else."""
    try:
        return CheckpointId.parse(text) if text else None
    except ValueError as error:
        raise UsageError(str(error), hint="e.g. 1.200; `everstep ls` lists them") from error


# --- status ---------------------------------------------------------------------------------------------------------


def status_to_message(status: StatusView) -> pb.GetStatusResponse:
    """Return the message of a status."""
    daemon = status.daemon
    return pb.GetStatusResponse(
        daemon=pb.DaemonInfo(
            version=daemon.version,
            pid=daemon.pid,
            kind=pb.DAEMON_KIND_PRIVATE if daemon.is_private else pb.DAEMON_KIND_NODE,
            uptime_s=daemon.uptime_s,
            socket=daemon.socket,
            uid=daemon.uid,
            arena_bytes=daemon.arena_bytes,
            metrics_port=daemon.metrics_port,
            metrics_url=daemon.metrics_url,
            draining=daemon.is_draining,
            persisted_count=daemon.persisted_count,
            failed_count=daemon.failed_count,
        ),
        runs=[run_to_message(run) for run in status.runs],
        stores=[_store_to_message(store) for store in status.stores],
        caches=[cache_to_message(cache) for cache in status.caches],
        groups=[group_to_message(group) for group in status.groups],
        members=[member_to_message(member) for member in status.members],
    )


def status_from_message(message: pb.GetStatusResponse) -> StatusView:
    """Return the status of a message."""
    daemon = message.daemon
    return StatusView(
        daemon=DaemonView(
            version=daemon.version,
            pid=daemon.pid,
            is_private=daemon.kind == pb.DAEMON_KIND_PRIVATE,
            uptime_s=daemon.uptime_s,
            socket=daemon.socket,
            uid=daemon.uid,
            arena_bytes=daemon.arena_bytes,
            metrics_port=daemon.metrics_port,
            metrics_url=daemon.metrics_url,
            is_draining=daemon.draining,
            persisted_count=daemon.persisted_count,
            failed_count=daemon.failed_count,
        ),
        runs=tuple(run_from_message(run) for run in message.runs),
        stores=tuple(_store_from_message(store) for store in message.stores),
        caches=tuple(cache_from_message(cache) for cache in message.caches),
        groups=tuple(group_from_message(group) for group in message.groups),
        members=tuple(member_from_message(member) for member in message.members),
    )


def member_to_message(member: MemberView) -> pb.MemberStatus:
    """Return the message of a node."""
    return pb.MemberStatus(
        address=member.address,
        is_me=member.is_me,
        is_asked=member.is_asked,
        problem=member.problem,
        fetched_count=member.fetched_count,
        offered_count=member.offered_count,
    )


def member_from_message(member: pb.MemberStatus) -> MemberView:
    """Return the node of a message."""
    return MemberView(
        address=member.address,
        is_me=member.is_me,
        is_asked=member.is_asked,
        problem=member.problem,
        fetched_count=member.fetched_count,
        offered_count=member.offered_count,
    )


def cache_to_message(cache: CacheView) -> pb.CacheStatus:
    """Return the message of a cache."""
    return pb.CacheStatus(
        number=cache.number,
        owner_uid=cache.uid,
        fingerprint=cache.fingerprint,
        content=cache.content,
        sample_count=cache.sample_count,
        published_count=cache.published_count,
        used_bytes=cache.used_bytes,
        allocated_bytes=cache.allocated_bytes,
        budget_bytes=cache.budget_bytes,
        client_count=cache.client_count,
        idle_s=cache.idle_s,
        reason=cache.reason,
        hit_count=cache.hit_count,
        miss_count=cache.miss_count,
    )


def cache_from_message(cache: pb.CacheStatus) -> CacheView:
    """Return the cache of a message."""
    return CacheView(
        number=cache.number,
        uid=cache.owner_uid,
        fingerprint=cache.fingerprint,
        content=cache.content,
        sample_count=cache.sample_count,
        published_count=cache.published_count,
        used_bytes=cache.used_bytes,
        allocated_bytes=cache.allocated_bytes,
        budget_bytes=cache.budget_bytes,
        client_count=cache.client_count,
        idle_s=cache.idle_s,
        reason=cache.reason,
        hit_count=cache.hit_count,
        miss_count=cache.miss_count,
    )


def group_to_message(group: ShareGroupView) -> pb.ShareGroupStatus:
    """Return the message of a group of jobs."""
    return pb.ShareGroupStatus(
        name=group.name,
        owner_uid=group.uid,
        job_count=group.job_count,
        outside_count=group.outside_count,
        window_start=group.window[0],
        window_stop=group.window[1],
        ready_count=group.ready_count,
        leased_count=group.leased_count,
        prepared_count=group.prepared_count,
        served_count=group.served_count,
        private_count=group.private_count,
        used_bytes=group.used_bytes,
        budget_bytes=group.budget_bytes,
        slowest_pid=group.slowest_pid,
        slowest_behind=group.slowest_behind,
        quarantined=group.quarantined,
    )


def group_from_message(group: pb.ShareGroupStatus) -> ShareGroupView:
    """Return the group of a message."""
    return ShareGroupView(
        name=group.name,
        uid=group.owner_uid,
        job_count=group.job_count,
        outside_count=group.outside_count,
        window=(group.window_start, group.window_stop),
        ready_count=group.ready_count,
        leased_count=group.leased_count,
        prepared_count=group.prepared_count,
        served_count=group.served_count,
        private_count=group.private_count,
        used_bytes=group.used_bytes,
        budget_bytes=group.budget_bytes,
        slowest_pid=group.slowest_pid,
        slowest_behind=group.slowest_behind,
        quarantined=tuple(group.quarantined),
    )


def run_to_message(run: RunView) -> pb.RunStatus:
    """Return the message of a run."""
    return pb.RunStatus(
        name=run.name,
        run_id=run.run_id,
        owner_uid=run.owner_uid,
        attempt=run.attempt,
        world_size=run.world_size,
        complete_floor=id_to_text(run.complete_floor),
        retention=pb.Retention(
            last=run.keep.last,
            every_steps=run.keep.every_steps or 0,
            every=run.keep.every or "",
            own=run.is_own_keep,
        ),
        pace=None if run.pace is None else pb.Pace(**asdict(run.pace)),
        newest_checkpoint=id_to_text(run.newest),
        newest_unix_s=run.newest_unix_s,
        newest_bytes=run.newest_bytes,
        ranks=[
            pb.RankStatus(
                rank=rank.rank,
                state=_RANK_STATES[rank.state],
                step=rank.step,
                arena_bytes=rank.arena_bytes,
                pid=rank.pid,
                left=rank.left,
                slots=[
                    pb.SlotStatus(state=SLOT_STATES[slot.state], checkpoint=id_to_text(slot.checkpoint))
                    for slot in rank.slots
                ],
            )
            for rank in run.ranks
        ],
    )


def _pace_from_message(pace: pb.Pace) -> PaceView:
    return PaceView(
        interval_steps=pace.interval_steps,
        reason=pace.reason,
        goal_missed=pace.goal_missed,
        cost_share=pace.cost_share,
        skipped_count=pace.skipped_count,
        steps=pace.steps,
        train_s=pace.train_s,
        stall_s=pace.stall_s,
        data_s=pace.data_s,
        budget=pace.budget if pace.HasField("budget") else None,
        paused_until_unix_s=pace.paused_until_unix_s,
    )


def run_from_message(run: pb.RunStatus) -> RunView:
    """Return the run of a message."""
    return RunView(
        name=run.name,
        run_id=run.run_id,
        owner_uid=run.owner_uid,
        attempt=run.attempt,
        world_size=run.world_size,
        complete_floor=id_from_text(run.complete_floor),
        keep=Keep(
            last=run.retention.last,
            every_steps=run.retention.every_steps or None,
            every=run.retention.every or None,
        ),
        is_own_keep=run.retention.own,
        pace=_pace_from_message(run.pace) if run.HasField("pace") else None,
        newest=id_from_text(run.newest_checkpoint),
        newest_unix_s=run.newest_unix_s,
        newest_bytes=run.newest_bytes,
        ranks=tuple(
            RankView(
                rank=rank.rank,
                state=_RANK_STATE_OF[rank.state],
                step=rank.step,
                arena_bytes=rank.arena_bytes,
                pid=rank.pid,
                left=rank.left,
                slots=tuple(
                    SlotView(state=SLOT_STATE_OF[slot.state], checkpoint=id_from_text(slot.checkpoint))
                    for slot in rank.slots
                ),
            )
            for rank in run.ranks
        ),
    )


def _store_to_message(store: StoreView) -> pb.StoreStatus:
    return pb.StoreStatus(
        store_id=store.store_id,
        notes=store.notes,
        problems=store.problems,
        scrub=_scrub_to_message(store.scrub),
        devices=[
            pb.DeviceStatus(
                device_id=device.device_id,
                path=device.path,
                free_bytes=device.free_bytes,
                pool_bytes=device.pool_bytes,
                total_bytes=device.total_bytes,
                engine=device.engine,
                engine_reason=device.engine_reason,
                direct=device.is_direct,
                state=DEVICE_STATES[device.state],
                reason=device.reason,
                write_bytes_per_second=device.write_bytes_per_s,
                name=device.name,
                queued_bytes=device.queued_bytes,
            )
            for device in store.devices
        ],
    )


def _store_from_message(store: pb.StoreStatus) -> StoreView:
    return StoreView(
        store_id=store.store_id,
        notes=tuple(store.notes),
        problems=tuple(store.problems),
        scrub=_scrub_from_message(store.scrub),
        devices=tuple(
            DeviceView(
                device_id=device.device_id,
                path=device.path,
                free_bytes=device.free_bytes,
                pool_bytes=device.pool_bytes,
                total_bytes=device.total_bytes,
                engine=device.engine,
                engine_reason=device.engine_reason,
                is_direct=device.direct,
                state=DEVICE_STATE_OF[device.state],
                reason=device.reason,
                write_bytes_per_s=device.write_bytes_per_second,
                name=device.name,
                queued_bytes=device.queued_bytes,
            )
            for device in store.devices
        ),
    )


def _scrub_to_message(scrub: ScrubView) -> pb.ScrubStatus:
    newest = scrub.newest
    if newest is None:
        return pb.ScrubStatus(next_unix_s=scrub.next_unix_s or 0)
    return pb.ScrubStatus(
        has_begun=True,
        started_unix_s=newest.started_unix_s,
        ended_unix_s=newest.ended_unix_s or 0,
        planned_count=newest.planned_count,
        checkpoint_count=newest.checkpoint_count,
        size_bytes=newest.size_bytes,
        damaged=newest.damaged,
        next_unix_s=scrub.next_unix_s or 0,
    )


def _scrub_from_message(message: pb.ScrubStatus) -> ScrubView:
    newest = Scrub(
        started_unix_s=message.started_unix_s,
        ended_unix_s=message.ended_unix_s or None,
        planned_count=message.planned_count,
        checkpoint_count=message.checkpoint_count,
        size_bytes=message.size_bytes,
        damaged=tuple(message.damaged),
    )
    return ScrubView(newest=newest if message.has_begun else None, next_unix_s=message.next_unix_s or None)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def summary_to_message(view: CheckpointView) -> pb.CheckpointSummary:
    """Return the message of one checkpoint in a list."""
    return pb.CheckpointSummary(
        run_name=view.run_name,
        run_id=view.run_id,
        owner_uid=view.owner_uid,
        attempt=view.checkpoint.attempt,
        step=view.checkpoint.step,
        world_size=view.world_size,
        ranks=view.ranks,
        size_bytes=view.size_bytes,
        created_unix_s=view.created_unix_s,
        state=_CHECKPOINT_STATES[view.state],
        in_memory=view.is_in_memory,
        notes=view.notes,
        parent=id_to_text(view.parent),
        problems=view.problems,
        offered=view.is_offered,
        tags=view.tags,
        missing_on=view.missing_on,
        pins=[pb.Pin(label=each.label, expires_unix_s=each.expires_unix_s) for each in view.pins],
    )


def summary_from_message(message: pb.CheckpointSummary) -> CheckpointView:
    """Return one checkpoint of a list."""
    return CheckpointView(
        run_name=message.run_name,
        run_id=message.run_id,
        owner_uid=message.owner_uid,
        checkpoint=CheckpointId(message.attempt, message.step),
        world_size=message.world_size,
        ranks=tuple(message.ranks),
        size_bytes=message.size_bytes,
        created_unix_s=message.created_unix_s,
        state=_CHECKPOINT_STATE_OF[message.state],
        is_in_memory=message.in_memory,
        notes=dict(message.notes),
        parent=id_from_text(message.parent),
        problems=tuple(message.problems),
        is_offered=message.offered,
        tags=tuple(message.tags),
        missing_on=tuple(message.missing_on),
        pins=tuple(PinView(label=each.label, expires_unix_s=each.expires_unix_s) for each in message.pins),
    )


def _with_room(leaves: Iterable[LeafView]) -> Iterator[pb.LeafInfo]:
    """Yield the messages of the first leaves, until one has no room in the answer."""
    size_bytes = 0
    for leaf in leaves:
        message = pb.LeafInfo(
            name=leaf.name,
            dtype=leaf.dtype,
            shape=leaf.shape,
            global_shape=leaf.global_shape,
            size_bytes=leaf.size_bytes,
            aliases=leaf.aliases,
            rank=leaf.rank,
        )
        size_bytes += message.ByteSize()
        if size_bytes > LEAVES_BYTES_MAX:
            return
        yield message


def detail_to_message(detail: CheckpointDetail) -> pb.GetCheckpointResponse:
    """Return the message of a checkpoint with its leaves and files."""
    return pb.GetCheckpointResponse(
        summary=summary_to_message(detail.summary),
        leaf_count=detail.leaf_count,
        leaves=_with_room(detail.leaves),
        segments=[
            pb.SegmentInfo(
                rank=segment.rank,
                device_id=segment.device_id,
                device=segment.device,
                file=segment.file,
                size_bytes=segment.size_bytes,
                block_count=segment.block_count,
            )
            for segment in detail.segments
        ],
    )


def detail_from_message(message: pb.GetCheckpointResponse) -> CheckpointDetail:
    """Return a checkpoint with its leaves and files."""
    return CheckpointDetail(
        summary=summary_from_message(message.summary),
        leaf_count=message.leaf_count,
        leaves=tuple(
            LeafView(
                name=leaf.name,
                dtype=leaf.dtype,
                shape=tuple(leaf.shape),
                global_shape=tuple(leaf.global_shape),
                size_bytes=leaf.size_bytes,
                aliases=tuple(leaf.aliases),
                rank=leaf.rank,
            )
            for leaf in message.leaves
        ),
        segments=tuple(
            SegmentView(
                rank=segment.rank,
                device_id=segment.device_id,
                device=segment.device,
                file=segment.file,
                size_bytes=segment.size_bytes,
                block_count=segment.block_count,
            )
            for segment in message.segments
        ),
    )


def finding_to_message(finding: Finding) -> pb.Finding:
    """Return the message of one finding of an inspection."""
    return pb.Finding(
        severity=_SEVERITIES[finding.severity],
        path=finding.path,
        problem=finding.problem,
        repair=finding.repair,
    )


def finding_from_message(message: pb.Finding) -> Finding:
    """Return one finding of an inspection."""
    return Finding(
        severity=_SEVERITY_OF[message.severity],
        path=message.path,
        problem=message.problem,
        repair=message.repair,
    )


def verdict_to_message(verdict: Verdict) -> pb.VerifyCheckpointResponse:
    """Return the message of a verdict."""
    return pb.VerifyCheckpointResponse(
        summary=summary_to_message(verdict.summary),
        ok=verdict.is_intact,
        problems=verdict.problems,
        elapsed_s=verdict.elapsed_s,
        segments=[
            pb.SegmentCheck(
                rank=segment.rank,
                path=segment.path,
                size_bytes=segment.size_bytes,
                bad_block=segment.bad_block,
                problem=segment.problem,
            )
            for segment in verdict.segments
        ],
        loaders=[
            pb.LoaderRecord(
                rank=loader.rank,
                place=loader.place,
                ledger_json=json.dumps(loader.ledger),
                state_json=json.dumps(loader.state),
            )
            for loader in verdict.loaders
        ],
    )


def verdict_from_message(message: pb.VerifyCheckpointResponse) -> Verdict:
    """Return a verdict."""
    return Verdict(
        summary=summary_from_message(message.summary),
        is_intact=message.ok,
        problems=tuple(message.problems),
        elapsed_s=message.elapsed_s,
        segments=tuple(
            SegmentVerdictView(
                rank=segment.rank,
                path=segment.path,
                size_bytes=segment.size_bytes,
                bad_block=segment.bad_block if segment.HasField("bad_block") else None,
                problem=segment.problem,
            )
            for segment in message.segments
        ),
        loaders=tuple(
            LoaderRecord(
                rank=loader.rank,
                place=loader.place,
                ledger=cast(object, json.loads(loader.ledger_json)),
                state=cast(object, json.loads(loader.state_json)),
            )
            for loader in message.loaders
        ),
    )
