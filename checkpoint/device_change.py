"""Devices that drain and leave: the durable changes of who belongs to a store.

Retiring goes in two rounds over the members that are present and well:

    1. draining in every disk.id, then each manifest on every one of them
    2. in memory it is no member any more, then retired in every disk.id, then in its own if it is there and well

So wherever one copy says retired, all others say at least draining: whoever opens the store with a part of the members
writes nothing more to the device that a later opening would ignore. A crash before round 2 leaves it draining, one
inside is finished by the next opening (membership_plan.merge).
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import (
    DataError,
    NotFoundError,
    ProtectedError,
    StorageError,
    UsageError,
)
from .device import DISK_ID_NAME, Device
from .device_round import on_each
from .device_set import DeviceState
from .durable import publish_new, publish_over
from .manifest_format import manifest_name
from .membership_plan import Membership
from .retire_plan import Holding, holdings_of, refusal, retired_device
from .store import Store
from .store_format import encode_disk_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """A device that left."""

    lost: tuple[Holding, ...]
    """What had a part on it, newest first within a run."""
    problems: tuple[str, ...]
    """What went wrong although the device is retired, a sentence each."""


def find_device(store: Store, name: str) -> str:
    """Return the id of the member or retired device of this id, beginning of an id (4 digits or more), or path.

    Raises:
        NotFoundError: there is none.
        UsageError: several are meant.
    """
    membership = store.membership
    paths = {key: device.path for key, device in membership.retired.items()} | dict(membership.members)
    found = [key for key in paths if key == name] or [
        key for key, path in membership.members.items() if path == name
    ]
    found = found or [key for key in paths if paths[key] == name or (len(name) >= 4 and key.startswith(name))]
    if not found:
        raise NotFoundError(
            f"no device {name!r} in this store", hint="`everstep device ls` lists the devices"
        )
    if len(found) > 1:
        raise UsageError(
            f"{name!r} may be {' or '.join(sorted(found))}", hint="name the device by its whole id"
        )
    return found[0]


def holdings(store: Store, device_id: str) -> list[Holding]:
    """Return what lies on a device, by run, newest first."""
    return [
        holding
        for run in store.runs()
        for holding in holdings_of(
            run=run.name,
            owner_uid=run.owner_uid,
            run_id=run.run_id,
            infos=run.checkpoints(),
            held=run.held_bytes(device_id),
        )
    ]


def drain(store: Store, device_id: str) -> None:
    """Return when every well member knows that the device gets no new segments; they end before, in any case.

    Raises:
        UsageError: it is no member.
        ProtectedError: no other one is left to write to.
        StorageError: a member could not record it; the device drains until the store is opened again.
    """
    with store.changing():
        _check_member(store, device_id)
        if not [device for device in store.writable if device.device_id != device_id]:
            raise ProtectedError(
                f"device {store.device_name(device_id)} cannot drain: no other device of the store may be written to",
                hint="readmit or add a device first",
            )
        store.use(store.membership.drain(device_id))
        _record(store, store.membership)


def cancel_drain(store: Store, device_id: str) -> None:
    """Return when every member knows that the device gets new segments again.

    Raises:
        UsageError: it is no member, or does not drain.
        StorageError: a member is missing or suspect, which may know that the device is retired, and says for sure that
            it drains; or one could not record it.
    """
    with store.changing():
        _check_member(store, device_id)
        if device_id not in store.membership.draining:
            raise UsageError(f"device {store.device_name(device_id)} does not drain")
        well = {device.device_id for device in _well(store)}
        unheard = [
            f"{path} is {store.device_state(key)[0].value}"
            for key, path in store.membership.members.items()
            if key not in well
        ]
        if unheard:
            raise StorageError(
                f"device {store.device_name(device_id)} stays draining while {', '.join(unheard)}",
                hint="mount it and readmit it, or retire it first",
            )
        wanted = store.membership.cancel_drain(device_id)
        _record(store, wanted)
        store.use(wanted)


def check_retire(store: Store, device_id: str, *, force: bool) -> list[Holding]:
    """Return what retiring the device would lose.

    Raises:
        ProtectedError: it is the last one that is well, or well itself and not forced.
        UsageError: it is retired already.
    """
    _check_member(store, device_id)
    found = holdings(store, device_id)
    others = [device for device in _well(store) if device.device_id != device_id]
    reason = refusal(store.device_state(device_id)[0], found, is_last=not others, force=force)
    if reason:
        raise ProtectedError(
            f"device {store.device_name(device_id)} is not retired: {reason}",
            hint="mount or readmit another one first" if not others else "drain it first, or --force",
        )
    return found


def retire(store: Store, device_id: str, *, force: bool, now_unix_s: float) -> Retirement:
    """Return when every well member knows that the device is retired; what lies on it is never read again.

    Not a byte of the device is changed, but its own disk.id where it is present and well: that says so too.

    Raises:
        ProtectedError, UsageError: see `check_retire`.
        DeadlineError: a removal does not end.
        StorageError: a member failed. In round 1 the device drains; in round 2 it is retired, and nothing is deleted
            until the store is opened again.
    """
    with store.changing():
        before = check_retire(store, device_id, force=force)
        record = retired_device(store.membership.members[device_id], before, now_unix_s=now_unix_s)
        store.use(store.membership.drain(device_id))
        untold = _record(store, store.membership, leaving=device_id)
        # A device that comes back after a crash in here brings its manifests: nothing may have been deleted meanwhile.
        store.hold_deletions()
        try:
            problems = _copy_manifests(store, leaving=device_id)
        except BaseException:
            store.allow_deletions()
            raise
        leaving = next((each for each in _well(store) if each.device_id == device_id), None)
        store.use(store.membership.retire(device_id, record))
        for run in store.runs():
            run.lose_device(device_id)
        _record(store, store.membership)
        store.allow_deletions()
        if untold is not None:  # not again: a sync that failed is never repeated
            problems.append(_unaware(record.path, untold))
        elif leaving is not None:
            problems += _tell(store, leaving)
        _log.warning("device_retired store=%s device=%s path=%s", store.store_id, device_id, record.path)
        return Retirement(lost=tuple(holdings(store, device_id)), problems=tuple(problems))


def note_missing(store: Store, now_unix_s: float) -> None:
    """Make durable since when each missing member has been away; those that are known stay.

    Raises:
        StorageError: a member could not record it.
    """
    with store.changing():
        wanted = store.membership.missed([each.device_id for each in store.missing], now_unix_s)
        if wanted != store.membership:
            _record(store, wanted)
            store.use(wanted)


def _check_member(store: Store, device_id: str) -> None:
    if store.device_state(device_id)[0] is DeviceState.RETIRED:
        raise UsageError(
            f"device {store.device_name(device_id)} is no member any more",
            hint="`everstep device readmit DIR` takes what lies there back, as a new device",
        )


def _well(store: Store) -> list[Device]:
    """Return the members that are present and not suspect."""
    suspect = DeviceState.SUSPECT
    return [each for each in store.devices if store.device_state(each.device_id)[0] is not suspect]


def _record(store: Store, membership: Membership, *, leaving: str = "") -> StorageError | None:
    """Make a membership durable on every member that is well; others learn of it when they are opened again.

    Return what went wrong on the device that leaves: it need not know.

    Raises:
        StorageError: one of them failed, or there is none.
    """
    well = _well(store)
    failed: StorageError | None = None
    untold: StorageError | None = None

    def record(device: Device) -> None:
        wanted = membership.disk_id(device.device_id, store_id=store.store_id)
        publish_over(store.ops, device.path / DISK_ID_NAME, encode_disk_id(wanted))

    for device, each in on_each(store, well, record, what="writing who is a member").items():
        try:
            each.result()
        except StorageError as exc:
            if device.device_id == leaving:
                untold = exc
            else:
                failed = failed or exc
    if failed is not None:
        raise failed
    if not well:
        raise StorageError("no device of the store is well enough to record a change")
    return untold


def _tell(store: Store, device: Device) -> list[str]:
    """Write into the disk.id of a device that left that it did; return what went wrong."""
    wanted = store.membership.disk_id(device.device_id, store_id=store.store_id)
    try:
        publish_over(store.ops, device.path / DISK_ID_NAME, encode_disk_id(wanted))
    except StorageError as exc:
        return [_unaware(str(device.path), exc)]
    return []


def _unaware(path: str, error: StorageError) -> str:
    return f"{path} does not know that it is retired: never open it alone: {error}"


def _copy_manifests(store: Store, *, leaving: str) -> list[str]:
    """Put each manifest on every well member that lacks it: the leaving device may have the only copy.

    A shard whose manifest cannot be read any more is damaged then. Return what went wrong.

    Raises:
        StorageError: a member that stays failed.
    """
    staying = [device for device in _well(store) if device.device_id != leaving]
    problems: list[str] = []
    for run in store.runs():
        for shard in run.shards():
            name = manifest_name(shard.checkpoint, shard.rank)
            paths = {device: run.commits_path(device) / name for device in staying}
            lacking = [device for device in staying if not _stands(store, device, paths[device])]
            try:
                content = run.manifest_content(shard.checkpoint, shard.rank) if lacking else b""
            except (DataError, StorageError) as exc:
                problem = f"its manifest is on no other device: {exc}"
                run.mark_damaged(shard.checkpoint, shard.rank, problem, generation=shard.generation)
                problems.append(f"run {run.name!r}: rank {shard.rank} of {shard.checkpoint} is lost: {exc}")
                continue
            for device in lacking:
                with store.watching(device.device_id):
                    publish_new(store.ops, paths[device], content)
    return problems


def _stands(store: Store, device: Device, path: Path) -> bool:
    with store.watching(device.device_id):
        return store.ops.stat(path) is not None
