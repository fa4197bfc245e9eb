"""Files read by position: never shared over a fork, closed when nobody reads from them any more."""

import errno
import os
import stat
import threading
from collections import OrderedDict

import xxhash

from ...core.errors import SourceChangedError, StorageError, UsageError
from .per_process import PerProcess

OPEN_MAX = 64
"""Files that one source keeps open in each process; 1,024 descriptors is what many systems allow in all."""

SAMPLED_PIECES = 16
SAMPLED_PIECE_BYTES = 4096
GONE = "put the file back, or make the source anew"


class OpenFile:
    """A regular file, open for reading. The last reference closes it, so that no thread reads a closed descriptor."""

    def __init__(self, path: str | bytes) -> None:
        """Open `path`; OSError as open(2) has it, SourceChangedError where it is no regular file."""
        self.path = os.fsdecode(path)
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise SourceChangedError(f"{self.path} is not a regular file", hint=GONE)
        self.size_bytes = status.st_size

    def current_size(self) -> int:
        """Return the size that the file has now."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only at the end of the file."""
        data = os.pread(self._fd, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size:  # one call ends at 2 GiB, or at a signal
            data = os.pread(self._fd, size - got, offset + got)
            if not data:
                break
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def __del__(self) -> None:
        """Close it."""
        if self._fd >= 0:
            os.close(self._fd)


class OpenFiles:
    """The files that a process has open for one source: the most recently used ones stay open."""

    def __init__(self, limit: int = OPEN_MAX) -> None:
        """Keep at most `limit` files open, and those that are being read just now."""
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()

    def get(self, path: str, size_bytes: int, index: int) -> OpenFile:
        """Return `path`, opened; SourceChangedError names sample `index` if it is gone or has another size."""
        with self._lock:
            found = self._files.get(path)
            if found is not None:
                self._files.move_to_end(path)
                return found
        opened = open_indexed(path, size_bytes, index)
        with self._lock:
            self._files[path] = opened
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return opened


def files_per_process() -> PerProcess[OpenFiles]:
    """Return the open files of each process."""
    return PerProcess(OpenFiles)


def open_data(path: str) -> OpenFile:
    """Return `path`, opened for the first time; UsageError or StorageError where it cannot be."""
    try:
        return OpenFile(path)
    except SourceChangedError as exc:
        raise UsageError(exc.message, hint="give files, not folders or pipes") from exc
    except OSError as exc:
        kind = StorageError if exc.errno == errno.EIO else UsageError
        raise kind(
            f"{path} cannot be read: {exc.strerror}", hint="give files that this user can read"
        ) from exc


def open_indexed(path: str | bytes, size_bytes: int, index: int, hint: str = GONE) -> OpenFile:
    """Return `path`, opened, if it still has the size that it had when it was indexed."""
    try:
        opened = OpenFile(path)
    except OSError as exc:
        raise failed_read(exc, index, path) from exc
    if opened.size_bytes != size_bytes:
        raise SourceChangedError(
            f"{opened.path} has {opened.size_bytes} bytes, {size_bytes} when it was indexed (sample {index})",
            hint=hint,
        )
    return opened


def read_indexed(file: OpenFile, offset: int, size: int, index: int) -> bytes:
    """Return exactly the bytes [offset, offset + size); SourceChangedError where the file ends before."""
    end = file.size_bytes
    if offset >= 0 and offset + size <= end:  # else not even memory is asked for
        try:
            data = file.read(offset, size)
        except OSError as exc:
            raise failed_read(exc, index, file.path) from exc
        except MemoryError as exc:
            raise UsageError(
                f"sample {index} of {file.path} has {size} bytes, for which there is no memory",
                hint="leave it out of the data, or cut it in pieces",
            ) from exc
        if len(data) == size:
            return data
        end = file.current_size()
    raise SourceChangedError(
        f"{file.path} ends at {end}, sample {index} lies at [{offset}, {offset + size})", hint=GONE
    )


def failed_read(exc: OSError, index: int, path: str | bytes) -> Exception:
    """Return the error to raise for a failed read: names file and sample, and keeps the kind of the failure."""
    name = os.fsdecode(path)
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return SourceChangedError(f"{name} is gone (sample {index})", hint=GONE)
    return OSError(exc.errno, f"{exc.strerror} (sample {index})", name)


def sampled_digest(path: str) -> str:
    """Return a digest of a file's size and of 16 pages of it, first and last among them, evenly spread.

    It sees every change of size, and a file written anew; not one that changes few bytes between these pages.
    """
    opened = open_data(path)
    digest = xxhash.xxh3_128(opened.size_bytes.to_bytes(8, "little"))
    last = max(0, opened.size_bytes - SAMPLED_PIECE_BYTES)
    for number in range(SAMPLED_PIECES):
        digest.update(opened.read(last * number // (SAMPLED_PIECES - 1), SAMPLED_PIECE_BYTES))
    return digest.hexdigest()
