"""The document that the page asks for: views as JSON, field by field, so that nothing gets there by accident. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..control.views import CacheView, DeviceView, RankState, ScrubView, ShareGroupView, StatusView
from ..events.event_log_machine import Batch
from ..events.event_types import WARNINGS, Event
from .verdict_plan import Finding, Level, RunFacts, device_finding, findings_of, level_of, run_findings

EVENTS_MAX = 1000
"""In one answer; the page asks again for what came after."""

Document = dict[str, Any]
Described = tuple[RunFacts, Sequence[tuple[float, float, float]]]
"""A run, and (unix time, stall share, data share) of its last hour."""


def document(
    status: StatusView,
    runs: Sequence[Described],
    *,
    events: Batch,
    log_id: str,
    now_unix_s: float,
    sees_all: bool,
) -> Document:
    """Return the whole document."""
    findings = findings_of(status, [facts for facts, _ in runs])
    daemon = status.daemon
    return {
        "now_unix_s": now_unix_s,
        "sees_all": sees_all,
        "level": level_of(findings).value,
        "findings": [_finding(each) for each in findings],
        "daemon": {
            "version": daemon.version,
            "kind": "private" if daemon.is_private else "node",
            "pid": daemon.pid,
            "uid": daemon.uid,
            "uptime_s": daemon.uptime_s,
            "arena_bytes": daemon.arena_bytes if sees_all else None,
            "persisted_count": daemon.persisted_count if sees_all else None,
            "failed_count": daemon.failed_count if sees_all else None,
            "is_draining": daemon.is_draining,
        },
        "runs": [_run(*each) for each in runs],
        "devices": [_device(each) for store in status.stores for each in store.devices],
        "scrubs": [_scrub(store.scrub) for store in status.stores],
        "caches": [_cache(each) for each in status.caches],
        "groups": [_group(each) for each in status.groups],
        "members": [
            {
                "address": each.address,
                "is_me": each.is_me,
                "problem": each.problem,
                "fetched_count": each.fetched_count,
                "offered_count": each.offered_count,
            }
            for each in status.members
        ],
        "log_id": log_id,
        "last": events.last,
        "missed_count": events.missed_count,
        "events": [_event(each) for each in events.events],
    }


def _finding(finding: Finding) -> Document:
    return {
        "level": finding.level.value,
        "subject": finding.subject,
        "text": finding.text,
        "hint": finding.hint,
    }


def _run(facts: RunFacts, shares: Sequence[tuple[float, float, float]]) -> Document:
    view, pace = facts.view, facts.view.pace
    attached = sum(rank.state is RankState.ATTACHED for rank in view.ranks)
    gone = [rank for rank in view.ranks if rank.state is RankState.LINGERING]
    waits = "waiting" if any(not rank.left for rank in gone) else "left"
    return {
        "name": view.name,
        "run_id": view.run_id,
        "owner_uid": view.owner_uid,
        "attempt": view.attempt,
        "world_size": view.world_size,
        "state": "training" if attached else waits if gone else "ended",
        "attached_count": attached,
        "lingering_count": len(gone),
        "level": level_of([*run_findings(facts)]).value,
        "step": max((rank.step for rank in view.ranks), default=0),
        "steps_per_s": facts.steps_per_s,
        "stall_share": facts.stall_share,
        "data_share": facts.data_share,
        "interval_steps": None if pace is None else pace.interval_steps,
        "interval_s": facts.interval_s,
        "is_paused": pace is not None and pace.is_paused,
        "reason": "" if pace is None else pace.reason,
        "skipped_count": 0 if pace is None else pace.skipped_count,
        "complete": "" if view.complete_floor is None else str(view.complete_floor),
        "newest": None
        if view.newest is None
        else {
            "checkpoint": str(view.newest),
            "size_bytes": view.newest_bytes,
            "created_unix_s": view.newest_unix_s,
        },
        "arena_bytes": sum(rank.arena_bytes for rank in view.ranks),
        "slots": _slots(facts),
        "shares": list(shares),
    }


def _slots(facts: RunFacts) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for rank in facts.view.ranks:
        for slot in rank.slots:
            counts[slot.state.value] = counts.get(slot.state.value, 0) + 1
    return counts


def _device(device: DeviceView) -> Document:
    finding = device_finding(device)
    return {
        "name": device.name or device.path,
        "path": device.path,
        "state": device.state.value,
        "level": Level.GREEN.value if finding is None else finding.level.value,
        "reason": device.reason,
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
        "pool_bytes": device.pool_bytes,
        "write_bytes_per_s": device.write_bytes_per_s,
        "queued_bytes": device.queued_bytes,
        "engine": device.engine,
        "is_direct": device.is_direct,
    }


def _scrub(scrub: ScrubView) -> Document:
    newest = scrub.newest
    return {
        "next_unix_s": scrub.next_unix_s,
        "started_unix_s": None if newest is None else newest.started_unix_s,
        "ended_unix_s": None if newest is None else newest.ended_unix_s,
    }


def _cache(cache: CacheView) -> Document:
    return {
        "number": cache.number,
        "uid": cache.uid,
        "dataset": cache.fingerprint,
        "content": cache.content,
        "sample_count": cache.sample_count,
        "published_count": cache.published_count,
        "used_bytes": cache.used_bytes,
        "budget_bytes": cache.budget_bytes,
        "client_count": cache.client_count,
        "hit_count": cache.hit_count,
        "miss_count": cache.miss_count,
        "reason": cache.reason,
    }


def _group(group: ShareGroupView) -> Document:
    return {
        "name": group.name,
        "uid": group.uid,
        "job_count": group.job_count,
        "outside_count": group.outside_count,
        "window": group.window,
        "prepared_count": group.prepared_count,
        "served_count": group.served_count,
        "private_count": group.private_count,
        "used_bytes": group.used_bytes,
        "budget_bytes": group.budget_bytes,
        "slowest_behind": group.slowest_behind,
    }


def _event(event: Event) -> Document:
    return {
        "sequence": event.sequence,
        "kind": event.kind.value,
        "unix_s": event.unix_s,
        "text": event.text,
        "hint": event.hint,
        "is_warning": event.kind in WARNINGS,
        "run": f"{event.owner_uid}/{event.run_id}" if event.run_id else "",
        "rank": event.rank,
        "checkpoint": "" if event.checkpoint is None else str(event.checkpoint),
        "size_bytes": event.size_bytes,
        "elapsed_s": event.elapsed_s,
    }
