"""A reader's connection to the daemon: opened with a deadline, then never waited for.

No thread: answers are read, and what could not be sent is sent, when the reader comes by (`poll`). One owner at a time;
`CachedDataset` holds a lock around every call. Nothing here is used after a fork but `abandon`.
"""

import contextlib
import itertools
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...core.errors import DaemonUnavailableError, EverstepError, error_from_code
from ...core.mapping import give_pages_back, map_shared
from ...core.version import VERSION
from ...proto import frames, peer_frames
from ...proto.frames import FILL_ITEMS_MAX, FRAME_SIZE_BYTES_MAX, PROTOCOL, CacheContent, Reply, Request, Role
from ...proto.wire import FrameError, FrameReader, decode_reply, greet, pack
from .arena_view import ArenaView
from .inbox import INBOX_BYTES, Inbox
from .ring_plan import Ring

STAGING_BYTES = 32 * 1024 * 1024
"""Pages are made as they are written to: a reader that is served at once uses as much as one message holds."""
OUTSTANDING_MAX = 4
"""With fewer messages unanswered a sample is sent at once, so that none waits for another that may not come."""
STAGING_KEPT_BYTES = 4 * 1024 * 1024
"""What was touched beyond this is given back when the staging is empty: it counts for the reader's job."""
SENT_MAX = 128
"""With so many unanswered the daemon hangs, or nearly: what is staged then goes in few messages, later."""
WAITING_MAX = 2 * FILL_ITEMS_MAX
"""So many wait meanwhile: samples of a few bytes would take more memory here than in the staging."""
BATCH_ITEMS = 64
BATCH_BYTES = 4 * 1024 * 1024
BATCH_AGE_S = 0.005
UNSENT_BYTES_MAX = 1 << 20
"""A daemon that takes nothing is gone."""
LARGER_DEADLINE_S = 0.2
"""For a larger staging, asked for when a sample does not fit at all."""
FLUSH_POLL_S = 0.0005
INBOX_DEADLINE_S = 5.0
"""As for attaching: once for a connection, and who gives it up reads its samples from storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a reader asks of the daemon."""

    fingerprint: str
    content: CacheContent
    sample_count: int
    budget_bytes: int
    members: tuple[str, ...] = ()
    """The nodes that share it; empty: those of the daemon's configuration."""


class CacheLink:
    """One connection with one cache. `on_filled` hears of every answer to a fill, `on_members` of other nodes."""

    def __init__(
        self,
        path: Path,
        wanted: Wanted,
        on_filled: Callable[[frames.CacheFilled], None],
        on_members: Callable[[peer_frames.CacheMembers], None],
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
        self._on_filled, self._on_members = on_filled, on_members
        self._numbers = itertools.count(1)
        self._frames = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
        self._unsent = bytearray()
        self._waiting: list[tuple[int, int, int, int]] = []
        self._waiting_bytes = 0
        self._waiting_since_s = 0.0
        self._sent: deque[tuple[int, int]] = deque()
        """(request id, places in the ring) of fills that are not answered yet, in the order of their answers."""
        self._staging: memoryview | None = None
        self._ring = Ring(0)
        self._touched_bytes = 0
        self.inbox = Inbox()
        self._flushed_number = 0
        self._until_s = time.monotonic() + deadline_s
        self._sock = connected_socket(path, deadline_s)
        # Nobody has to close a dataset. At the end of the process reader.py does it, after its last words.
        weakref.finalize(self, self._sock.close).atexit = False
        try:
            self._greet()
            self.opened, self.view = self._open(wanted)
            self._stage(STAGING_BYTES)
            on_members(peer_frames.CacheMembers(members=self.opened.members, me=self.opened.me))
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
        begin = self._take(length)
        if begin is None:
            self.poll()
            begin = self._take(length)
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

    def _take(self, length: int) -> int | None:
        """Return a free place in the staging; None: there is none, or too many samples wait."""
        return None if len(self._waiting) >= WAITING_MAX else self._ring.take(length)

    @property
    def is_behind(self) -> bool:
        """Tell whether something waits to be sent: then `poll` soon."""
        return bool(self._waiting or self._unsent)

    def _is_due(self) -> bool:
        if len(self._sent) >= SENT_MAX:
            return False
        return bool(self._waiting) and (
            len(self._sent) < OUTSTANDING_MAX
            or len(self._waiting) >= BATCH_ITEMS
            or self._waiting_bytes >= BATCH_BYTES
            or time.monotonic() - self._waiting_since_s >= BATCH_AGE_S
        )

    def _send_waiting(self) -> None:
        items, self._waiting = self._waiting[:FILL_ITEMS_MAX], self._waiting[FILL_ITEMS_MAX:]
        self._waiting_bytes -= sum(length for _, _, length, _ in items)
        number = next(self._numbers)
        self._sent.append((number, len(items)))
        self.send(frames.FillCache(request_id=number, items=items))

    def poll(self) -> None:
        """Read what has come and send what is due, without waiting.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        with telling_loss():
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
        while True:
            if self._waiting and len(self._sent) < SENT_MAX:
                self._send_waiting()
            self.poll()
            if not self._sent and not self.is_behind:
                return True
            if time.monotonic() > until_s:
                return False
            time.sleep(FLUSH_POLL_S)

    def flush_peers(self, deadline_s: float) -> bool:
        """Wait until nothing waits any more in the daemon to be sent to its owner; tell whether so, in time.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        number = next(self._numbers)
        self.send(peer_frames.FlushPeers(request_id=number))
        self._wait(lambda: self._flushed_number == number, deadline_s)
        return self._flushed_number == number

    # -- other nodes

    def ask_peers(self, samples: list[int]) -> None:
        """Have the daemon fetch samples into the inbox, over what lies there; `wait_peers` waits for them.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        if self.inbox.mapping is None:
            self._open_inbox()
        number = next(self._numbers)
        self.inbox.asked(number, samples)
        self.send(peer_frames.AskPeers(request_id=number, samples=samples))

    def wait_peers(self, deadline_s: float) -> None:
        """Return when the daemon has answered `ask_peers`.

        Raises:
            DaemonUnavailableError: it has not, in time, or the connection is lost.
        """
        self._wait(lambda: not self.inbox.is_waiting, deadline_s)
        if self.inbox.is_waiting:
            raise DaemonUnavailableError(f"the daemon has not answered for {deadline_s:.1f} s")

    def _wait(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Read and send until it is done, or the deadline has passed."""
        until_s = time.monotonic() + deadline_s
        with select.epoll() as poller:
            poller.register(self._sock, select.EPOLLIN)
            self.poll()
            while not is_done() and (left_s := until_s - time.monotonic()) > 0:
                poller.poll(min(left_s, FLUSH_POLL_S if self._unsent or self._waiting else left_s))
                self.poll()

    def _open_inbox(self) -> None:
        number = next(self._numbers)
        self.inbox.number = number
        self.send(peer_frames.OpenInbox(request_id=number, size_bytes=INBOX_BYTES))
        self._wait(lambda: self.inbox.mapping is not None, INBOX_DEADLINE_S)
        if self.inbox.mapping is None:
            raise DaemonUnavailableError("the daemon gives no inbox")

    def send(self, frame: Request) -> None:
        """Queue a frame and send what the socket takes.

        Raises:
            DaemonUnavailableError: the connection is lost.
        """
        self._unsent += pack(frame)
        if len(self._unsent) > UNSENT_BYTES_MAX:
            raise DaemonUnavailableError("the daemon takes nothing")
        with telling_loss():
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
        match reply:
            case peer_frames.CacheMembers():
                self._on_members(reply)
            case peer_frames.PeersGave():
                self.inbox.gave(reply)
            case peer_frames.InboxReady():
                with telling_loss():
                    self.inbox.use(self._frames.take_fd(), reply.size_bytes)
            case frames.Done():
                self._flushed_number = reply.re
            case frames.Failure() if reply.re in (self.inbox.number, self.inbox.asked_number):
                raise error_from_code(reply.code, reply.message, reply.hint)
            case _:
                self._fill_answered(reply)

    def _fill_answered(self, reply: Reply) -> None:
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
            give_pages_back(self._staging, STAGING_KEPT_BYTES)
            self._touched_bytes = STAGING_KEPT_BYTES

    # -- opening

    def _greet(self) -> None:
        with telling_loss():
            hello = frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.TRAINER)
            self._sock.settimeout(max(0.001, self._until_s - time.monotonic()))
            greet(self._sock, self._frames, hello)

    def _open(self, wanted: Wanted) -> tuple[frames.CacheOpened, ArenaView]:
        reply = self._request(
            frames.OpenCache(
                request_id=next(self._numbers),
                fingerprint=wanted.fingerprint,
                content=wanted.content,
                sample_count=wanted.sample_count,
                budget_bytes=wanted.budget_bytes,
                members=list(wanted.members),
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
        with telling_loss():
            fd = self._frames.take_fd()
        try:
            staging = map_shared(fd, reply.size_bytes, is_writable=True)
        except OSError as error:
            raise DaemonUnavailableError(f"the staging cannot be mapped: {error}") from error
        finally:
            os.close(fd)
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
        with telling_loss():
            self._sock.settimeout(max(0.001, self._until_s - time.monotonic()))
            self._sock.sendall(pack(frame))
            return self._next()

    def _next(self) -> Reply:
        while True:
            while (body := self._frames.next_body()) is None:
                self._sock.settimeout(max(0.001, self._until_s - time.monotonic()))
                if not self._frames.receive(self._sock):
                    raise DaemonUnavailableError("the daemon closed the connection")
            reply = decode_reply(body)
            if not isinstance(reply, peer_frames.CacheMembers | peer_frames.PeersGave):
                break
            self._answered(reply)  # they come when they like
        if isinstance(reply, frames.Failure):
            raise error_from_code(reply.code, reply.message, reply.hint)
        return reply

    # -- end

    def close(self) -> None:
        """Close the connection and the staging. The view lives on for whoever has it."""
        self._sock.close()
        self._frames.close()
        self._staging = None
        self._ring = Ring(0)
        self.inbox.close()

    def abandon(self) -> None:
        """After a fork: let go of what was inherited, without a word to the daemon."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())
        self.close()


def connected_socket(path: Path, deadline_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(deadline_s)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DaemonUnavailableError(f"no daemon answers on {path}: {error.strerror or error}") from error
    return sock


@contextlib.contextmanager
def telling_loss() -> Generator[None]:
    """Turn what a socket or a stream of frames raises into DaemonUnavailableError."""
    try:
        yield
    except EverstepError:
        raise
    except (OSError, FrameError) as error:
        raise DaemonUnavailableError(f"the connection to the daemon was lost: {error}") from error
