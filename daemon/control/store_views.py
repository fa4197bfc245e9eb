"""What stores hold, as views, and the operations on them that a person may ask for; blocking, for threads.

Used by the control API on the daemon's open stores and by offline.py on stores opened for one command.
"""

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...checkpoint.catalogue import CheckpointInfo, CheckpointState
from ...checkpoint.collect import remove_checkpoint
from ...checkpoint.collect_plan import plan_collection
from ...checkpoint.engine import Engine
from ...checkpoint.fsck import FsckReport, inspect_beside
from ...checkpoint.keep import Keep
from ...checkpoint.manifest_format import decode_manifest_overview, manifest_name
from ...checkpoint.manifest_types import ManifestOverview, SegmentRecord
from ...checkpoint.pins import PIN_PREFIX, Pin, add_pin, pin_of
from ...checkpoint.run_store import RunStore
from ...checkpoint.store import Store
from ...checkpoint.store_format import LockHolder
from ...checkpoint.tags import add_tag, remove_tag
from ...checkpoint.verify import CheckpointVerdict, verify_checkpoint
from ...core.errors import (
    DataError,
    NotFoundError,
    ProtectedError,
    RunBusyError,
    StorageError,
    UsageError,
)
from ...core.ids import CheckpointId
from .ledger_check import find_loaders
from .views import (
    CheckpointDetail,
    CheckpointStatus,
    CheckpointView,
    LeafView,
    LoaderRecord,
    PinView,
    Removed,
    SegmentVerdictView,
    SegmentView,
    Verdict,
)

InMemory = Collection[CheckpointId]
"""Checkpoints of a run that the daemon also keeps in memory."""


RUNS_SHOWN_MAX = 20
"""In a message; `everstep ls` lists them all."""
PIN_TTL_S_MAX = 10 * 366 * 86400.0
LOOK_COUNT_MAX = 3
"""How often something that seems wrong beside a daemon at work is looked at."""


def visible_runs(stores: Sequence[Store], uid: int | None) -> list[RunStore]:
    """Return the runs that this user may see (None: all), by name, then owner."""
    found = [run for store in stores for run in store.runs() if uid is None or run.owner_uid == uid]
    return sorted(found, key=lambda run: (run.name, run.owner_uid, run.store.store_id))


def find_run(stores: Sequence[Store], text: str, uid: int | None) -> RunStore:
    """Return the run of this name, else of this id, else `<uid>/<name>`: who sees everybody's runs tells them apart so.

    Raises:
        NotFoundError: there is none that this user may see.
        UsageError: several are meant.
    """
    runs = visible_runs(stores, uid)
    found = (
        [run for run in runs if run.name == text]
        or [run for run in runs if run.run_id == text]
        or [run for run in runs if f"{run.owner_uid}/{run.name}" == text]
    )
    if not found:
        raise NotFoundError(f"no run {text!r}", hint=_which_runs(runs, text))
    if len(found) > 1:
        places = "; ".join(f"uid {run.owner_uid} in {run.store.devices[0].path}" for run in found)
        raise UsageError(
            f"run {text!r} is there {len(found)} times: {places}",
            hint=f"name it with its owner's uid, {found[0].owner_uid}/{text}, or the directories of one store",
        )
    return found[0]


def _which_runs(runs: Sequence[RunStore], text: str) -> str:
    """Return which runs there are for somebody who asked for one that is not."""
    run, at, _ = text.rpartition("@")
    if at and any(each.name == run for each in runs):
        return f"a checkpoint is named RUN@ATTEMPT.STEP, such as {run}@6.627; `everstep ls {run}` lists them"
    names = ", ".join(dict.fromkeys(each.name for each in runs[:RUNS_SHOWN_MAX]))
    more = ", ..." if len(runs) > RUNS_SHOWN_MAX else ""
    return f"the runs are {names}{more}" if runs else "`everstep ls` lists the runs, and there is none"


def checkpoint_views(run: RunStore, in_memory: InMemory = ()) -> list[CheckpointView]:
    """Return the run's checkpoints, the newest first."""
    return [_view(run, info, in_memory) for info in run.checkpoints()]


def checkpoint_view(run: RunStore, checkpoint: CheckpointId, in_memory: InMemory = ()) -> CheckpointView:
    """Return one checkpoint; NotFoundError where it was removed meanwhile."""
    return _view(run, run.info(checkpoint), in_memory)


def select_checkpoint(run: RunStore, checkpoint: CheckpointId | None) -> CheckpointId:
    """Return the checkpoint, which must be there; None: the newest complete one, else the newest intact one."""
    if checkpoint is not None:
        return run.info(checkpoint).checkpoint
    infos = run.checkpoints()
    for wanted in (CheckpointState.COMPLETE, CheckpointState.LOCAL):
        for info in infos:
            if info.state is wanted:
                return info.checkpoint
    away = ", ".join(f"{each.device_id} (last seen at {each.path})" for each in run.store.missing)
    raise NotFoundError(
        f"run {run.name!r} has no intact checkpoint"
        + (f" while a device is missing: {away}" if away else ""),
        hint=f"{'name all directories of the store, or mount the drive; ' if away else ''}"
        f"`everstep ls {run.name}` lists what is there",
    )


def checkpoint_detail(
    run: RunStore, checkpoint: CheckpointId, *, leaf_count_max: int, in_memory: InMemory = ()
) -> CheckpointDetail:
    """Return a checkpoint with its files and up to `leaf_count_max` of its leaves.

    Raises:
        NotFoundError: there is none.
        CorruptDataError: a manifest is broken.
        StorageError: one cannot be read.
    """
    info = run.info(checkpoint)
    with run.reading(checkpoint):
        contents = [run.manifest_content(checkpoint, rank) for rank in info.ranks]
    manifests: list[ManifestOverview] = []
    leaves: list[LeafView] = []
    for content in contents:
        manifests.append(decode_manifest_overview(content, max(leaf_count_max - len(leaves), 0)))
        leaves += _leaf_views(manifests[-1])
    return CheckpointDetail(
        summary=_view(run, info, in_memory),
        leaves=tuple(leaves),
        segments=tuple(
            _segment_view(run, manifest, record) for manifest in manifests for record in manifest.segments
        ),
        leaf_count=sum(manifest.leaf_count for manifest in manifests),
    )


def verify(
    run: RunStore,
    checkpoint: CheckpointId,
    *,
    engines: Mapping[str, Engine] | None = None,
    in_memory: InMemory = (),
) -> Verdict:
    """Return what every byte of a checkpoint is worth, and its ledgers; damage is remembered in the catalogue."""
    began_s = time.monotonic()
    before = run.info(checkpoint)
    with run.reading(checkpoint):
        found = verify_checkpoint(run, checkpoint, engines=engines)
        loaders = [record for rank in before.ranks for record in _loaders(run, checkpoint, rank)]
    # A store that is read beside its daemon may lose the checkpoint to retention meanwhile: that is no damage.
    if not found.is_intact and _is_gone(run, checkpoint, before):
        raise NotFoundError(f"checkpoint {checkpoint} of run {run.name!r} was removed while it was read")
    return _verdict(_view(run, run.info(checkpoint), in_memory), found, loaders, time.monotonic() - began_s)


def remove(run: RunStore, checkpoint: CheckpointId, *, force: bool) -> Removed:
    """Remove a checkpoint durably; `force`: its tags, too, and even if a restart may need it.

    Raises:
        NotFoundError: there is none.
        ProtectedError: it must stay, and `force` is not set.
        RunBusyError: it is being read or written.
        StorageError: a device is missing or failed.
    """
    tags = run.info(checkpoint).tags
    if tags and not force:
        raise ProtectedError(
            f"checkpoint {checkpoint} of run {run.name!r} has the {_tags_text(tags)}",
            hint="untag or unpin it, or --force removes it all the same",
        )
    if not force and is_protected(run, checkpoint):
        raise ProtectedError(
            f"checkpoint {checkpoint} of run {run.name!r} is kept for a restart: it is the newest complete one, the"
            f" one before it, or newer",
            hint="--force removes it all the same",
        )
    done = remove_checkpoint(run, checkpoint, with_tags=force)
    return Removed(checkpoint_count=len(done.removed), freed_bytes=done.freed_bytes)


def check_removable(run: RunStore, *, force: bool) -> None:
    """Return where all checkpoints of a run can be removed.

    Raises:
        ProtectedError: there are tags, and `force` is not set.
        RunBusyError: one is being read or written.
    """
    if run.tags() and not force:
        raise ProtectedError(
            f"checkpoints of run {run.name!r} have the {_tags_text(sorted(run.tags()))}",
            hint="untag or unpin them, or --force removes them all the same",
        )
    in_use = ", ".join(map(str, sorted(run.pinned())))
    if in_use:
        raise RunBusyError(
            f"of run {run.name!r} is being read or written: {in_use}", hint="try again when it has ended"
        )


def _tags_text(names: Sequence[str]) -> str:
    """Return what keeps checkpoints, for people."""
    pinned = [each.label for each in map(pin_of, names) if each is not None]
    tagged = [name for name in names if pin_of(name) is None]
    parts = [(kind, each) for kind, each in (("tag", tagged), ("pin", pinned)) if each]
    return " and the ".join(
        f"{kind}{'s' if len(each) > 1 else ''} {', '.join(map(repr, each))}" for kind, each in parts
    )


def remove_all(run: RunStore, *, force: bool) -> Removed:
    """Remove every checkpoint of a run with its tags, the oldest first, so that what a crash leaves is the newest.

    Raises:
        ProtectedError: there are tags, and `force` is not set.
        RunBusyError: a checkpoint is being read or written.
        StorageError: a device is missing or failed.
    """
    check_removable(run, force=force)
    count = freed_bytes = 0
    for info in reversed(run.checkpoints()):
        freed_bytes += remove_checkpoint(run, info.checkpoint, with_tags=force).freed_bytes
        count += 1
    for name in run.tags():  # of checkpoints that are not there
        remove_tag(run, name)
    return Removed(checkpoint_count=count, freed_bytes=freed_bytes)


def tag(run: RunStore, checkpoint: CheckpointId, name: str, *, in_memory: InMemory = ()) -> CheckpointView:
    """Return the checkpoint with its new tag, durable.

    Raises:
        UsageError: the name is not allowed, or is another checkpoint's.
        NotFoundError: there is no such checkpoint.
        StorageError: a device failed.
    """
    if name.startswith(PIN_PREFIX):
        raise UsageError(
            f"a tag does not begin with {PIN_PREFIX!r}: {name!r}", hint="`everstep pin` makes those"
        )
    add_tag(run, name, checkpoint)
    return _view(run, run.info(checkpoint), in_memory)


def pin(
    run: RunStore, checkpoint: CheckpointId, label: str, *, ttl_s: float, in_memory: InMemory = ()
) -> CheckpointView:
    """Return the checkpoint with its new pin, durable; `ttl_s` 0: until it is unpinned.

    Raises:
        UsageError: the label or the time is not allowed, or the label is another checkpoint's.
        NotFoundError: there is no such checkpoint.
        StorageError: a device failed.
    """
    if not 0 <= ttl_s <= PIN_TTL_S_MAX:
        raise UsageError(
            f"a pin for {ttl_s:g} s is not possible", hint=f"0 to {PIN_TTL_S_MAX:.0f} s; 0: no end"
        )
    expires_unix_s = math.ceil(time.time() + ttl_s) if ttl_s else 0
    add_pin(run, Pin(label=label, expires_unix_s=expires_unix_s), checkpoint)
    return _view(run, run.info(checkpoint), in_memory)


def inspect(store: Store) -> FsckReport:
    """Return what is not as it should be in a store that this process holds; nothing is changed.

    What a commit or a collection at work shows for a moment is gone when one looks again.
    """
    holder = LockHolder(pid=os.getpid(), socket="", uid=store.uid, kind="everstep fsck")
    paths = [device.path for device in store.devices]
    report = inspect_beside(paths, ops=store.ops, holder=holder, uid=store.uid)
    for _ in range(LOOK_COUNT_MAX - 1):
        if not report.findings:
            break
        before = report
        report = inspect_beside(paths, ops=store.ops, holder=holder, uid=store.uid)
        both = set(before.findings)
        report = replace(report, findings=tuple(each for each in report.findings if each in both))
    return report


def is_protected(run: RunStore, checkpoint: CheckpointId) -> bool:
    """Tell whether retention would never let the checkpoint go, however little it was told to keep."""
    return checkpoint not in plan_collection(run.checkpoints(), floor=run.complete_floor(), keep=Keep(last=1))


def _view(run: RunStore, info: CheckpointInfo, in_memory: InMemory) -> CheckpointView:
    return CheckpointView(
        run_name=run.name,
        run_id=run.run_id,
        owner_uid=run.owner_uid,
        checkpoint=info.checkpoint,
        parent=info.parent,
        world_size=info.world_size,
        ranks=info.ranks,
        size_bytes=info.size_bytes,
        created_unix_s=info.created_unix_s,
        state=CheckpointStatus(info.state.value),
        is_in_memory=info.checkpoint in in_memory,
        is_offered=info.is_offered,
        notes=dict(info.notes),
        problems=info.problems,
        tags=tuple(name for name in info.tags if pin_of(name) is None),
        pins=tuple(
            PinView(label=pin.label, expires_unix_s=pin.expires_unix_s)
            for pin in map(pin_of, info.tags)
            if pin is not None
        ),
        missing_on=_missing_on(run, info),
    )


def _missing_on(run: RunStore, info: CheckpointInfo) -> tuple[str, ...]:
    """Return the directories of the missing members that are all that is wrong with a checkpoint."""
    away = [
        missing for missing in run.store.missing if any(missing.device_id in each for each in info.problems)
    ]
    if not all(any(missing.device_id in each for missing in away) for each in info.problems):
        return ()
    return tuple(sorted(missing.path for missing in away))


def _leaf_views(manifest: ManifestOverview) -> list[LeafView]:
    aliases: dict[str, list[str]] = {}
    for alias in manifest.aliases:
        aliases.setdefault(alias.of, []).append(alias.name)
    return [
        LeafView(
            name=leaf.name,
            dtype=leaf.dtype,
            shape=leaf.shape,
            global_shape=leaf.global_shape,
            size_bytes=leaf.size_bytes,
            aliases=tuple(aliases.get(leaf.name, ())),
            rank=manifest.rank,
        )
        for leaf in manifest.leaves
    ]


def _segment_view(run: RunStore, manifest: ManifestOverview, record: SegmentRecord) -> SegmentView:
    return SegmentView(
        rank=manifest.rank,
        device_id=record.device_id,
        device=run.store.device_name(record.device_id),
        file=_file_below_device(run, record),
        size_bytes=record.file_size_bytes,
        block_count=len(record.block_checksums),
    )


def _file_below_device(run: RunStore, record: SegmentRecord) -> str:
    device = run.store.device(record.device_id)
    return "" if device is None else str(run.segment_path(record).relative_to(device.path))


def _loaders(run: RunStore, checkpoint: CheckpointId, rank: int) -> list[LoaderRecord]:
    """Return one shard's ledgers; none from a manifest that cannot be read, which the verdict names anyway."""
    try:
        return find_loaders(rank, run.manifest(checkpoint, rank).values)
    except (DataError, StorageError):
        return []


def _is_gone(run: RunStore, checkpoint: CheckpointId, before: CheckpointInfo) -> bool:
    """Tell whether no device has a manifest of the checkpoint any more, as far as they can be asked."""
    names = [manifest_name(checkpoint, rank) for rank in before.ranks]
    paths = [run.commits_path(device) / name for device in run.store.devices for name in names]
    try:
        return all(run.store.ops.stat(path) is None for path in paths)
    except StorageError:
        return False


def _verdict(
    summary: CheckpointView, found: CheckpointVerdict, loaders: Sequence[LoaderRecord], elapsed_s: float
) -> Verdict:
    return Verdict(
        summary=summary,
        is_intact=found.is_intact,
        segments=tuple(
            SegmentVerdictView(
                rank=segment.rank,
                path=segment.path,
                size_bytes=segment.size_bytes,
                bad_block=segment.bad_block,
                problem=segment.problem,
            )
            for segment in found.segments
        ),
        problems=found.problems,
        loaders=tuple(loaders),
        elapsed_s=elapsed_s,
    )
