"""An arena's state in a memfd that only the daemon has: trainers map the arena itself, and could write what they like.

Its methods may be called from the event loop and from threads. A draft is written in a thread (`write`, a copy of up
to 64 MiB); what makes it count is 48 bytes.
"""

import fcntl
import os
import stat
import threading

from ...checkpoint import linux
from ...core.errors import CorruptDataError
from . import state_format as form


class ArenaState:
    """Owns the descriptor."""

    def __init__(self, fd: int, head: form.ArenaHead, mappers: list[int]) -> None:
        """Use `make` or `read`."""
        self.fd, self.head = fd, head
        self._mappers = mappers
        self._lock = threading.Lock()
        self._frames: dict[int, bytes] = {}
        """Of drafts that are written and not yet sealed, by slot."""
        self._sealed: set[int] = set()

    @classmethod
    def make(cls, head: form.ArenaHead) -> "ArenaState":
        """Return a new state without records.

        Raises:
            OSError: no descriptor is left, or no memory.
            CorruptDataError: the head is too large.
        """
        page = form.encode_head(head)
        fd = os.memfd_create("everstep-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, form.state_size_bytes(head.slot_count))
            os.pwrite(fd, page, 0)
            os.pwrite(fd, form.encode_mappers([]), form.MAPPERS_OFFSET_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, linux.SEALS_FIXED_SIZE)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, head, [])

    @classmethod
    def read(cls, fd: int) -> "ArenaState":
        """Return the state that a daemon before this one has left. It takes the descriptor only if it returns.

        Raises:
            FormatVersionError: another version of everstep has left it.
            CorruptDataError: it is none, or not what was written.
        """
        size_bytes = check_memfd(fd)
        try:
            head = form.decode_head(os.pread(fd, form.PAGE_BYTES, 0))
            mappers = form.decode_mappers(os.pread(fd, form.PAGE_BYTES, form.MAPPERS_OFFSET_BYTES))
        except OSError as error:
            raise CorruptDataError(f"an arena's state cannot be read: {error}") from error
        if size_bytes != form.state_size_bytes(head.slot_count):
            raise CorruptDataError(f"the state of an arena of {head.slot_count} slots has {size_bytes} bytes")
        state = cls(fd, head, mappers)
        state._sealed.update(slot for slot in range(head.slot_count) if any(state._frame(slot)))
        return state

    @property
    def sealed(self) -> list[int]:
        """Slots with a snapshot that is not known to be on the devices."""
        with self._lock:
            return sorted(self._sealed - self._frames.keys())

    @property
    def mappers(self) -> list[int]:
        """Pids of the trainers that were given the arena; 0: of one in another pid namespace."""
        return list(self._mappers)

    @property
    def may_be_mapped(self) -> bool:
        """Tell whether one of these trainers may live."""
        return any(_may_live(pid) for pid in self._mappers)

    def add_mapper(self, pid: int) -> None:
        """A trainer is about to be given the arena."""
        if pid not in self._mappers:
            self._mappers.append(pid)
            os.pwrite(self.fd, form.encode_mappers(self._mappers), form.MAPPERS_OFFSET_BYTES)

    def write(self, slot: int, draft: bytes) -> None:
        """Keep a draft, which counts when its slot is sealed: before this call or after it."""
        at = form.record_offset_bytes(slot)
        os.pwrite(self.fd, draft, at + form.PAGE_BYTES)
        frame = form.record_frame(draft)
        with self._lock:
            if slot in self._sealed:
                os.pwrite(self.fd, frame, at)
            else:
                self._frames[slot] = frame

    def seal(self, slot: int) -> None:
        """The snapshot of which the draft is written, or being written, is whole: from now on it must not be lost."""
        with self._lock:
            self._sealed.add(slot)
            if (frame := self._frames.pop(slot, None)) is not None:
                os.pwrite(self.fd, frame, form.record_offset_bytes(slot))

    def clear(self, slot: int) -> None:
        """What was sealed there is on the devices, or of no use: the slot may be overwritten. Again is nothing."""
        with self._lock:
            self._sealed.discard(slot)
            self._frames.pop(slot, None)
            os.pwrite(self.fd, bytes(len(form.record_frame(b""))), form.record_offset_bytes(slot))

    def draft(self, slot: int) -> bytes | None:
        """Return the draft of what was sealed in a slot; None: nothing was.

        Raises:
            FormatVersionError: another version of everstep has written it.
            CorruptDataError: it is not what was written.
        """
        frame = self._frame(slot)
        length = form.record_length_bytes(frame)
        if not length:
            return None
        draft = os.pread(self.fd, length, form.record_offset_bytes(slot) + form.PAGE_BYTES)
        form.check_record(frame, draft)
        return draft

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self.fd)

    def _frame(self, slot: int) -> bytes:
        return os.pread(self.fd, len(form.record_frame(b"")), form.record_offset_bytes(slot))


def check_memfd(fd: int) -> int:
    """Return the size of a memfd that nobody can make smaller, which would be SIGBUS for who maps it.

    Raises:
        CorruptDataError: it is something else.
    """
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise CorruptDataError(f"this is no memfd: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or seals & linux.SEALS_FIXED_SIZE != linux.SEALS_FIXED_SIZE:
        raise CorruptDataError("this is no memfd of a fixed size")
    return status.st_size


def _may_live(pid: int) -> bool:
    """Tell whether a process of this pid may live; another one that has the pid by now is not told from it."""
    try:
        if pid:
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
