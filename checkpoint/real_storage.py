"""The real file system behind `StorageOps`: which system calls each of its promises takes."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.dead_process import is_dead_but_held
from ..core.errors import CorruptDataError, StorageError
from . import linux
from .direct_io import ASSUMED_ALIGNMENT, alignment_in, try_to_read
from .engine import Engine, Transfer, TransferKind
from .linux import DioAlignment
from .manifest_types import HEADER_ALIGNMENT_BYTES
from .segment_format import align_up
from .sole_holder import move_alone
from .storage_ops import NO_SPACE, ArenaRange, FileKind, FileStat, LockHandle, SegmentHandle, storage_error

_AT_FDCWD = -100
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


@contextlib.contextmanager
def _named(path: Path, doing: str) -> Generator[None]:
    """Turn an OSError of the block into the StorageError that names path, errno and what to do."""
    try:
        yield
    except OSError as exc:
        raise storage_error(exc, path, doing) from exc


@dataclass(slots=True)
class _FileLock:
    path: Path
    fd: int

    def is_in_place(self) -> bool:
        """See LockHandle."""
        with _named(self.path, "looking at"):
            try:
                found = self.path.lstat()
            except FileNotFoundError:
                return False
            return os.path.samestat(found, os.fstat(self.fd))

    def release(self) -> None:
        """Let go of the lock; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RealStorage:
    """`StorageOps` on the real file system. One instance may serve all threads."""

    can_hang = True
    """See StorageOps."""

    def __init__(self) -> None:
        self._tried: dict[int, DioAlignment | None] = {}
        """What a try has shown of direct I/O, by st_dev, where files do not say it (before Linux 6.1)."""

    def make_directory(self, path: Path) -> bool:
        """See StorageOps."""
        with _named(path, "making the directory"):
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                if not path.is_dir() or path.is_symlink():
                    raise
                return False
        return True

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """See StorageOps."""
        with _named(path, "listing"):
            return tuple(sorted(os.listdir(path)))  # noqa: PTH208 (names, not paths)

    def stat(self, path: Path) -> FileStat | None:
        """See StorageOps."""
        with _named(path, "looking at"):
            try:
                found = path.lstat()
            except FileNotFoundError:
                return None
        return FileStat(
            kind=_kind(found.st_mode),
            size_bytes=found.st_size,
            owner_uid=found.st_uid,
            file_system_id=found.st_dev,
            inode=found.st_ino,
        )

    def read_small(self, path: Path, size_bytes_max: int, *, owner_uid: int) -> bytes | None:
        """See StorageOps. A FIFO does not block it, a link is not followed."""
        with _named(path, "opening"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            except OSError as exc:
                if exc.errno == errno.ELOOP:
                    raise CorruptDataError(f"{path} is a symbolic link") from exc
                if exc.errno == errno.ENXIO and stat.S_ISSOCK(path.lstat().st_mode):
                    raise CorruptDataError(f"{path} is a socket") from exc
                raise
        try:
            with _named(path, "reading"):
                _check_plain(path, os.fstat(fd), size_bytes_max, owner_uid)
                content = _read_up_to(fd, size_bytes_max + 1)
        finally:
            os.close(fd)
        if len(content) > size_bytes_max:
            raise CorruptDataError(f"{path} grew beyond {size_bytes_max} bytes while it was read")
        return content

    def read_head(self, path: Path, length_bytes: int) -> bytes:
        """See StorageOps."""
        with _named(path, "reading the head of"):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return _read_up_to(fd, length_bytes)
            finally:
                os.close(fd)

    def write_small_new(self, path: Path, content: bytes) -> None:
        """See StorageOps."""
        with _named(path, "writing"):
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)

    def rename_noreplace(self, source: Path, target: Path) -> bool:
        """See StorageOps. Where the file system lacks RENAME_NOREPLACE, a hard link does the same."""
        with _named(target, "publishing"):
            try:
                linux.rename_noreplace(_AT_FDCWD, str(source), _AT_FDCWD, str(target))
            except FileExistsError:
                return False
            except OSError as exc:
                if exc.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                return _link_then_unlink(source, target)
        return True

    def replace(self, source: Path, target: Path) -> None:
        """See StorageOps."""
        with _named(target, "replacing"):
            source.replace(target)

    def recycle(self, path: Path, target: Path) -> int | None:
        """See StorageOps."""
        with contextlib.suppress(OSError):
            # O_NONBLOCK: another process may hold a lease on it, too, and need not be waited for.
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return move_alone(fd, path, target)
            finally:
                os.close(fd)
        return None

    def open_recycled(self, source: Path, target: Path) -> SegmentHandle | None:
        """See StorageOps."""
        handle: SegmentHandle | None = None
        with contextlib.suppress(OSError, StorageError):
            handle = self._open_segment(source, os.O_WRONLY)
            if move_alone(handle.fd, source, target) is not None:
                return replace(handle, path=target)
        if handle is not None:
            os.close(handle.fd)
        return None

    def unlink(self, path: Path) -> bool:
        """See StorageOps."""
        with _named(path, "removing"):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def remove_directory(self, path: Path) -> bool:
        """See StorageOps."""
        with _named(path, "removing the directory"):
            try:
                path.rmdir()
            except FileNotFoundError:
                return False
        return True

    def sync_directory(self, path: Path) -> None:
        """See StorageOps.

        XFS that has shut itself down answers fsync of a directory with success (Linux 6.18: it only looks for changes
        that still wait for the log, and the shutdown has dropped them). Opening the directory fails then.
        """
        with _named(path, "making durable the names in"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def free_bytes(self, path: Path) -> int:
        """See StorageOps."""
        with _named(path, "asking the free space of"):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def try_lock(self, path: Path, content: bytes) -> LockHandle | None:
        """See StorageOps. flock, so that it ends with the process, however that ends.

        Who holds it is only for messages: written over what stood there, which takes no new block, and left out where
        the device is full all the same.
        """
        with _named(path, "locking"):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_over(fd, content)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError:
                os.close(fd)
                raise
        return _FileLock(path, fd)

    def is_lock_of_the_dead(self, path: Path) -> bool:
        """See StorageOps."""
        with _named(path, "looking at"):
            found = path.stat()
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, where, *_ = line.split()
            if (kind, where) == ("FLOCK", place):
                return is_dead_but_held(int(pid))
        return False

    def open_new_segment(self, path: Path) -> SegmentHandle:
        """See StorageOps."""
        return self._open_segment(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)

    def open_segment_for_read(self, path: Path) -> SegmentHandle:
        """See StorageOps."""
        return self._open_segment(path, os.O_RDONLY)

    def reserve(self, handle: SegmentHandle, size_bytes: int) -> None:
        """See StorageOps. A file system without fallocate gives no promise of space: the write then fails cleanly."""
        length = _rounded(handle, size_bytes)
        with _named(handle.path, "reserving space for"):
            try:
                linux.fallocate(handle.fd, length)
            except OSError as exc:
                if exc.errno in _CANNOT_RESERVE:
                    return
                # XFS asks for as much free space as the range is long, also where a file that is written over has it.
                if exc.errno != errno.ENOSPC or not _holds(handle.fd, length):
                    raise

    def write_segment(
        self, handle: SegmentHandle, source: ArenaRange, offset_bytes: int, length_bytes: int, engine: Engine
    ) -> float:
        """See StorageOps."""
        length = _rounded(handle, length_bytes)
        transfer = Transfer(
            kind=TransferKind.WRITE,
            arena_fd=source.fd,
            arena_offset_bytes=source.offset_in_arena(offset_bytes, length),
            file_fd=handle.fd,
            file_offset_bytes=0,
            length_bytes=length,
        )
        with _named(handle.path, "writing"):
            done = engine.run(transfer)
        if done.bytes_moved != length:
            raise StorageError(f"writing {handle.path} moved {done.bytes_moved} of {length} bytes")
        return done.busy_s

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
        """See StorageOps."""
        transfer = Transfer(
            kind=TransferKind.READ,
            arena_fd=target.fd,
            arena_offset_bytes=target.offset_in_arena(offset_bytes, _rounded(handle, length_bytes)),
            file_fd=handle.fd,
            file_offset_bytes=file_offset_bytes,
            length_bytes=length_bytes,
        )
        with _named(handle.path, "reading"):
            try:
                engine.run(transfer)
            except OSError as exc:
                if exc.errno != errno.ENODATA:
                    raise
                raise CorruptDataError(f"{handle.path} is too short: {exc.strerror}") from exc

    def truncate(self, handle: SegmentHandle, size_bytes: int) -> None:
        """See StorageOps."""
        with _named(handle.path, "cutting"):
            os.ftruncate(handle.fd, size_bytes)

    def sync_data(self, handle: SegmentHandle) -> None:
        """See StorageOps."""
        with _named(handle.path, "making durable"):
            os.fdatasync(handle.fd)

    def close(self, handle: SegmentHandle) -> None:
        """See StorageOps."""
        with _named(handle.path, "closing"):
            os.close(handle.fd)

    def _open_segment(self, path: Path, flags: int) -> SegmentHandle:
        """Open with O_DIRECT, then ask the opened file whether it can do it; else go through the page cache."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        with _named(path, "opening"):
            try:
                fd = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                # Some file systems leave the new name behind when they refuse O_DIRECT.
                if flags & os.O_CREAT:
                    path.unlink(missing_ok=True)
                return SegmentHandle(
                    path=path, fd=os.open(path, flags, 0o600), is_direct=False, alignment_bytes=0
                )
            try:
                alignment_bytes = self._usable_alignment(fd, path, is_written=bool(flags & os.O_WRONLY))
                if not alignment_bytes:
                    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            except OSError:
                os.close(fd)
                raise
        return SegmentHandle(path=path, fd=fd, is_direct=alignment_bytes > 0, alignment_bytes=alignment_bytes)

    def _usable_alignment(self, fd: int, path: Path, *, is_written: bool) -> int:
        """Return the alignment of direct I/O, or 0 when the file has none that our 4096-aligned layout satisfies.

        A file that says nothing is read from, to see; what is written is tried on another one, since this one may be
        somebody's (a recycled file is opened before it is known to be ours alone), and once for each file system.
        """
        found = linux.dio_alignment(fd)
        if found is None:
            found = self._tried_alignment(fd, path) if is_written else _readable_alignment(fd)
        if found is None or not found.is_possible:
            return 0
        largest = max(found.memory_bytes, found.offset_bytes)
        return 0 if HEADER_ALIGNMENT_BYTES % largest else largest

    def _tried_alignment(self, fd: int, path: Path) -> DioAlignment | None:
        file_system_id = os.fstat(fd).st_dev
        if file_system_id not in self._tried:
            self._tried[file_system_id] = alignment_in(path.parent)
        return self._tried[file_system_id]


def _readable_alignment(fd: int) -> DioAlignment | None:
    return ASSUMED_ALIGNMENT if try_to_read(fd) else None


def _kind(mode: int) -> FileKind:
    if stat.S_ISREG(mode):
        return FileKind.REGULAR
    return FileKind.DIRECTORY if stat.S_ISDIR(mode) else FileKind.OTHER


def _check_plain(path: Path, found: os.stat_result, size_bytes_max: int, owner_uid: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CorruptDataError(f"{path} is no regular file")
    if found.st_uid != owner_uid:
        raise CorruptDataError(f"{path} belongs to uid {found.st_uid}, expected {owner_uid}")
    if found.st_size > size_bytes_max:
        raise CorruptDataError(f"{path} has {found.st_size} bytes, more than {size_bytes_max}")


def _read_up_to(fd: int, length_bytes: int) -> bytes:
    parts: list[bytes] = []
    while length_bytes > 0 and (part := os.read(fd, min(length_bytes, 1 << 20))):
        parts.append(part)
        length_bytes -= len(part)
    return b"".join(parts)


def _write_over(fd: int, content: bytes) -> None:
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
    except OSError as exc:
        if exc.errno not in NO_SPACE:
            raise


def _link_then_unlink(source: Path, target: Path) -> bool:
    try:
        target.hardlink_to(source)
    except FileExistsError:
        return False
    source.unlink()
    return True


def _holds(fd: int, length_bytes: int) -> bool:
    """Tell whether a file is as long, and has as many blocks."""
    found = os.fstat(fd)
    return found.st_size >= length_bytes and found.st_blocks * 512 >= length_bytes


def _rounded(handle: SegmentHandle, length_bytes: int) -> int:
    return align_up(length_bytes, handle.alignment_bytes) if handle.is_direct else length_bytes
