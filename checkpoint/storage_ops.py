"""The only door to the file system for devices, store, commit, recovery and collection.

Everything that must survive a crash goes through `StorageOps`, so that a test can fail the n-th call, and a crash
explorer can record the calls and replay them in every order that a power loss allows. All calls block and are made
from threads; none keeps state between calls beyond the handles that it returns.
"""

import errno
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from ..core.errors import DeviceMissingError, NoSpaceError, StorageError
from .engine import Engine

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_GONE = frozenset({errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOMEDIUM})


class FileKind(Enum):
    """What a name stands for."""

    REGULAR = "regular file"
    DIRECTORY = "directory"
    OTHER = "special file or link"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What lstat says of a name, as far as anybody here asks."""

    kind: FileKind
    size_bytes: int
    owner_uid: int
    file_system_id: int
    """st_dev: equal for two paths on one file system."""
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRange:
    """One slot of an arena: the memory that segments are written from and read into.

    The owner of the arena keeps fd and map alive, and the slot leased, until the call that got it has returned.
    """

    fd: int
    map: memoryview
    """The whole arena, writable, format "B"."""
    slot_offset_bytes: int
    """A multiple of 4096."""
    slot_size_bytes: int

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return the bytes [offset, offset + length) of the slot; ValueError when they reach out of it."""
        begin = self.offset_in_arena(offset_bytes, length_bytes)
        return self.map[begin : begin + length_bytes]

    def offset_in_arena(self, offset_bytes: int, length_bytes: int) -> int:
        """Return where these bytes of the slot begin in the arena; ValueError when they reach out of the slot."""
        if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > self.slot_size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + length_bytes} are not in a slot of {self.slot_size_bytes}"
            )
        return self.slot_offset_bytes + offset_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHandle:
    """An opened segment file. One owner, one access mode for the life of the file, closed by `StorageOps.close`."""

    path: Path
    fd: int
    is_direct: bool
    alignment_bytes: int
    """What the file asks of direct I/O; 0 when it goes through the page cache."""


class LockHandle(Protocol):
    """A held lock; lets go when released or when the process ends."""

    path: Path

    def is_in_place(self) -> bool:
        """Tell whether the locked file is still what its path names: not so where the directory was emptied, unmounted
        or replaced meanwhile."""
        ...

    def release(self) -> None:
        """Let go of the lock; a second call does nothing."""
        ...


class StorageOps(Protocol):
    """Calls that reach a device. Errors: StorageError and its subclasses, naming path, errno and what to do.

    What is durable when: file content after `write_small_new` or `sync_data`; a name after `sync_directory` of the
    directory that holds it. Nothing else.
    """

    @property
    def can_hang(self) -> bool:
        """Whether a call may never return, as of a drive that does not answer: who cannot wait makes it in a thread."""
        ...

    def make_directory(self, path: Path) -> bool:
        """Make a directory (0700); False when one is there already."""
        ...

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """Return the names in a directory, sorted; an absent directory is an error, never an empty answer."""
        ...

    def stat(self, path: Path) -> FileStat | None:
        """Return what stands at the path without following a link there; None when nothing does."""
        ...

    def read_small(self, path: Path, size_bytes_max: int, *, owner_uid: int) -> bytes | None:
        """Return a whole small file; None when absent, CorruptDataError when no plain file of this owner and size."""
        ...

    def read_head(self, path: Path, length_bytes: int) -> bytes:
        """Return up to the first `length_bytes` of a file, through the page cache."""
        ...

    def write_small_new(self, path: Path, content: bytes) -> None:
        """Create a file (0600) that must not exist, with durable content; its name is not durable yet."""
        ...

    def rename_noreplace(self, source: Path, target: Path) -> bool:
        """Rename within a device; False, and nothing changed, when `target` exists."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename within a device over whatever file is at `target`."""
        ...

    def recycle(self, path: Path, target: Path) -> int | None:
        """Rename a file within a device, out of the reach of whoever knows its name, and return its size in bytes.

        None, whatever the reason: it stays where it is, or is gone. It is ours alone, or it is not renamed: a regular
        file of this user that no process has open or mapped, with one name.
        """
        ...

    def open_recycled(self, source: Path, target: Path) -> SegmentHandle | None:
        """Rename such a file again, never over an existing name, and open it as `open_new_segment` does.

        Its content and size stay. None, whatever the reason: it may be under either name.
        """
        ...

    def unlink(self, path: Path) -> bool:
        """Remove a file; False when there was none."""
        ...

    def remove_directory(self, path: Path) -> bool:
        """Remove an empty directory; False when there was none."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that this user may still write on the path's file system."""
        ...

    def is_lock_of_the_dead(self, path: Path) -> bool:
        """Tell whether the holder of the lock at this path has ended, but for a call that hangs in the kernel."""
        ...

    def try_lock(self, path: Path, content: bytes) -> LockHandle | None:
        """Lock a file (made if absent) for this process and write who holds it; None when another has it."""
        ...

    def open_new_segment(self, path: Path) -> SegmentHandle:
        """Create a segment file (0600) that must not exist; direct if the file can do it."""
        ...

    def open_segment_for_read(self, path: Path) -> SegmentHandle:
        """Open a segment file; direct if the file can do it."""
        ...

    def reserve(self, handle: SegmentHandle, size_bytes: int) -> None:
        """Reserve blocks and set the size, so that writing neither extends the file nor runs out of space."""
        ...

    def write_segment(
        self, handle: SegmentHandle, source: ArenaRange, offset_bytes: int, length_bytes: int, engine: Engine
    ) -> float:
        """Write slot bytes [offset, offset + length rounded up to the alignment) as the file's; return busy seconds."""
        ...

    def read_segment(
        self,
        handle: SegmentHandle,
        target: ArenaRange,
        offset_bytes: int,
        length_bytes: int,
        engine: Engine,
        *,
        file_offset_bytes: int = 0,
    ) -> None:
        """Read file bytes to slot bytes [offset, offset + length); up to a rounded-up end may be overwritten."""
        ...

    def truncate(self, handle: SegmentHandle, size_bytes: int) -> None:
        """Cut the file to its exact size; before `sync_data`, or a crash may lose the cut."""
        ...

    def sync_data(self, handle: SegmentHandle) -> None:
        """Make content and size durable. Never repeated for one file: after an error its data count as lost."""
        ...

    def close(self, handle: SegmentHandle) -> None:
        """Close the file; says nothing about durability."""
        ...


def has_inodes(directory: Path) -> bool:
    """Tell whether a file more can be made there, as far as the file system counts them."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return True
    return found.f_files == 0 or found.f_favail > 0


def storage_error(exc: OSError, path: Path, doing: str) -> StorageError:
    """Return the error to raise for a failed call on `path`."""
    number = exc.errno or 0
    name = errno.errorcode.get(number, "?")
    message = f"{doing} {path} failed: {exc.strerror or exc} [{name}]"
    if number in NO_SPACE and not has_inodes(path.parent):
        return NoSpaceError(message, hint="no inode is free there: remove files of which there are many")
    if number in NO_SPACE:
        return NoSpaceError(message, hint="free space there, lower keep_last, or add a device")
    if number in _GONE:
        return DeviceMissingError(message, hint="the device went away; mount it again")
    if number == errno.EROFS:
        return StorageError(message, hint="the file system is read-only, often after an error: see dmesg")
    if number == errno.EIO:
        return StorageError(message, hint="the device reports errors: see dmesg and its SMART log")
    if number in (errno.EACCES, errno.EPERM):
        return StorageError(message, hint="the directory must belong to the user of the daemon, mode 0700")
    return StorageError(
        message, hint="storage is a directory on a drive that you may write to; `dmesg` may say more"
    )
