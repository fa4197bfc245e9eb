"""Index files on disk: mapped read-only, published whole, built by one process while the others wait."""

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from ...core.errors import CorruptDataError, EverstepError, SourceChangedError, StorageError, UsageError
from .index_format import NEVER_CURRENT, Buffer, Index, Stamp
from .mapping import map_file

logger = logging.getLogger(__name__)

SUFFIX = ".everstep-index"
UNFINISHED_SUFFIX = ".tmp"
"""After the index's name and a random word."""

BUILD_WAIT_S = 600.0
"""How long to wait for another process that builds in the same directory; then build as well, which is only slower."""

SETTLED_AFTER_S = 2
"""A file changed less than this before it was read may change again and keep its time in seconds."""

PUBLISH_TRIES = 3
"""Builders on several nodes of a network file system without locks remove each other's unfinished files."""

NAME_BYTES_MAX = 200
"""Of a file system's 255: the suffix of the index, and that of the unfinished one, come after the data's name."""

FUTURE_AFTER_S = 86_400
"""More than any clock of a file server is ahead of ours: a wrong clock wrote the file, or an archive had it so."""

_POLL_S = 0.05
_BESIDE = "see that it can be read; the job's user needs to read the data and its index"
_NAME_IT = "name a directory that you can write to by index="


class IndexHandle:
    """An index that travels to other processes as its path and digest, not as its contents.

    The mapping is shared over a fork: its file is never written again, a newer index is another file.
    """

    def __init__(self, path: str, index: Index) -> None:
        """`index` is what was loaded from `path`."""
        self.path = path
        self.kind = index.kind
        self.digest = index.digest
        self.count = index.count
        self._index: Index | None = index

    def get(self) -> Index:
        """Return the index, mapped at the first use in a process that got the handle by pickle."""
        index = self._index
        if index is None:
            index = self._index = self._load()
        return index

    def _load(self) -> Index:
        hint = "start the job again, or keep a job's index in a directory of its own by index="
        try:
            index = load_index(self.path, self.kind, verify=False)
        except (OSError, EverstepError) as exc:
            raise SourceChangedError(
                f"the index {self.path} was removed or damaged while it was used: {exc}", hint=hint
            ) from exc
        if index.digest != self.digest:
            raise SourceChangedError(f"the index {self.path} was built anew while it was used", hint=hint)
        return index

    def __getstate__(self) -> tuple[str, str, str, int]:
        """Return what another process needs."""
        return self.path, self.kind, self.digest, self.count

    def __setstate__(self, state: tuple[str, str, str, int]) -> None:
        """Take what __getstate__ returned."""
        self.path, self.kind, self.digest, self.count = state
        self._index = None


def index_path(data: str, directory: str | None, *, name: str = "", inside: bool = False) -> str:
    """Return where the index of `data` lies: beside it (`inside` it, for a folder), or in `directory`.

    `name` tells apart the indices of one dataset that was asked for in several ways.
    """
    suffix = SUFFIX + (f"-{name}" if name else "")
    if directory is None:
        if inside:
            return str(Path(data) / suffix)
        begin = _short(Path(data).name)
        return data + suffix if begin == Path(data).name else str(Path(data).with_name(begin)) + suffix
    real = os.path.realpath(data)
    digest = hashlib.blake2b(os.fsencode(real), digest_size=8).hexdigest()
    return str(Path(directory).absolute() / f"{_short(Path(real).name)}-{digest}{suffix}")


def _short(name: str) -> str:
    """Return a file's name; of one that leaves no room for a suffix the begin and a digest."""
    data = os.fsencode(name)
    if len(data) <= NAME_BYTES_MAX:
        return name
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    return f"{os.fsdecode(data[: NAME_BYTES_MAX - 17])}-{digest}"


def load_index(path: str, kind: str, *, verify: bool = True) -> Index:
    """Return the index in a file, mapped; errors as Index has them, each with the path; OSError as mapping.py."""
    try:
        return Index(map_file(path), kind=kind, verify=verify)
    except EverstepError as exc:
        raise type(exc)(f"{path}: {exc.message}", hint=exc.hint) from exc


def open_or_build(
    path: str,
    kind: str,
    data: str,
    is_current: Callable[[Index], bool],
    build: Callable[[], Sequence[Buffer]],
    *,
    unfinished: "Unfinished | None" = None,
) -> IndexHandle:
    """Return the index at `path` if it is whole and current, else build and publish one from `data`.

    Processes that build the same one take turns by a lock on `data`; who waited takes what the others built.
    A damaged index is built anew, with a warning in the log. A file that is no index of this kind, or one of a newer
    version, is refused and left alone. Where the directory cannot be written to, an index that is only not known
    to be current is compared with what would be built, and used if it is equal. Who opens many gives all of them the
    same `unfinished`.

    Raises:
        UsageError: there is none and none can be written, or it is out of date and cannot be replaced.
        StorageError: the disk is full, or failed.
    """
    before = _identity(path)
    index = _usable(path, kind)
    if index is not None and _is_current(path, index, is_current):
        return IndexHandle(path, index)
    with _only_builder(data) as is_alone:
        if _identity(path) != before:  # built while we waited, and so after we were asked for it
            index = _usable(path, kind)
            if index is not None:
                return IndexHandle(path, index)
        try:
            temporary = _Temporary(path)
        except OSError as exc:
            if index is None:
                where = Path(path).parent
                raise UsageError(
                    f"no index can be written to {where}: {exc.strerror}", hint=_NAME_IT
                ) from exc
            return _compared(path, index, lambda: _built(build, data))
        with temporary:
            if is_alone:
                temporary.remove((unfinished or Unfinished()).of(Path(path)))
            _publish(temporary, _built(build, data), path)
        logger.info("index_built path=%s", path)
        return IndexHandle(path, _published(path, kind))


def settled(mtime_ns: int, now_s: float) -> int:
    """Return the time for a stamp: whole seconds, which survive every archive, or NEVER_CURRENT if it is too new.

    A time far in the future is as good as one long ago: who changes the file gives it another one.
    """
    seconds = mtime_ns // 1_000_000_000
    is_settled = seconds < now_s - SETTLED_AFTER_S or seconds > now_s + FUTURE_AFTER_S
    return seconds if is_settled else NEVER_CURRENT


def file_stamp(path: str | bytes, now_s: float, name: bytes = b"") -> Stamp:
    """Return the stamp of a file as it is now."""
    status = os.stat(path)  # noqa: PTH116  paths may be bytes
    return Stamp(path=name, mtime_s=settled(status.st_mtime_ns, now_s), size_bytes=status.st_size)


def is_as_stamped(path: str | bytes, stamp: Stamp) -> bool:
    """Return whether a file has the time of its stamp, and its size unless it is a directory, and was at rest then."""
    try:
        status = os.stat(path)  # noqa: PTH116  paths may be bytes
    except PermissionError:
        raise
    except (OSError, ValueError):  # no such path, or none that can be
        return False
    same_time = status.st_mtime_ns // 1_000_000_000 == stamp.mtime_s != NEVER_CURRENT
    return same_time and (stat.S_ISDIR(status.st_mode) or status.st_size == stamp.size_bytes)


def _usable(path: str, kind: str) -> Index | None:
    try:
        return load_index(path, kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise UsageError(f"the index {path} cannot be read: {exc.strerror}", hint=_NAME_IT) from exc
    except CorruptDataError as exc:
        _warn_damaged(path, exc)
        return None


def _is_current(path: str, index: Index, is_current: Callable[[Index], bool]) -> bool:
    """Return whether a whole index fits the data; one whose sections contradict each other fits nothing."""
    try:
        return is_current(index)
    except CorruptDataError as exc:
        _warn_damaged(path, exc)
        return False
    except OSError as exc:
        name = path if exc.filename is None else os.fsdecode(exc.filename)
        raise UsageError(f"{name} cannot be read: {exc.strerror}", hint=_BESIDE) from exc


def _warn_damaged(path: str, exc: CorruptDataError) -> None:
    logger.warning("index_damaged path=%s reason=%r it is built anew", path, exc.message)


def _built(build: Callable[[], Sequence[Buffer]], data: str) -> Sequence[Buffer]:
    """Return what `build` returns; what it could not read is named."""
    try:
        return build()
    except OSError as exc:
        name = data if exc.filename is None else os.fsdecode(exc.filename)
        kind = UsageError if isinstance(exc, PermissionError) else StorageError
        raise kind(f"{name} could not be read for the index of {data}: {exc.strerror}", hint=_BESIDE) from exc


def _published(path: str, kind: str) -> Index:
    try:
        return load_index(path, kind)
    except OSError as exc:
        raise StorageError(
            f"the index {path} is gone, or cannot be read, right after it was written: {exc.strerror}",
            hint=_NAME_IT,
        ) from exc


def _compared(path: str, index: Index, build: Callable[[], Sequence[Buffer]]) -> IndexHandle:
    fresh = Index(b"".join(build()), kind=index.kind, verify=False)
    if fresh.digest != index.digest:
        raise UsageError(f"{path} is out of date and cannot be replaced", hint=_NAME_IT)
    return IndexHandle(path, index)


def _publish(temporary: "_Temporary", pieces: Sequence[Buffer], path: str) -> None:
    try:
        temporary.publish(pieces)
    except OSError as exc:
        raise StorageError(f"the index {path} could not be written: {exc.strerror}", hint=_NAME_IT) from exc


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116  paths may be bytes
    except OSError:  # whatever it is, opening it says
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


@contextlib.contextmanager
def _only_builder(data: str) -> Generator[bool]:
    """Hold a lock on the data; without one where the file system has none or its holder takes too long: False."""
    try:
        fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise UsageError(f"{data} cannot be read: {exc.strerror}", hint=_BESIDE) from exc
    try:
        yield _wait_for_lock(fd, data)
    finally:
        # A child forked meanwhile would hold the lock by its copy of the descriptor.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _wait_for_lock(fd: int, data: str) -> bool:
    deadline = time.monotonic() + BUILD_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                logger.warning("index_lock_late data=%s waited_s=%.0f", data, BUILD_WAIT_S)
                return False
            time.sleep(_POLL_S)
        except OSError:  # network file systems may have no lock for readers
            return False
        else:
            return True


class Unfinished:
    """The files that builders had not finished when their directory was first asked about; threads may share it.

    Each directory is read once, not once for each index in it: opening 4,000 shards on tmpfs took 32 s so, and
    takes 2.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[Path, dict[str, list[Path]]] = {}

    def of(self, target: Path) -> list[Path]:
        """Return those that were to become `target`."""
        with self._lock:
            if target.parent not in self._of:
                self._of[target.parent] = self._found_in(target.parent)
            return self._of[target.parent].get(target.name, [])

    @staticmethod
    def _found_in(directory: Path) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        try:
            names = os.listdir(directory)  # noqa: PTH208  a Path for each of them takes longer than the rest
        except PermissionError:  # who may write to a directory need not be allowed to list it
            return found
        for name in names:
            if name.endswith(UNFINISHED_SUFFIX) and name.count(".") > 1:
                found.setdefault(name.rsplit(".", 2)[0], []).append(directory / name)
        return found


class _Temporary:
    """A file that becomes `path` whole, or nothing."""

    def __init__(self, path: str) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target = target
        self._begin()

    def _begin(self) -> None:
        self._path = self._target.with_name(f"{self._target.name}.{secrets.token_hex(6)}{UNFINISHED_SUFFIX}")
        self._file = self._path.open("xb")

    def remove(self, others: Sequence[Path]) -> None:
        """Remove what builders left behind that were killed."""
        for path in others:
            if path != self._path:
                path.unlink(missing_ok=True)

    def publish(self, pieces: Sequence[Buffer]) -> None:
        """Write, and rename. The folder is not synced: what a crash takes away is built again."""
        for left in reversed(range(PUBLISH_TRIES)):
            for piece in pieces:
                self._file.write(piece)
            self._file.flush()
            os.fsync(self._file.fileno())
            try:
                self._path.replace(self._target)
            except FileNotFoundError:  # another builder that knew of no lock removed it
                if not left:
                    raise
                self._file.close()
                self._begin()
            else:
                return

    def __enter__(self) -> "_Temporary":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written cannot at the second time; it was said
            self._file.close()
        self._path.unlink(missing_ok=True)
