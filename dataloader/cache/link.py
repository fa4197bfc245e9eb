"""A reader's connection to the daemon: opened with a deadline, then never waited for.

No thread: answers are read, and what could not be sent is sent, when the reader comes by (`poll`). One owner at a time;
`CachedDataset` holds a lock around every call. Nothing here is used after a fork but `abandon`.
"""

import contextlib
import itertools
import mmap
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...core.errors import DaemonUnavailableError, EverstepError, error_from_code
from ...core.version import VERSION
from ...proto import frames
from ...proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, CacheContent, Reply, Request, Role
from ...proto.wire import FrameError, FrameReader, decode_reply, pack
from .arena_view import ArenaView
from .ring_plan import Ring

STAGING_BYTES = 32 * 1024 * 1024
"""Pages are made as they are written to: a reader that is served at once uses as much as one message holds."""
OUTSTANDING_MAX = 4
"""With fewer messages unanswered a sample is sent at once, so that none waits for another that may not come."""
STAGING_KEPT_BYTES = 4 * 1024 * 1024
"""What was touched beyond this is given back when the staging is empty: it counts for the reader's job."""
BATCH_ITEMS = 64
BATCH_BYTES = 4 * 1024 * 1024
BATCH_AGE_S = 0.005
UNSENT_BYTES_MAX = 1 << 20
"""A daemon that takes nothing is gone."""
LARGER_DEADLINE_S = 0.2
"""For a larger staging, asked for when a sample does not fit at all."""
FLUSH_POLL_S = 0.0005

_CARRY_DESCRIPTOR = frames.CacheOpened | frames.StagingReady


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a reader asks of the daemon."""

    fingerprint: str
    content: CacheContent
    sample_count: int
    budget_bytes: int


class CacheLink:
    """One connection with one cache. `on_filled` hears of every answer to a fill."""

    def __init__(
        self,
        path: Path,
        wanted: Wanted,
        on_filled: Callable[[frames.CacheFilled], None],
        *,
        deadline_s: float,
    ) -> None:
        """Connect, open the cache and map it; all within the deadline.

        Raises:
            DaemonUnavailableError: nobody answers on `path`, or not in time.
            VersionMismatchError: the daemon speaks another protocol.
            UsageError: the fingerprint is known with another number of samples.
            MemoryRefusedError: the node has no memory for it.
        """
        self._on_filled = on_filled
        self._numbers = itertools.count(1)
        self._frames = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
        self._unsent = bytearray()
        self._waiting: list[tuple[int, int, int, int]] = []
        self._waiting_bytes = 0
        self._waiting_since_s = 0.0
        self._sent: deque[tuple[int, int]] = deque()
        """(request id, places in the ring) of fills that are not answered yet, in the order of their answers."""
        self._staging: mmap.mmap | None = None
        self._ring = Ring(0)
        self._touched_bytes = 0
        self._until_s = time.monotonic() + deadline_s
        self._sock = _connect(path, deadline_s)
        weakref.finalize(self, self._sock.close)  # nobody has to close a dataset
        try:
            self._greet()
            self.opened, self.view = self._open(wanted)
            self._stage(STAGING_BYTES)
        except BaseException:
            self.close()
            raise
        self._sock.setblocking(False)

    # -- fills

    def fill(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Put a sample into the staging and have it sent, at once or with the next ones; False: there is no room.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        length = len(data)
        if length > self._ring.size_bytes:
            self._enlarge(length)
        begin = self._ring.take(length)
        if begin is None:
            self.poll()
            begin = self._ring.take(length)
        if begin is None:
            return False
        assert self._staging is not None
        self._staging[begin : begin + length] = data
        self._touched_bytes = max(self._touched_bytes, begin + length)
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append((index, begin, length, xxhash.xxh3_64_intdigest(data)))
        self._waiting_bytes += length
        self.poll()
        return True

    @property
    def is_behind(self) -> bool:
        """Tell whether something waits to be sent: then `poll` soon."""
        return bool(self._waiting or self._unsent)

    def _is_due(self) -> bool:
        return bool(self._waiting) and (
            len(self._sent) < OUTSTANDING_MAX
            or len(self._waiting) >= BATCH_ITEMS
            or self._waiting_bytes >= BATCH_BYTES
            or time.monotonic() - self._waiting_since_s >= BATCH_AGE_S
        )

    def _send_waiting(self) -> None:
        items, self._waiting, self._waiting_bytes = self._waiting, [], 0
        number = next(self._numbers)
        self._sent.append((number, len(items)))
        self.send(frames.FillCache(request_id=number, items=items))

    def poll(self) -> None:
        """Read what has come and send what is due, without waiting.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        with _telling_loss():
            self._receive_all()
            if self._is_due():
                self._send_waiting()
            self._push()

    def flush(self, deadline_s: float) -> bool:
        """Send everything and wait until it was answered; tell whether it was, in time.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        until_s = time.monotonic() + deadline_s
        if self._waiting:
            self._send_waiting()
        while True:
            self.poll()
            if not self._sent and not self._unsent:
                return True
            if time.monotonic() > until_s:
                return False
            time.sleep(FLUSH_POLL_S)

    def send(self, frame: Request) -> None:
        """Queue a frame and send what the socket takes.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        self._unsent += pack(frame)
        if len(self._unsent) > UNSENT_BYTES_MAX:
            raise DaemonUnavailableError("the daemon takes nothing")
        with _telling_loss():
            self._push()

    def _push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]

    # -- answers

    def _receive_all(self) -> None:
        while True:
            try:
                is_open = self._frames.receive(self._sock)
            except BlockingIOError:
                return
            if not is_open:
                raise DaemonUnavailableError("the daemon closed the connection")
            while (body := self._frames.next_body()) is not None:
                self._answered(decode_reply(body))

    def _answered(self, reply: Reply) -> None:
        if not isinstance(reply, frames.CacheFilled | frames.Failure):
            raise DaemonUnavailableError(f"the daemon sent {type(reply).__name__}")
        if not self._sent or self._sent[0][0] != reply.re:
            raise DaemonUnavailableError(f"the daemon answered {reply.re}, which was not next")
        _, count = self._sent.popleft()
        self._ring.free(count)
        self._give_back()
        if isinstance(reply, frames.Failure):
            raise error_from_code(reply.code, reply.message, reply.hint)
        self._on_filled(reply)

    def _give_back(self) -> None:
        """Free the pages of an empty staging but for its first ones, if there may be more."""
        if self._touched_bytes > STAGING_KEPT_BYTES and not len(self._ring):
            assert self._staging is not None
            self._staging.madvise(mmap.MADV_REMOVE, STAGING_KEPT_BYTES)
            self._touched_bytes = STAGING_KEPT_BYTES

    # -- opening

    def _greet(self) -> None:
        with _telling_loss():
            self._sock.sendall(pack(frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.TRAINER)))
            reply = self._next()
        if not isinstance(reply, frames.Welcome):
            raise DaemonUnavailableError(f"the daemon answered Hello with {type(reply).__name__}")

    def _open(self, wanted: Wanted) -> tuple[frames.CacheOpened, ArenaView]:
        reply = self._request(
            frames.OpenCache(
                request_id=next(self._numbers),
                fingerprint=wanted.fingerprint,
                content=wanted.content,
                sample_count=wanted.sample_count,
                budget_bytes=wanted.budget_bytes,
            )
        )
        if not isinstance(reply, frames.CacheOpened):
            raise DaemonUnavailableError(f"the daemon answered OpenCache with {type(reply).__name__}")
        try:
            view = ArenaView(self._frames.take_fd(), reply.size_bytes, wanted.sample_count)
        except (OSError, ValueError, FrameError) as error:
            raise DaemonUnavailableError(f"the cache cannot be mapped: {error}") from error
        return reply, view

    def _stage(self, size_bytes: int) -> None:
        size_bytes = min(size_bytes, self.opened.size_bytes)
        reply = self._request(frames.StageCache(request_id=next(self._numbers), size_bytes=size_bytes))
        if not isinstance(reply, frames.StagingReady):
            raise DaemonUnavailableError(f"the daemon answered StageCache with {type(reply).__name__}")
        with _telling_loss():
            fd = self._frames.take_fd()
        try:
            staging = mmap.mmap(fd, reply.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise DaemonUnavailableError(f"the staging cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        if self._staging is not None:
            self._staging.close()
        self._staging, self._ring, self._touched_bytes = staging, Ring(reply.size_bytes), 0

    def _enlarge(self, length: int) -> None:
        """Get a staging that a sample of this length fits into, if nothing is under way in the one before."""
        self.poll()
        if self._sent or self._waiting or self._unsent:
            return
        self._until_s = time.monotonic() + LARGER_DEADLINE_S
        try:
            self._stage(1 << (length - 1).bit_length())
        finally:
            self._sock.setblocking(False)

    def _request(self, frame: Request) -> Reply:
        """Return the answer to a request, waiting for it."""
        with _telling_loss():
            self._sock.settimeout(max(0.001, self._until_s - time.monotonic()))
            self._sock.sendall(pack(frame))
            return self._next()

    def _next(self) -> Reply:
        while (body := self._frames.next_body()) is None:
            self._sock.settimeout(max(0.001, self._until_s - time.monotonic()))
            if not self._frames.receive(self._sock):
                raise DaemonUnavailableError("the daemon closed the connection")
        reply = decode_reply(body)
        if isinstance(reply, frames.Failure):
            raise error_from_code(reply.code, reply.message, reply.hint)
        return reply

    # -- end

    def close(self) -> None:
        """Close the connection and the staging. The view lives on for whoever has it."""
        self._sock.close()
        self._frames.close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._ring = Ring(0)

    def abandon(self) -> None:
        """After a fork: let go of what was inherited, without a word to the daemon."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())
        self.close()


def _connect(path: Path, deadline_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(deadline_s)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DaemonUnavailableError(f"no daemon answers on {path}: {error.strerror or error}") from error
    return sock


@contextlib.contextmanager
def _telling_loss() -> Generator[None]:
    """Turn what a socket or a stream of frames raises into DaemonUnavailableError."""
    try:
        yield
    except EverstepError:
        raise
    except (OSError, FrameError) as error:
        raise DaemonUnavailableError(f"the connection to the daemon was lost: {error}") from error
