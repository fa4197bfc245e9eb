"""The devices of an opened store: which are present, missing, suspect or on their way out, and what that forbids."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from ..core.errors import DeadlineError, EverstepError, NoSpaceError, RunBusyError, StorageError
from .device import DISK_ID_NAME, Device
from .device_calls import DeviceCalls
from .device_speed import SpeedBook, SpeedChange
from .durable import publish_over
from .membership_plan import Membership
from .segment_pool import SegmentPool
from .space_ledger import SpaceLedger
from .storage_ops import LockHandle, StorageOps
from .store_format import encode_disk_id

_log = logging.getLogger(__name__)


class DeviceState(Enum):
    """How a device of the store is, as far as this process has seen."""

    OK = "ok"
    SLOW = "slow"
    """Three times slower than it was or than its peers: it gets fewer segments."""
    SUSPECT = "suspect"
    """A call on it failed: it gets nothing new, and nothing is deleted anywhere until it is taken back or the store is
    opened again. Or a call has not returned in time: until it has."""
    MISSING = "missing"
    DRAINING = "draining"
    """It gets no new segments; all else goes on."""
    RETIRED = "retired"
    """No member any more."""


CHANGE_DEADLINE_S = 30.0
"""How long a change of the members waits for a removal, or for another change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingDevice:
    """A member that is not there."""

    device_id: str
    path: str
    """Where it was last seen."""
    reason: str = ""
    """Why it cannot be read, where its directory is there."""


@dataclass(slots=True)
class _Late:
    """A device that has not been waited for, or was not trusted, until it has what it missed."""

    reason: str
    call_count: int = 0
    """Calls that have not returned."""
    is_trusted: bool = False
    """It has what the others had been given by then, and is given what is new."""
    is_catching_up: bool = False


def _nobody_listens() -> None:
    """Stand in until somebody wants to hear of changes."""


class DeviceSet:
    """The members of a store, held by this process. Thread-safe: one lock guards who they are and how they are."""

    def __init__(
        self,
        *,
        store_id: str,
        devices: Sequence[Device],
        membership: Membership,
        suspects: Mapping[str, str],
        unreadable: Mapping[str, str],
        ops: StorageOps,
        uid: int,
        locks: Sequence[LockHandle] | None,
    ) -> None:
        self.store_id = store_id
        self.ops = ops
        self.uid = uid
        self.is_read_only = locks is None
        self._present = tuple(sorted(devices, key=lambda device: device.device_id))
        self.pool = SegmentPool(ops, self._present)
        self.space = SpaceLedger(ops, self._present, self.pool)
        self.speeds = SpeedBook([device.device_id for device in self._present])
        self.calls = DeviceCalls([device.device_id for device in self._present])
        self.on_change: Callable[[], object] = _nobody_listens
        """Called when a device's state has changed, by the thread that noticed; must not block."""
        self._locks = {lock.path.parent: lock for lock in locks or ()}
        self._lock = threading.Condition()
        self._changing = threading.Lock()
        self._membership = membership
        self._suspects = dict(suspects)
        self._late: dict[str, _Late] = {}
        self._were_late = set[str]()
        self._unread: frozenset[str] = frozenset()
        self._unreadable = dict(unreadable)
        self._deleting_count = 0
        self._is_holding = False
        self._is_closed = False

    def close(self) -> None:
        """Let go of the devices; a second call does nothing.

        Engines are closed by now: what was late is being cleared away. One on which a call still hangs stays locked
        until that has returned: it may yet change what is there.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._late, CHANGE_DEADLINE_S)
            self._is_closed = True
            hanging = {device.path for device in self._present if device.device_id in self._late}
        self.pool.close()
        for path, lock in self._locks.items():
            if path in hanging:
                _log.warning("device_still_late path=%s", path)
            else:
                lock.release()

    # --- who belongs to it ----------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Who belongs to the store now."""
        with self._lock:
            return self._membership

    @property
    def devices(self) -> tuple[Device, ...]:
        """Present members, by id. One that is retired meanwhile leaves."""
        members = self.membership.members
        return tuple(device for device in self._present if device.device_id in members)

    @property
    def missing(self) -> tuple[MissingDevice, ...]:
        """Members that are not there."""
        present = {device.device_id for device in self._present}
        return tuple(
            MissingDevice(device_id=key, path=path, reason=self._unreadable.get(key, ""))
            for key, path in self.membership.members.items()
            if key not in present
        )

    @property
    def trusted(self) -> tuple[Device, ...]:
        """Present members of which no call has failed; all of them when every one has: better those than none.

        What small files of the store are made durable on.
        """
        return self._well(self.devices)

    @property
    def writable(self) -> tuple[Device, ...]:
        """Members that may get new segments: not draining, and as `trusted` says; none when all drain."""
        draining = self.membership.draining
        return self._well([device for device in self.devices if device.device_id not in draining])

    @property
    def answering(self) -> tuple[Device, ...]:
        """Present members but for those that are late, suspect or not."""
        with self._lock:
            late = {key for key in self._late if self._is_left_behind(key)}
        return tuple(device for device in self.devices if device.device_id not in late)

    @property
    def has_late(self) -> bool:
        """Tell whether a device is late, or takes what it has missed."""
        with self._lock:
            return bool(self._late)

    def _well(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        with self._lock:
            well = [device for device in devices if not self._is_doubtful(device.device_id)]
        return tuple(well or devices)

    @contextmanager
    def changing(self) -> Generator[None]:
        """Hold the right to change the membership; RunBusyError when another change does not end."""
        if not self._changing.acquire(timeout=CHANGE_DEADLINE_S):
            raise RunBusyError(
                "another change of the devices is under way", hint="try again when it has ended"
            )
        try:
            yield
        finally:
            self._changing.release()

    def use(self, membership: Membership) -> None:
        """Go on with this membership."""
        with self._lock:
            self._membership = membership
        self.pool.keep_only(membership.members)
        self.on_change()

    @property
    def is_changing(self) -> bool:
        """Tell whether deletions are held, because not every member knows yet who else is one."""
        with self._lock:
            return self._is_holding

    def hold_deletions(self) -> None:
        """Return when nothing is being deleted; nothing more is, until `allow_deletions`.

        Raises:
            DeadlineError: what is being deleted does not end; nothing is held then.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: not self._deleting_count, CHANGE_DEADLINE_S):
                raise DeadlineError(
                    f"a removal of checkpoints did not end within {CHANGE_DEADLINE_S:.0f} s",
                    hint="try again; if a device hangs, restart the daemon",
                )
            self._is_holding = True

    def allow_deletions(self) -> None:
        """Every member knows who belongs to the store: end what `hold_deletions` began."""
        with self._lock:
            self._is_holding = False

    @contextmanager
    def deleting(self) -> Generator[None]:
        """Hold the right to delete while the block runs: no member leaves meanwhile.

        Raises:
            StorageError: nothing may be deleted now.
        """
        with self._lock:
            if not self._may_delete():
                raise StorageError("nothing may be deleted while the devices of the store change")
            self._deleting_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._deleting_count -= 1
                self._lock.notify_all()

    # --- how they are ---------------------------------------------------------------------------------------------

    @property
    def degraded(self) -> bool:
        """Tell whether a member is missing: then the rest is read and written, but nothing is deleted."""
        return bool(self.missing)

    @property
    def is_whole(self) -> bool:
        """Tell whether every member is present and none has failed: only then is the view complete.

        A retired device is no member: it counts neither as missing nor as suspect.
        """
        with self._lock:
            return self._is_whole()

    @property
    def may_delete(self) -> bool:
        """Tell whether the view is complete, nobody is leaving, and the store is not open for reading only."""
        with self._lock:
            return self._may_delete()

    def _is_whole(self) -> bool:
        members = self._membership.members.keys()
        doubtful = self._suspects.keys() | self._late.keys()
        return members <= {device.device_id for device in self._present} and not members & doubtful

    def _is_doubtful(self, device_id: str) -> bool:
        return device_id in self._suspects or self._is_left_behind(device_id)

    def _is_left_behind(self, device_id: str) -> bool:
        late = self._late.get(device_id)
        return late is not None and not late.is_trusted

    def _may_delete(self) -> bool:
        return self._is_whole() and not (self._is_holding or self.is_read_only)

    def device(self, device_id: str) -> Device | None:
        """Return the present device of this id."""
        return next((device for device in self.devices if device.device_id == device_id), None)

    def device_name(self, device_id: str) -> str:
        """Return the path of a device, present, missing or retired, for messages."""
        membership = self.membership
        if device_id in membership.retired:
            return f"{membership.retired[device_id].path} (retired)"
        if device_id not in membership.members:
            return f"(unknown device {device_id})"
        device = self.device(device_id)
        return f"{membership.members[device_id]} (missing)" if device is None else str(device.path)

    def mark_read(self) -> None:
        """Remember that all is known that the devices hold, but for those that have failed by now."""
        with self._lock:
            self._unread = frozenset(self._suspects)

    def was_read(self, device: Device) -> bool:
        """Tell whether all is known that a device holds."""
        with self._lock:
            return device.device_id not in self._unread

    def mark_suspect(self, device_id: str, error: EverstepError) -> None:
        """Remember that a call on a device failed, with the first reason."""
        with self._lock:
            is_new = device_id not in self._suspects
            self._suspects.setdefault(device_id, str(error))
        if is_new:
            self.on_change()

    def mark_late(self, device_id: str, error: EverstepError) -> None:
        """Remember that a call on a device has not returned in time: until it has, the device counts as suspect."""
        with self._lock:
            late = self._late.setdefault(device_id, _Late(str(error)))
            late.call_count += 1
            late.is_trusted = False
            self._were_late.add(device_id)
        _log.warning("device_late path=%s reason=%s", self.device_name(device_id), error)
        self.on_change()

    def has_failed(self, device: Device) -> bool:
        """Tell whether a call on a device has failed, since the store was opened or it was taken back."""
        with self._lock:
            return device.device_id in self._suspects

    @contextmanager
    def taking_back(self, device: Device) -> Generator[None]:
        """Try a device that has failed: without an error it is well, when it has taken what it missed, as a late one.

        Meanwhile it counts as one on which a call hangs, whose lock outlives the store.
        """
        with self._lock:
            late = self._late.setdefault(device.device_id, _Late(self._suspects.get(device.device_id, "")))
            late.call_count += 1
            late.is_trusted = False
            self._were_late.add(device.device_id)
        try:
            yield
            with self._lock:
                self._suspects.pop(device.device_id, None)
        finally:
            self.late_is_over(device.device_id)

    def was_late(self, device_id: str) -> bool:
        """Tell whether a device has been late, or suspect: it may lack directories of runs that were made meanwhile."""
        with self._lock:
            return device_id in self._were_late

    def late_is_over(self, device_id: str) -> None:
        """That call has returned, well or not: when none is left the device takes what it has missed, and is well."""
        device = next(each for each in self._present if each.device_id == device_id)
        with self._lock:
            late = self._late[device_id]
            late.call_count -= 1
            begins = not late.call_count and not late.is_catching_up
            late.is_catching_up |= begins
        if begins:
            self._come_back(device, late)
        self.on_change()

    def _come_back(self, device: Device, late: _Late) -> None:
        """Let a device catch up twice: what came during the first time went to the others alone.

        Only one thread does that. It holds no lock meanwhile, so that a device which hangs again holds up nobody; it is
        late again then, and the end of that call begins anew.
        """
        while True:
            self._catch_up(device)
            with self._lock:
                late.is_trusted = not late.call_count
            told = self._catch_up(device)
            with self._lock:
                if late.call_count:
                    late.is_catching_up = False
                    return
                if late.is_trusted and told in (None, self._membership):
                    del self._late[device.device_id]
                    is_closed = self._is_closed
                    self._lock.notify_all()
                    break
        if told is not None:
            _log.warning("device_late_no_more path=%s", device.path)
        if is_closed:
            self._locks[device.path].release()

    def _catch_up(self, device: Device) -> Membership | None:
        """Return of which members the device was told; None: it is not to be written to."""
        with self._lock:
            self._lock.wait_for(lambda: not self._deleting_count)  # else it would get what is being removed
            membership, key = self._membership, device.device_id
            if self._is_closed or key not in membership.members or key in self._suspects:
                return None
        try:
            self.catch_up(device, membership)
        except NoSpaceError as error:
            _log.warning("device_lacks path=%s reason=%s", device.path, error)
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread
            what = f"it could not take what it missed: {type(error).__name__}: {error}"
            self.mark_suspect(device.device_id, StorageError(what))
        return membership

    def catch_up(self, device: Device, membership: Membership) -> None:
        """Write to a device what the others were given while it was late; nothing is deleted meanwhile."""

    def measured(self, device_id: str, moved_bytes: int, busy_s: float) -> None:
        """Take a write of a device that has just ended; say so when that makes it slow or well again."""
        change = self.speeds.measured(device_id, moved_bytes, busy_s, time.monotonic())
        if change is None:
            return
        path = self.device_name(device_id)
        if change is SpeedChange.BECAME_SLOW:
            _log.warning("device_slow path=%s reason=%s", path, self.speeds.reading(device_id).slow_reason)
        else:
            _log.warning("device_recovered path=%s", path)
        self.on_change()

    @contextmanager
    def watching(self, device_id: str) -> Generator[None]:
        """Mark the device as suspect when the block fails on it; a full device is not a bad one."""
        try:
            yield
        except StorageError as exc:
            if not isinstance(exc, NoSpaceError):
                self.mark_suspect(device_id, exc)
            raise

    def check_in_place(self, device: Device) -> None:
        """Raise where the path leads elsewhere by now: what is written there nobody will find again."""
        lock = self._locks.get(device.path)
        if lock is not None and not lock.is_in_place():
            raise StorageError(
                f"{device.path} is not the directory that was opened: it was emptied, unmounted or replaced",
                hint="put it back, or end the daemon (everstep stop) and begin with what is there now",
            )

    def keep_disk_id(self, device: Device) -> None:
        """Write disk.id again where somebody has removed it: without it nobody could open what the device holds."""
        path = device.path / DISK_ID_NAME
        if self.ops.stat(path) is None:
            content = encode_disk_id(self.membership.disk_id(device.device_id, store_id=self.store_id))
            publish_over(self.ops, path, content)
            _log.warning("disk_id_written_again path=%s", path)

    @contextmanager
    def reading(self, device_id: str) -> Generator[None]:
        """Mark the device as suspect when the block fails on it for whatever reason.

        For what decides which files are still needed: whoever could not read that may not delete.
        """
        try:
            yield
        except StorageError as exc:
            self.mark_suspect(device_id, exc)
            raise

    def device_state(self, device_id: str) -> tuple[DeviceState, str]:
        """Return how a device is, and why if it is not well."""
        with self._lock:
            late = self._late.get(device_id)
            suspicion, membership = self._suspects.get(device_id, late and late.reason), self._membership
        if device_id in membership.retired:
            return DeviceState.RETIRED, self.device_name(device_id)
        if suspicion is not None:
            return DeviceState.SUSPECT, suspicion
        if self.device(device_id) is None:
            return DeviceState.MISSING, self._unreadable.get(device_id, "it is not where it was")
        if device_id in membership.draining:
            return DeviceState.DRAINING, "it gets no new segments"
        slow_reason = self.speeds.reading(device_id).slow_reason
        return (DeviceState.SLOW, slow_reason) if slow_reason else (DeviceState.OK, "")
