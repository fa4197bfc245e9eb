"""One directory as a device of a store: what stands in it, who holds it, and where things go."""

import errno
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ConfigError, CorruptDataError, DeviceLockedError, EverstepError, StorageError
from .storage_ops import FileKind, LockHandle, StorageOps
from .store_format import SMALL_FILE_BYTES_MAX, DiskId, LockHolder, decode_disk_id, decode_lock, encode_lock

DISK_ID_NAME = "disk.id"
LOCK_NAME = "lock"
POOL_NAME = "pool"
QUARANTINE_NAME = "quarantine"
RUNS_NAME = "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A present device of an opened store."""

    device_id: str
    path: Path
    file_system_id: int
    """Equal for two devices that share a file system, and so its free space."""

    @property
    def runs_path(self) -> Path:
        """Directory of all runs."""
        return self.path / RUNS_NAME

    @property
    def pool_path(self) -> Path:
        """Directory of files that wait to be written again; absent before the first."""
        return self.path / POOL_NAME

    @property
    def quarantine_path(self) -> Path:
        """Directory of files that could not be believed."""
        return self.path / QUARANTINE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What stands in a directory that was named as a device, before anybody decides what it is."""

    path: Path
    """Absolute, links resolved."""
    exists: bool
    file_system_id: int = 0
    inode: int = 0
    disk_id: DiskId | None = None
    has_runs: bool = False
    """Something stands in runs/; an empty one is made before disk.id."""
    error: EverstepError | None = None
    """Why nobody can tell what stands there, e.g. the drive does not answer."""


def survey_directory(ops: StorageOps, path: Path, *, uid: int) -> Survey:
    """Return what stands in the directory, or the error of a drive that does not answer; reads only.

    Raises:
        ConfigError: the path is no directory.
        CorruptDataError, FormatVersionError: disk.id is not whole.
        StorageError: this user may not read there.
    """
    try:
        return _survey(ops, path, uid)
    except StorageError as exc:
        if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in (errno.EACCES, errno.EPERM):
            raise
        return Survey(path=path, exists=True, error=exc)


def _survey(ops: StorageOps, path: Path, uid: int) -> Survey:
    found = ops.stat(path)
    if found is None:
        return Survey(path=path, exists=False)
    if found.kind is not FileKind.DIRECTORY:
        raise ConfigError(f"the storage path {path} is no directory", hint="name a directory on the drive")
    disk_id_path = path / DISK_ID_NAME
    content = ops.read_small(disk_id_path, SMALL_FILE_BYTES_MAX, owner_uid=uid)
    return Survey(
        path=path,
        exists=True,
        file_system_id=found.file_system_id,
        inode=found.inode,
        disk_id=None if content is None else decode_disk_id(content, str(disk_id_path)),
        has_runs=ops.stat(path / RUNS_NAME) is not None and bool(ops.list_directory(path / RUNS_NAME)),
    )


def lock_directory(ops: StorageOps, path: Path, holder: LockHolder) -> LockHandle:
    """Return the held lock of a device; it ends with the process at the latest.

    Raises:
        DeviceLockedError: another process has it; the message says which.
        StorageError: the directory cannot be written to.
    """
    lock_path = path / LOCK_NAME
    handle = ops.try_lock(lock_path, encode_lock(holder))
    if handle is not None:
        return handle
    other = _lock_holder(ops, lock_path)
    raise DeviceLockedError(
        f"the device {path} is held by {other or 'another process'}",
        hint="use that daemon (EVERSTEP_SOCKET), stop it, or name other directories",
    )


def _lock_holder(ops: StorageOps, lock_path: Path) -> LockHolder | None:
    found = ops.stat(lock_path)
    if found is None:
        return None
    try:
        content = ops.read_small(lock_path, SMALL_FILE_BYTES_MAX, owner_uid=found.owner_uid)
    except CorruptDataError:
        return None
    return decode_lock(content or b"")
