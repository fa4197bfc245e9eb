"""Devices as operators see and change them: values, and the operations on a store; blocking, for threads.

Used by the control API on the daemon's open stores and by offline.py on stores opened for one command.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...checkpoint import device_change
from ...checkpoint.retire_plan import Holding, is_drained
from ...checkpoint.store import Store
from ...core.errors import NotFoundError, UsageError
from ...core.ids import CheckpointId
from .views import DeviceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """The part of one checkpoint that lies on a device."""

    run_name: str
    owner_uid: int
    checkpoint: CheckpointId
    size_bytes: int
    is_offered: bool
    """A restore would take it now."""
    is_newest: bool
    """It is the one that a restart of its run would take."""
    newest_elsewhere: CheckpointId | None
    """The newest complete checkpoint of the run without a part on the device."""

    @property
    def title(self) -> str:
        """`<run>@<attempt>.<step>`, as commands name it."""
        return f"{self.run_name}@{self.checkpoint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDetail:
    """One member or retired device of a store."""

    device_id: str
    path: str
    state: DeviceStatus
    reason: str
    total_bytes: int
    free_bytes: int
    held_bytes: int
    """Of committed segments."""
    pool_bytes: int
    """Of deleted checkpoints, not free: they wait to be written over, or to be given back when room is needed."""
    parts: tuple[PartView, ...]
    """By run, newest first."""
    is_drained: bool
    """No run would restart from what lies on it."""
    retired_unix_s: float
    """0: it was not."""
    missing_since_unix_s: float
    """0: not known, or not missing."""
    name: str = ""
    """In the node's configuration; empty where it has none."""
    highest: Mapping[str, CheckpointId] = field(default_factory=dict[str, CheckpointId])
    """Of a retired device: `<uid>/<run_id>` -> the newest checkpoint that it held a part of."""

    @property
    def highest_held(self) -> CheckpointId | None:
        """The newest checkpoint that it holds or held a part of."""
        return max((*(part.checkpoint for part in self.parts), *self.highest.values()), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDevices:
    """The devices of one store."""

    store_id: str
    devices: tuple[DeviceDetail, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireView:
    """A device that is or would be retired; its parts are what is lost."""

    device: DeviceDetail
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmitView:
    """A device that was taken back."""

    device: DeviceDetail
    is_new: bool
    """It came empty; else with all it had."""
    aside: str
    """Where what it had lies now; empty where nothing was put aside."""


class DeviceSource(Protocol):
    """Who lists and changes devices: a daemon (client.py) or directories (offline.py)."""

    @property
    def label(self) -> str:
        """What answers, for messages."""
        ...

    def devices(self) -> list[StoreDevices]:
        """Return the devices of every store."""
        ...

    def drain_device(self, device: str, *, cancel: bool) -> DeviceDetail:
        """Let a device get no new segments, or end that."""
        ...

    def retire_device(self, device: str, *, force: bool, dry_run: bool) -> RetireView:
        """Take a device out of its store for good, or say what that would lose."""
        ...


def store_devices(store: Store, uid: int | None) -> StoreDevices:
    """Return a store's devices, with the parts of this user's checkpoints (None: of all)."""
    membership = store.membership
    present = [device.device_id for device in store.devices]
    missing = [device.device_id for device in store.missing]
    ids = (*present, *missing, *membership.retired)
    found = [device_detail(store, device_id, uid) for device_id in ids]
    by_path = sorted(found, key=lambda each: (each.path, each.state is DeviceStatus.RETIRED, each.device_id))
    return StoreDevices(store_id=store.store_id, devices=tuple(by_path))


def device_detail(store: Store, device_id: str, uid: int | None) -> DeviceDetail:
    """Return one device, with the parts of this user's checkpoints (None: of all)."""
    state, reason = store.device_state(device_id)
    membership, device = store.membership, store.device(device_id)
    holdings = device_change.holdings(store, device_id)
    retired = membership.retired.get(device_id)
    total_bytes = free_bytes = 0
    if device is not None:
        try:
            space = os.statvfs(device.path)
            free_bytes, total_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
            reason = reason or store.space.shortage(device, free_bytes)
        except OSError as error:
            reason = reason or f"{device.path}: {error.strerror}"
    return DeviceDetail(
        device_id=device_id,
        path=retired.path if retired else str(device.path) if device else membership.members[device_id],
        state=DeviceStatus(state.value),
        reason=reason,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        pool_bytes=store.pool.size_bytes(device_id),
        held_bytes=sum(holding.size_bytes for holding in holdings),
        parts=tuple(_part(each) for each in holdings if uid is None or each.owner_uid == uid),
        is_drained=is_drained(holdings),
        retired_unix_s=retired.retired_unix_s if retired else 0.0,
        missing_since_unix_s=membership.missing_since_unix_s.get(device_id, 0.0),
        highest=retired.highest if retired else {},
    )


def _part(holding: Holding) -> PartView:
    return PartView(
        run_name=holding.run,
        owner_uid=holding.owner_uid,
        checkpoint=holding.checkpoint,
        size_bytes=holding.size_bytes,
        is_offered=holding.is_offered,
        is_newest=holding.is_newest,
        newest_elsewhere=holding.newest_elsewhere,
    )


def find(stores: Sequence[Store], name: str) -> tuple[Store, str]:
    """Return the store of this device, and its id; see device_change.find_device.

    Raises:
        NotFoundError: no store has it.
        UsageError: several are meant.
    """
    found: list[tuple[Store, str]] = []
    for store in stores:
        try:
            found.append((store, device_change.find_device(store, name)))
        except NotFoundError:
            continue
    if not found:
        known = [path for store in stores for path in store.membership.members.values()]
        hint = f"the devices are {', '.join(sorted(known))}" if known else "no store is open"
        raise NotFoundError(f"no device {name!r}", hint=hint)
    if len(found) > 1:
        raise UsageError(f"{name!r} is in {len(found)} stores", hint="name the device by its whole id")
    return found[0]


def drain(store: Store, device_id: str, *, cancel: bool) -> DeviceDetail:
    """Let a device drain, or end that; see device_change.drain and cancel_drain for the errors."""
    (device_change.cancel_drain if cancel else device_change.drain)(store, device_id)
    return device_detail(store, device_id, None)


def retire(store: Store, device_id: str, *, force: bool, dry_run: bool, now_unix_s: float) -> RetireView:
    """Retire a device, or say what that would lose; see device_change.retire for the errors."""
    if dry_run:
        device_change.check_retire(store, device_id, force=force)
        return RetireView(device=device_detail(store, device_id, None), problems=())
    done = device_change.retire(store, device_id, force=force, now_unix_s=now_unix_s)
    detail = replace(device_detail(store, device_id, None), parts=tuple(_part(each) for each in done.lost))
    return RetireView(device=detail, problems=done.problems)
