"""`StorageOps` on disks in memory: runs the real code fast, records what it does, and fails where it is told to."""

import errno
import functools
import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from threading import RLock

from crash_plan import SECTOR_BYTES, Change, EntryChange, Image, Mark, Op, SectorWrite, SizeChange, Step, Sync

from everstep.checkpoint.engine import Engine
from everstep.checkpoint.segment_format import align_up
from everstep.checkpoint.storage_ops import (
    ArenaRange,
    FileKind,
    FileStat,
    LockHandle,
    SegmentHandle,
    storage_error,
)
from everstep.core.errors import CorruptDataError, StorageError

MOUNT = Path("/everstep-model")
USER = os.geteuid()
ALIGNMENT_BYTES = 512
FREE_BYTES = 1 << 40
CHILDREN_MAX = 1000
"""Paths that a directory keeps: every recovery makes temporary names of its own."""

_numbers = itertools.count(1000)
"""Never used twice in a process: a trace that goes on elsewhere must not meet a number again."""


class ModelPath(PosixPath):
    """A path on a device, which knows its parts and keeps its children: joining paths is what a recovery does most."""

    _place: tuple[int, tuple[str, ...]]
    _children: "dict[str, ModelPath]"
    _parent: "ModelPath | None"

    @classmethod
    @functools.cache
    def of_device(cls, index: int) -> "ModelPath":
        """Return the root of a device, the same for every model: no path is made twice."""
        return cls(MOUNT / str(index))._set(None, (index, ()))

    def _set(self, parent: "ModelPath | None", place: tuple[int, tuple[str, ...]]) -> "ModelPath":
        self._parent, self._place, self._children = parent, place, {}
        return self

    def __truediv__(self, key: "str | os.PathLike[str]") -> "ModelPath":
        found = self._children.get(key)  # pyright: ignore[reportArgumentType]  of all keys, only names are kept
        if found is None:
            name = str(key)
            device, names = self._place
            found = ModelPath(f"{self}/{name}")._set(self, (device, (*names, *name.split("/"))))
            if len(self._children) >= CHILDREN_MAX:
                self._children.clear()
            self._children[name] = found
        return found

    @property
    def parent(self) -> "ModelPath":
        """See PurePath."""
        return self if self._parent is None else self._parent

    @property
    def name(self) -> str:
        """See PurePath."""
        return self._place[1][-1]

    def absolute(self) -> "ModelPath":
        """Return the path: it is absolute."""
        return self

    def resolve(self, strict: bool = False) -> "ModelPath":
        """Return the path: the model has no links."""
        del strict
        return self


def place_of(path: Path) -> tuple[int, tuple[str, ...]]:
    """Return the device's number and the names below it."""
    if isinstance(path, ModelPath):
        return path._place
    assert path.is_relative_to(MOUNT), path
    return int(path.parts[2]), path.parts[3:]


@dataclass(slots=True)
class Fault:
    """Lets calls fail: the `nth` and the `times` - 1 after it of those named, on one device, on paths with `part`."""

    call: str
    device: int | None = None
    part: str = ""
    nth: int = 1
    times: int = 1
    is_done: bool = False
    """The call does its work and fails all the same (renames only: a lost answer)."""
    was_hit: bool = False

    def hits(self, call: str, path: str) -> bool:
        """Count this call if it is one of those, and tell whether it fails."""
        if call != self.call or self.part not in path:
            return False
        if self.device is not None and not path.startswith(f"{MOUNT}/{self.device}/"):
            return False
        self.nth -= 1
        is_hit = -self.times < self.nth <= 0
        self.was_hit |= is_hit
        return is_hit


@dataclass(slots=True)
class Recorder:
    """The trace being made, and where in it the running call stands (set by `lanes`)."""

    trace: list[Step] = field(default_factory=list[Step])
    section: int = 0
    lane: int = 0
    hashes_last: bool = False
    """Checksums are taken when all is written, instead of before anything is: of what is parallel one or the other
    comes first."""

    def add(self, op: Op) -> None:
        """Take one operation."""
        self.trace.append(Step(op, self.section, self.lane))


@functools.lru_cache(4096)
def _file_stat(device: int, number: int, size_bytes: int) -> FileStat:
    return FileStat(
        kind=FileKind.REGULAR if number > 0 else FileKind.DIRECTORY,
        size_bytes=size_bytes,
        owner_uid=USER,
        file_system_id=device,
        inode=abs(number),
    )


class _Lock:
    def __init__(self, held: set[str], path: Path) -> None:
        self._held = held
        self.path = path

    def is_in_place(self) -> bool:
        """See LockHandle: nobody empties a directory of the model."""
        return str(self.path) in self._held

    def release(self) -> None:
        """Let go of the lock."""
        self._held.discard(str(self.path))


class ModelStorage:
    """The file system of some devices, `MOUNT/0`, `MOUNT/1`, …; thread-safe.

    The lock file is durable at once: nothing depends on its content, and it would double every choice.
    """

    can_hang = False
    """It is memory, and is opened a hundred thousand times."""

    def __init__(
        self, device_count: int, image: Image | None = None, recorder: Recorder | None = None
    ) -> None:
        self.roots = tuple(-(index + 1) for index in range(device_count))
        self.image = Image({root: {} for root in self.roots}) if image is None else image.copy()
        self.recorder = recorder or Recorder()
        self.faults: list[Fault] = []
        self._held: set[str] = set()
        self._guard = RLock()
        self._open = 0

    @property
    def directories(self) -> "list[ModelPath]":
        """The paths of the devices."""
        return [ModelPath.of_device(index) for index in range(len(self.roots))]

    def mark(self, promise: object) -> None:
        """Write into the trace what holds from here on."""
        self.recorder.add(Mark(promise))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _enter(self, call: str, path: Path) -> None:
        if self.faults and self._is_broken(call, path):
            raise self._error(errno.EIO, path, call)

    def _is_broken(self, call: str, path: Path) -> bool:
        hits = [fault.hits(call, str(path)) for fault in self.faults]  # each counts its calls
        return any(hits)

    def _error(self, number: int, path: Path, doing: str) -> Exception:
        return storage_error(OSError(number, os.strerror(number)), path, doing)

    def _find(self, path: Path) -> int | None:
        """Return the number of what stands at the path."""
        device, names = place_of(path)
        return self._follow(device, names) if device < len(self.roots) else None

    def _follow(self, device: int, names: Sequence[str]) -> int | None:
        found, directories = self.roots[device], self.image.directories
        for name in names:
            inside = directories.get(found)  # a file's number is above 0, and never there
            if inside is None or (found := inside.get(name, 0)) == 0:
                return None
        return found

    def _parent(self, path: Path, doing: str) -> int:
        found = self._find(path.parent)
        if found is None or found > 0:
            raise self._error(errno.ENOENT, path, doing)
        return found

    def _file(self, path: Path, doing: str) -> int:
        found = self._find(path)
        if found is None:
            raise self._error(errno.ENOENT, path, doing)
        return found

    def _do(self, change: Change) -> None:
        self.image.apply(change)
        self.recorder.add(change)

    def _new(self, path: Path, *, is_directory: bool) -> int:
        number = -next(_numbers) if is_directory else next(_numbers)
        self._do(EntryChange(((self._parent(path, "creating"), path.name, number),)))
        return number

    def _write(self, file: int, content: bytes) -> None:
        for offset in range(0, len(content), SECTOR_BYTES):
            self._do(SectorWrite(file, offset, content[offset : offset + SECTOR_BYTES]))

    # --- StorageOps -----------------------------------------------------------------------------------------------

    def make_directory(self, path: Path) -> bool:
        """See StorageOps."""
        with self._guard:
            self._enter("make_directory", path)
            if self._find(path) is not None:
                return False
            self._new(path, is_directory=True)
            return True

    def list_directory(self, path: Path) -> tuple[str, ...]:
        """See StorageOps."""
        with self._guard:
            self._enter("list_directory", path)
            return tuple(sorted(self.image.directories.get(self._file(path, "listing"), {})))

    def stat(self, path: Path) -> FileStat | None:
        """See StorageOps."""
        with self._guard:
            self._enter("stat", path)
            found = self._find(path)
            if found is None:
                return None
            return _file_stat(place_of(path)[0], found, len(self.image.files.get(found, b"")))

    def read_small(self, path: Path, size_bytes_max: int, *, owner_uid: int) -> bytes | None:
        """See StorageOps."""
        with self._guard:
            self._enter("read_small", path)
            found = self._find(path)
            if found is None:
                return None
            content = self.image.files.get(found, b"")
        if found < 0 or owner_uid != USER or len(content) > size_bytes_max:
            raise CorruptDataError(f"{path} is no plain file of this owner and size")
        return content

    def read_head(self, path: Path, length_bytes: int) -> bytes:
        """See StorageOps."""
        with self._guard:
            self._enter("read_head", path)
            return self.image.files.get(self._file(path, "reading"), b"")[:length_bytes]

    def write_small_new(self, path: Path, content: bytes) -> None:
        """See StorageOps. A failure leaves what a failed fsync leaves: the name, and bytes that never get durable."""
        with self._guard:
            is_broken = self.faults and self._is_broken("write_small_new", path)
            if self._find(path) is not None:
                raise self._error(errno.EEXIST, path, "writing")
            file = self._new(path, is_directory=False)
            self._do(SizeChange(file, len(content)))
            self._write(file, content)
            self.recorder.add(Sync(file, failed=bool(is_broken)))
            if is_broken:
                raise self._error(errno.EIO, path, "writing")

    def rename_noreplace(self, source: Path, target: Path) -> bool:
        """See StorageOps."""
        with self._guard, self._may_be_done("rename_noreplace", target):
            if self._find(target) is not None:
                return False
            self._rename(source, target)
            return True

    def replace(self, source: Path, target: Path) -> None:
        """See StorageOps."""
        with self._guard, self._may_be_done("replace", target):
            self._rename(source, target)

    @contextmanager
    def _may_be_done(self, call: str, path: Path) -> Generator[None]:
        """Fail before or after the block, if a fault says so."""
        is_broken = bool(self.faults) and self._is_broken(call, path)
        is_done = any(fault.is_done for fault in self.faults)
        if is_broken and not is_done:
            raise self._error(errno.EIO, path, call)
        yield
        if is_broken:
            raise self._error(errno.EIO, path, call)

    def _rename(self, source: Path, target: Path) -> None:
        file = self._file(source, "renaming")
        old = (self._parent(source, "renaming"), source.name, None)
        self._do(EntryChange((old, (self._parent(target, "renaming"), target.name, file))))

    def recycle(self, path: Path, target: Path) -> int | None:
        """See StorageOps. Nobody else ever has a file of the model."""
        with self._guard:
            try:
                with self._may_be_done("recycle", path):
                    file = self._file(path, "recycling")
                    self._rename(path, target)
            except StorageError:
                return None
            return len(self.image.files.get(file, b""))

    def open_recycled(self, source: Path, target: Path) -> SegmentHandle | None:
        """See StorageOps."""
        with self._guard:
            try:
                with self._may_be_done("open_recycled", source):
                    if self._find(target) is not None:
                        return None
                    self._rename(source, target)
            except StorageError:
                return None
            return self._handle(target, self._file(target, "opening"))

    def unlink(self, path: Path) -> bool:
        """See StorageOps."""
        with self._guard:
            self._enter("unlink", path)
            found = self._find(path)
            if found is None:
                return False
            if found < 0:
                raise self._error(errno.EISDIR, path, "removing")
            self._do(EntryChange(((self._parent(path, "removing"), path.name, None),)))
            return True

    def remove_directory(self, path: Path) -> bool:
        """See StorageOps."""
        with self._guard:
            self._enter("remove_directory", path)
            found = self._find(path)
            if found is None:
                return False
            if self.image.directories.get(found):
                raise self._error(errno.ENOTEMPTY, path, "removing")
            self._do(EntryChange(((self._parent(path, "removing"), path.name, None),)))
            return True

    def sync_directory(self, path: Path) -> None:
        """See StorageOps."""
        call = "sync_directory"
        with self._guard:
            target = self._file(path, call)
            is_broken = bool(self.faults) and self._is_broken(call, path)
            self.recorder.add(Sync(target, failed=is_broken))
            if is_broken:
                raise self._error(errno.EIO, path, call)

    def free_bytes(self, path: Path) -> int:
        """See StorageOps."""
        self._enter("free_bytes", path)
        return FREE_BYTES

    def is_lock_of_the_dead(self, path: Path) -> bool:
        """See StorageOps."""
        return False

    def try_lock(self, path: Path, content: bytes) -> LockHandle | None:
        """See StorageOps."""
        with self._guard:
            self._enter("try_lock", path)
            if str(path) in self._held:
                return None
            self._held.add(str(path))
            if self._find(path) is None:
                self.recorder.add(Sync(self._new(path, is_directory=False)))
                self.recorder.add(Sync(self._parent(path, "locking")))
            return _Lock(self._held, path)

    def open_new_segment(self, path: Path) -> SegmentHandle:
        """See StorageOps."""
        with self._guard:
            self._enter("open_new_segment", path)
            if self._find(path) is not None:
                raise self._error(errno.EEXIST, path, "opening")
            return self._handle(path, self._new(path, is_directory=False))

    def open_segment_for_read(self, path: Path) -> SegmentHandle:
        """See StorageOps."""
        with self._guard:
            self._enter("open_segment_for_read", path)
            return self._handle(path, self._file(path, "opening"))

    def _handle(self, path: Path, file: int) -> SegmentHandle:
        self._open += 1
        return SegmentHandle(path=path, fd=file, is_direct=True, alignment_bytes=ALIGNMENT_BYTES)

    def reserve(self, handle: SegmentHandle, size_bytes: int) -> None:
        """See StorageOps."""
        with self._guard:
            self._enter("reserve", handle.path)
            self._do(SizeChange(handle.fd, align_up(size_bytes, ALIGNMENT_BYTES)))

    def write_segment(
        self, handle: SegmentHandle, source: ArenaRange, offset_bytes: int, length_bytes: int, engine: Engine
    ) -> float:
        """See StorageOps. A failure may have written any part."""
        del engine
        with self._guard:
            is_broken = bool(self.faults) and self._is_broken("write_segment", handle.path)
            content = bytes(source.view(offset_bytes, align_up(length_bytes, ALIGNMENT_BYTES)))
            self._write(handle.fd, content[: len(content) // 2] if is_broken else content)
            if is_broken:
                raise self._error(errno.EIO, handle.path, "writing")
            return 0.0

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
        del engine
        with self._guard:
            self._enter("read_segment", handle.path)
            found = self.image.files.get(handle.fd, b"")[file_offset_bytes : file_offset_bytes + length_bytes]
        if len(found) < length_bytes:
            raise CorruptDataError(f"{handle.path} is too short")
        target.view(offset_bytes, length_bytes)[:] = found

    def truncate(self, handle: SegmentHandle, size_bytes: int) -> None:
        """See StorageOps."""
        with self._guard:
            self._enter("truncate", handle.path)
            self._do(SizeChange(handle.fd, size_bytes, is_cut=True))

    def sync_data(self, handle: SegmentHandle) -> None:
        """See StorageOps."""
        with self._guard:
            is_broken = bool(self.faults) and self._is_broken("sync_data", handle.path)
            self.recorder.add(Sync(handle.fd, failed=is_broken))
            if is_broken:
                raise self._error(errno.EIO, handle.path, "making durable")

    def close(self, handle: SegmentHandle) -> None:
        """See StorageOps."""
        del handle
        self._open -= 1

    # --- for checks -----------------------------------------------------------------------------------------------

    def files_below(self, device: int, *names: str) -> Iterator[tuple[str, bytes | None]]:
        """Yield (path below, content; None for a directory) of everything in a directory; nothing if it is absent."""
        found = self._follow(device, names)
        return iter(()) if found is None else self.image.tree(found)

    def content_at(self, device: int, *names: str) -> bytes | None:
        """Return a file's bytes, None when there is none."""
        found = self._follow(device, names)
        return None if found is None or found < 0 else self.image.files.get(found, b"")

    def content(self, path: Path) -> bytes | None:
        """Return a file's bytes, None when there is none."""
        device, names = place_of(path)
        return self.content_at(device, *names)

    def open_count(self) -> int:
        """Return how many segments are open."""
        return self._open
