"""Reading stores without a daemon: their directories are opened for one command and let go.

Reading takes no lock, so a daemon may hold the store and write meanwhile; what retention removes under the reader is
told apart from damage by looking again. Removing and tagging take the locks.
"""

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.device import DISK_ID_NAME
from ...checkpoint.fsck import FsckReport, fsck
from ...checkpoint.pins import remove_pin
from ...checkpoint.readmission import prepare_readmission
from ...checkpoint.real_storage import RealStorage
from ...checkpoint.recovery import recover
from ...checkpoint.store import Store, open_store
from ...checkpoint.store_format import LockHolder
from ...checkpoint.tags import remove_tag
from ...core.errors import ConfigError, NotFoundError, UsageError
from ...core.ids import CheckpointId
from ..control import device_views, store_views
from ..control.device_views import DeviceDetail, ReadmitView, RetireView, StoreDevices
from ..control.views import CheckpointDetail, CheckpointView, Removed, Verdict


class OfflineStore:
    """One store, opened by its directories; a Source (views.py)."""

    def __init__(self, store: Store, problems: Sequence[str]) -> None:
        self._store = store
        self._problems = tuple(problems)
        self.notes = tuple(store.notes)
        """What a user should know of the store."""

    @property
    def label(self) -> str:
        """What answers."""
        return ", ".join(str(device.path) for device in self._store.devices)

    def checkpoints(self, run: str) -> list[CheckpointView]:
        """See Source."""
        stores = [self._store]
        runs = [store_views.find_run(stores, run, None)] if run else store_views.visible_runs(stores, None)
        return [view for each in runs for view in store_views.checkpoint_views(each)]

    def problems(self, run: str) -> tuple[str, ...]:
        """See Source."""
        if not run:
            return self._problems
        found = store_views.find_run([self._store], run, None)
        marks = (f"run {found.name!r}", found.run_id)
        return tuple(problem for problem in self._problems if any(mark in problem for mark in marks))

    def detail(self, run: str, checkpoint: CheckpointId | None, *, leaf_count_max: int) -> CheckpointDetail:
        """See Source."""
        found = store_views.find_run([self._store], run, None)
        return store_views.checkpoint_detail(
            found, store_views.select_checkpoint(found, checkpoint), leaf_count_max=leaf_count_max
        )

    def verify(self, run: str, checkpoint: CheckpointId) -> Verdict:
        """See Source."""
        return store_views.verify(store_views.find_run([self._store], run, None), checkpoint)

    def remove(self, run: str, checkpoint: CheckpointId, *, force: bool) -> Removed:
        """See Source."""
        return store_views.remove(store_views.find_run([self._store], run, None), checkpoint, force=force)

    def remove_run(self, run: str, *, force: bool) -> Removed:
        """See Source."""
        return store_views.remove_all(store_views.find_run([self._store], run, None), force=force)

    def tag(self, run: str, checkpoint: CheckpointId | None, name: str) -> CheckpointView:
        """See Source."""
        found = store_views.find_run([self._store], run, None)
        return store_views.tag(found, store_views.select_checkpoint(found, checkpoint), name)

    def untag(self, run: str, name: str) -> CheckpointId:
        """See Source."""
        return remove_tag(store_views.find_run([self._store], run, None), name)

    def pin(self, run: str, checkpoint: CheckpointId | None, label: str, *, ttl_s: float) -> CheckpointView:
        """See Source; a daemon ends it in time, and so does the next one that opens the store."""
        found = store_views.find_run([self._store], run, None)
        return store_views.pin(found, store_views.select_checkpoint(found, checkpoint), label, ttl_s=ttl_s)

    def unpin(self, run: str, label: str) -> CheckpointId:
        """See Source."""
        return remove_pin(store_views.find_run([self._store], run, None), label)

    def devices(self) -> list[StoreDevices]:
        """See DeviceSource."""
        return [device_views.store_devices(self._store, None)]

    def drain_device(self, device: str, *, cancel: bool) -> DeviceDetail:
        """See DeviceSource."""
        return device_views.drain(*device_views.find([self._store], device), cancel=cancel)

    def retire_device(self, device: str, *, force: bool, dry_run: bool) -> RetireView:
        """See DeviceSource."""
        store, device_id = device_views.find([self._store], device)
        return device_views.retire(store, device_id, force=force, dry_run=dry_run, now_unix_s=time.time())

    def device_at(self, path: Path) -> DeviceDetail:
        """Return the member in this directory."""
        device_id = next(device.device_id for device in self._store.devices if device.path == path)
        return device_views.device_detail(self._store, device_id, None)


@contextmanager
def reading(directories: Sequence[Path]) -> Generator[OfflineStore]:
    """Give the store of these directories to read; nothing in it is changed.

    Root reads anybody's store, everybody else their own.

    Raises:
        NotFoundError: there is no store.
        ConfigError: one of them is no device of it, or for another reason of checkpoint.store.open_store.
        CorruptDataError, FormatVersionError, StorageError: see there.
    """
    uid = owner_uid(directories)
    store, problems = _recovered(directories, uid)
    with store:
        _refuse_strangers(store, directories)
        yield OfflineStore(store, problems)


@contextmanager
def changing(
    directories: Sequence[Path], command: str = "an everstep command", *, adopt: Sequence[Path] = ()
) -> Generator[OfflineStore]:
    """Give the store of these directories, locked, to be changed; `command` says to others who holds it.

    `adopt`: see checkpoint.store.open_store.

    Raises:
        NotFoundError: there is no store; none is made.
        DeviceLockedError: a daemon holds it; the message says which.
        StorageError and others as for `reading`.
    """
    with reading(
        [each for each in directories if each not in adopt]
    ):  # opening must make no store, nor a device
        pass
    with open_store(
        directories, ops=RealStorage(), holder=_holder(command), uid=os.getuid(), adopt=adopt
    ) as store:
        yield OfflineStore(store, recover(store).problems)


def readmit(directories: Sequence[Path], directory: Path) -> ReadmitView:
    """Return the device of a directory that was taken back into the store of these directories.

    Raises:
        NotFoundError: there is no store.
        DeviceLockedError: a daemon holds it; the message says which.
        StorageError and others: see readmission.prepare_readmission.
    """
    path, command = directory.resolve(), "everstep device readmit"
    all_of_them = list(dict.fromkeys([*(each.resolve() for each in directories), path]))
    with changing([each for each in all_of_them if each != path] or all_of_them, command):
        pass  # nobody else holds the store, and it is one without this directory
    done = prepare_readmission(all_of_them, path, ops=RealStorage(), holder=_holder(command), uid=os.getuid())
    with changing(all_of_them, command, adopt=done.adopt) as store:
        return ReadmitView(device=store.device_at(path), is_new=done.is_new, aside=str(done.aside or ""))


def inspect(directories: Sequence[Path], *, repair: bool, data: bool) -> FsckReport:
    """Inspect, and with `repair` make whole, the store of these directories, locked meanwhile.

    Raises:
        NotFoundError: there is no store.
        DeviceLockedError: a daemon holds it; the message says which.
        UsageError: it is to be repaired, and belongs to somebody else.
    """
    uid = owner_uid(directories)
    if repair and uid != os.getuid():
        raise UsageError(
            f"{directories[0]} belongs to uid {uid}: files made by root would be lost to them",
            hint="run everstep fsck --repair as that user",
        )
    holder = _holder("everstep fsck")
    return fsck(directories, ops=RealStorage(), holder=holder, uid=uid, repair=repair, data=data)


def _refuse_strangers(store: Store, directories: Sequence[Path]) -> None:
    """Nothing can be read from an empty directory: whoever named it took it for a part of the store."""
    if store.is_new:
        return
    retired = store.membership.retired.values()
    known = {str(each.path) for each in (*store.devices, *store.missing, *retired)}
    for path in (directory.resolve() for directory in directories):
        if str(path) not in known and not (path / DISK_ID_NAME).exists():
            raise ConfigError(
                f"{path} holds nothing of the store in {', '.join(str(each.path) for each in store.devices)}",
                hint="leave it out, or name the directory that you mean",
            )


def _recovered(directories: Sequence[Path], uid: int) -> tuple[Store, Sequence[str]]:
    """Return the store with its catalogue.

    Where something seems wrong it is looked at again: what a daemon's retention removed meanwhile is gone then.
    """
    store, problems = _look(directories, uid)
    for _ in range(store_views.LOOK_COUNT_MAX - 1):
        if not problems:
            break
        before = problems
        store, problems = _look(directories, uid)
        if problems == before:
            break
    return store, problems


def _look(directories: Sequence[Path], uid: int) -> tuple[Store, Sequence[str]]:
    store = open_store(directories, ops=RealStorage(), holder=_holder("everstep"), uid=uid, read_only=True)
    return store, recover(store).problems


def _holder(kind: str) -> LockHolder:
    return LockHolder(pid=os.getpid(), socket="", uid=os.getuid(), kind=kind)


def owner_uid(directories: Sequence[Path]) -> int:
    """Return whose store it is: the caller's; for root, of the owner of the first directory that is there.

    Raises:
        UsageError: it is somebody else's, whose daemon alone reads it.
        NotFoundError: none of them is there.
    """
    for directory in directories:
        try:
            found = directory.stat().st_uid
        except OSError:
            continue
        if os.getuid() not in (0, found):
            raise UsageError(
                f"{directory} belongs to uid {found}, not to uid {os.getuid()}",
                hint="ask the daemon that has it: leave the directories out (its socket: $EVERSTEP_SOCKET); or be uid"
                f" {found}",
            )
        return os.getuid() or found
    names = ", ".join(map(str, directories))
    raise NotFoundError(f"there is no directory {names}", hint="check the paths, or mount the drive")
