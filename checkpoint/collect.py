"""Removing checkpoints so that no crash brings back half of one: manifests first, data last.

The order is the reverse of a commit's: unlink the manifests on all devices -> fsync commits on all -> unlink the
segments, or move them to the pool -> remove the generation directories -> fsync data. After the second step the
checkpoint is gone for good; a crash later leaves orphans, which recovery removes.

Only after the second step may a segment be written over: until then a crash could bring back a manifest that says what
it held. So this is the only place that fills the pool; what a failed write or a crash leaves is unlinked.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ProtectedError, RunBusyError, StorageError
from ..core.ids import CheckpointId
from .catalogue import SegmentRef, ShardRecord
from .collect_plan import plan_collection
from .device import Device
from .device_set import DeviceSet
from .keep import Keep
from .manifest_format import manifest_name
from .run_store import SEGMENT_SUFFIX, TAGS_NAME, RunStore
from .store_format import Tag

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection removed."""

    removed: tuple[CheckpointId, ...]
    freed_bytes: int
    reason: str = ""
    """Why nothing may be removed now; empty when that is not so."""


def collect_garbage(run: RunStore, *, keep: Keep) -> Collected:
    """Remove what the keep rules (collect_plan.py) let go; nothing while a device is missing or suspect.

    Raises:
        StorageError: a device failed; what was removed by then is gone, nothing is half there.
    """
    reason = refusal(run)
    if reason:
        return Collected(removed=(), freed_bytes=0, reason=reason)
    plan = plan_collection(
        run.checkpoints(),
        floor=run.complete_floor(),
        keep=keep,
        pinned=run.pinned(),
        given_up=run.given_up(),
        origin=run.origin,
    )
    freed = {checkpoint: _remove(run, checkpoint) for checkpoint in plan}
    removed = tuple(checkpoint for checkpoint, size_bytes in freed.items() if size_bytes is not None)
    return Collected(removed=removed, freed_bytes=sum(filter(None, freed.values())))


def remove_checkpoint(run: RunStore, checkpoint: CheckpointId, *, with_tags: bool = False) -> Collected:
    """Remove one checkpoint on request, whatever the keep rule says; `with_tags`: and its tags, but never only these.

    Raises:
        NotFoundError: there is none here.
        ProtectedError: it has a tag, and `with_tags` is not set.
        RunBusyError: it is being read or written.
        StorageError: a device is missing or failed.
    """
    run.info(checkpoint)
    reason = refusal(run)
    if reason:
        raise StorageError(f"checkpoint {checkpoint} of run {run.name!r} cannot be removed: {reason}")
    freed_bytes = _remove(run, checkpoint, with_tags=with_tags)
    if freed_bytes is None and run.info(checkpoint).tags and not with_tags:
        raise ProtectedError(f"checkpoint {checkpoint} of run {run.name!r} has a tag", hint="untag it first")
    if freed_bytes is None:
        raise RunBusyError(
            f"checkpoint {checkpoint} of run {run.name!r} is in use", hint="try again when it was read"
        )
    return Collected(removed=(checkpoint,), freed_bytes=freed_bytes)


def refusal(run: RunStore) -> str:
    """Return why nothing of this run may be deleted now, or an empty string."""
    reason = store_refusal(run.store)
    return reason or (f"references are unknown: {run.unreadable}" if run.unreadable else "")


def store_refusal(store: DeviceSet) -> str:
    """Return why nothing of this store may be deleted now, or an empty string."""
    if store.is_read_only:
        return "the store is open for reading only"
    if store.may_delete:
        return ""
    if store.missing:
        names = ", ".join(missing.path for missing in store.missing)
        return f"missing devices: {names}"
    if store.is_changing:
        return "a device is leaving the store, and not every other one knows of it yet"
    return "a device is suspect; `everstep device readmit` it when it is well"


def _remove(run: RunStore, checkpoint: CheckpointId, *, with_tags: bool = False) -> int | None:
    """Remove one checkpoint and return the bytes of its shards; None where it has a tag or is in use by now.

    Raises:
        StorageError: a device failed; the message names it.
    """
    # A device that leaves in the middle would bring its manifests back after a crash.
    with run.store.deleting():
        shards = _forget_with_tags(run, checkpoint) if with_tags else run.forget(checkpoint)
        if not shards:
            return None
        names = [manifest_name(shard.checkpoint, shard.rank) for shard in shards]
        unlink_from_all(run, {device: run.commits_path(device) for device in run.store.devices}, names)
        _remove_segments(run, shards)
    _log.info("checkpoint_removed run=%s checkpoint=%s shards=%d", run.run_id, checkpoint, len(shards))
    return sum(shard.size_bytes for shard in shards)


def _forget_with_tags(run: RunStore, checkpoint: CheckpointId) -> list[ShardRecord]:
    """Take a checkpoint and its tags out of the catalogue, then the tags from the devices; none where it is in use."""
    with run.tagging:  # or a tag of this name that another checkpoint gets meanwhile would go, too
        tags = [Tag(name=name, checkpoint=checkpoint) for name in run.info(checkpoint).tags]
        shards = run.forget(checkpoint, with_tags=True)
        if shards and tags:
            unlink_from_all(run, tag_places(run), [tag.file_name for tag in tags])
        return shards


def tag_places(run: RunStore) -> dict[Device, Path]:
    """Return the directories of tags that there are; StorageError where a device failed."""
    found: dict[Device, Path] = {}
    for device in run.store.devices:
        directory = run.path_on(device) / TAGS_NAME
        with run.store.watching(device.device_id):
            if run.store.ops.stat(directory) is not None:
                found[device] = directory
    return found


def unlink_from_all(run: RunStore, places: Mapping[Device, Path], names: Sequence[str]) -> None:
    """Return when files of these names are gone durably from a directory on each device; StorageError: one failed."""
    for device, directory in places.items():
        with run.store.watching(device.device_id):
            for name in names:
                run.store.ops.unlink(directory / name)
    for device, directory in places.items():
        with run.store.watching(device.device_id):
            run.store.ops.sync_directory(directory)


def _remove_segments(run: RunStore, removed: Sequence[ShardRecord]) -> None:
    """Let go of the segments that only removed shards refer to, then of the directories that are empty by that."""
    still_used = {ref for shard in run.shards() for ref in shard.segments}
    generations_used = {(ref.device_id, ref.generation) for ref in still_used}
    touched: defaultdict[str, set[str]] = defaultdict(set)
    for ref in dict.fromkeys(ref for shard in removed for ref in shard.segments if ref not in still_used):
        _let_go(run, ref, sum(shard.device_bytes.get(ref.device_id, 0) for shard in removed))
        touched[ref.device_id].add(ref.generation)
    for device in run.store.devices:
        with run.store.watching(device.device_id):
            for generation in sorted(touched[device.device_id]):
                if (device.device_id, generation) not in generations_used:
                    run.store.ops.remove_directory(run.generation_path(device, generation))
            if touched[device.device_id]:
                run.store.ops.sync_directory(run.data_path(device))
                run.store.space.make_room(device)


def _let_go(run: RunStore, ref: SegmentRef, pool_bound_bytes: int) -> None:
    """Let a segment wait to be written again, or else unlink it."""
    device = run.store.device(ref.device_id)
    if device is None:  # of a device that is no member any more: its files are not ours to remove
        return
    path = run.generation_path(device, ref.generation) / f"{ref.segment}{SEGMENT_SUFFIX}"
    with run.store.watching(ref.device_id):
        # A device that drains gets no new segments, so nothing of it is written again.
        is_kept = device in run.store.writable and run.store.pool.put(
            device, path, owner_uid=run.owner_uid, bound_bytes=pool_bound_bytes
        )
        if not is_kept:
            run.store.ops.unlink(path)
