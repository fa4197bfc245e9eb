"""One data-socket connection on the event loop: frames in, frames (with at most one descriptor each) out."""

import asyncio
import fcntl
import os
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..proto.frames import HELLO_SIZE_BYTES_MAX, Reply, Request
from ..proto.wire import FrameError, FrameReader, decode_request, pack

OUTBOX_FRAMES_MAX = 4096
"""A client that reads nothing is cut off before its unread events fill the daemon's memory."""
OUTBOX_DESCRIPTORS_MAX = 64
"""Nor may its unread answers take all descriptors: an honest client asks for a few at once."""
OUTBOX_BYTES_MAX = 160 * 1024 * 1024
"""Two manifests of the largest size: more is not queued for who reads nothing."""
REQUEST_BYTES_MAX = 16 * 1024 * 1024
"""The ranges of a stream of a million leaves; an answer may be larger."""
FRAME_DEADLINE_S = 30.0
"""From a frame's first byte to its last."""
LARGE_BYTES = 64 * 1024
"""That may wait of one connection whatever waits of others of its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What a connection asks of its owner about a client that may mean harm."""

    report: Callable[[str, str], None]
    """Takes an event and what happened: once for a connection, which is closed then."""
    turn: Callable[[], int]
    """Returns how many frames may be served now, before clients of other users have their turn."""
    pace: Callable[[int], float]
    """Takes how many frames came and returns for how many seconds none is read."""
    rest: Callable[[Callable[[], None]], None]
    """Takes what reads on, which is called when the user has a turn again."""
    rest_no_more: Callable[[Callable[[], None]], None]
    """Takes what is not to be called any more."""
    hold: Callable[[int], bool]
    """Takes by how many bytes what came and waits has grown, and tells whether so much of its user may wait."""


class Connection:
    """Owns the socket. `on_frame` and `on_closed` run on the loop; `on_closed` runs once."""

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Request], None],
        on_closed: Callable[[], None],
        manners: Manners,
        wait_s: float = 0.0,
    ) -> None:
        """`wait_s`: for so long nothing is read."""
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(size_bytes_max=HELLO_SIZE_BYTES_MAX)
        self._outbox: deque[tuple[memoryview, int | None]] = deque()
        self._outbox_bytes = 0
        self._on_frame, self._on_closed, self._manners = on_frame, on_closed, manners
        self._frame_timer: asyncio.TimerHandle | None = None
        self._frame_left_s = FRAME_DEADLINE_S
        self._wait_timer: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        """As it was told."""
        self._closed = self._writing = self._reading = self._unheard = False
        self._is_last = False
        """Nothing more is received."""
        self.is_unread = wait_s > 0
        """Nothing was looked at yet."""
        if self.is_unread:
            self._wait_timer = self._loop.call_later(wait_s, self._read_on)
        else:
            self._read()

    def trust(self) -> None:
        """Allow frames of full size: the peer has said Hello."""
        self._reader.size_bytes_max = REQUEST_BYTES_MAX

    @property
    def held_bytes(self) -> int:
        """Bytes that came and were not served, of frames that have come whole or not."""
        return self._reader.held_bytes

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame; a given descriptor is duplicated, so the caller keeps its own."""
        if self._closed or self._unheard:
            return
        data = memoryview(pack(frame))
        if (
            len(self._outbox) >= OUTBOX_FRAMES_MAX
            or (self._outbox and self._outbox_bytes + len(data) > OUTBOX_BYTES_MAX)
            or (fd is not None and self._waiting_descriptors() >= OUTBOX_DESCRIPTORS_MAX)
        ):
            self._manners.report("peer_not_reading", f"frames={len(self._outbox)}")
            self.close()
            return
        self._outbox.append((data, None if fd is None else os.dup(fd)))
        self._outbox_bytes += len(data)
        self._flush()

    def _waiting_descriptors(self) -> int:
        return sum(fd is not None for _, fd in self._outbox)

    def close(self) -> None:
        """Close the socket and whatever was not sent."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._frame_timer, self._wait_timer):
            if timer is not None:
                timer.cancel()
        self._manners.rest_no_more(self._read_on)
        self._manners.hold(-self._held_bytes)
        self._loop.remove_reader(self._sock.fileno())
        self._stop_sending()
        self._sock.close()
        self._reader.close()
        on_closed = self._on_closed
        # Whoever owns this is owned by these: without the cycle it goes at once, not when garbage is looked for.
        self._on_frame, self._on_closed, self._manners = _ignore_frame, _ignore, _NO_MANNERS
        on_closed()

    def close_when_served(self) -> None:
        """The peer has died: serve what it has sent until now, then close.

        Others may hold the socket's other end, so its end is not waited for.
        """
        if self._closed or self._is_last:
            return
        if self.is_unread:
            self.close()
            return
        self._is_last = True
        try:
            left_bytes = int.from_bytes(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4)), sys.byteorder)
            end_bytes = self._reader.held_bytes + left_bytes
            while self._reader.held_bytes < end_bytes and self._reader.receive(self._sock):
                pass
        except FrameError as error:
            self._refuse(error)
        except OSError:
            self.close()
        else:
            if self._reading:  # else its turn comes
                self._read_on()

    def close_when_sent(self) -> None:
        """Close after the queued frames; used to refuse with a reason."""
        self._flush()
        self.close()

    def _readable(self) -> None:
        if self._may_be_served():
            self._serve(receive=True)
        else:
            self._rest()

    def _may_be_served(self) -> bool:
        return self._manners.turn() > 0 and self._manners.pace(0) <= 0

    def _serve(self, *, receive: bool) -> None:
        """Hand out the next whole frames, of what comes or of what has come."""
        try:
            if receive and not self._reader.receive(self._sock):
                self.close()
                return
            if self._reader.fd_count:
                raise FrameError("clients send no descriptors")
            count, has_turn = self._hand_out()
            if not self._closed:
                self._look_at_rest(count, has_turn=has_turn)
        except BlockingIOError:
            return
        except FrameError as error:
            self._refuse(error)
        except OSError:
            self.close()

    def _refuse(self, error: FrameError) -> None:
        self._manners.report("bad_frame", f"reason={error}")
        self.close()

    def _hand_out(self) -> tuple[int, bool]:
        """Serve the frames of this turn; return how many, and whether more may be served now.

        They are counted whatever ends them, a bad one or the end of the connection: else many short connections would
        be served without any bound.
        """
        pace, count, has_turn = self._manners.pace, 0, True  # a closed connection's manners count nothing
        try:
            while has_turn := count < self._manners.turn():
                body = self._reader.next_body()
                if body is None:
                    break
                count += 1
                self._on_frame(decode_request(body))
                if self._closed:
                    break
        finally:
            if count and pace(count) > 0:
                has_turn = False
        return count, has_turn

    def _look_at_rest(self, count: int, *, has_turn: bool) -> None:
        """After so many whole frames, give what is left a deadline, or rest where they were many."""
        held_bytes = self._reader.held_bytes
        self._stop_frame_clock()
        if count or not held_bytes:
            self._frame_left_s = FRAME_DEADLINE_S
        grown_bytes, self._held_bytes = held_bytes - self._held_bytes, held_bytes
        if not self._manners.hold(grown_bytes) and held_bytes > LARGE_BYTES:
            raise FrameError(f"what this user has sent waits with too many bytes, {held_bytes} of them here")
        if not has_turn:
            self._rest()
        elif self._is_last:
            self.close()
        else:
            self._read()

    def _read(self) -> None:
        """Wait for more."""
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)
        if self._reader.held_bytes and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._frame_left_s, self._frame_late)

    def _rest(self) -> None:
        """Look at what has come later; meanwhile no client is late."""
        self._stop_frame_clock()
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())
        self._manners.rest(self._read_on)

    def _read_on(self) -> None:
        self._wait_timer, self.is_unread = None, False
        if self._may_be_served():
            self._serve(receive=False)
        else:  # other connections of this user have sent meanwhile
            self._rest()

    def _stop_frame_clock(self) -> None:
        if self._frame_timer is not None:
            self._frame_left_s = max(0.0, self._frame_timer.when() - self._loop.time())
            self._frame_timer.cancel()
            self._frame_timer = None

    def _frame_late(self) -> None:
        self._manners.report("bad_frame", f"reason=not whole after {FRAME_DEADLINE_S:.0f} s")
        self.close()

    def _flush(self) -> None:
        try:
            while self._outbox:
                data, fd = self._outbox[0]
                sent = self._send_once(data, fd)
                if fd is not None:
                    os.close(fd)
                self._outbox_bytes -= sent
                if sent < len(data):
                    self._outbox[0] = (data[sent:], None)
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            self._watch_writable()
        except (BrokenPipeError, ConnectionResetError):
            self._unheard = True  # it has left: what it said before is served all the same, up to its end
            self._stop_sending()
        except OSError:
            self.close()
        else:
            self._stop_sending()

    def _stop_sending(self) -> None:
        """Send nothing of what is still queued."""
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())
        for _, fd in self._outbox:
            if fd is not None:
                os.close(fd)
        self._outbox.clear()
        self._outbox_bytes = 0

    def _send_once(self, data: memoryview, fd: int | None) -> int:
        return self._sock.send(data) if fd is None else socket.send_fds(self._sock, [data], [fd])

    def _watch_writable(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._flush)


def _ignore_frame(_: Request) -> None:
    """Nobody wants the frames of a closed connection."""


def _ignore() -> None:
    """It was told once that the connection is closed."""


_NO_MANNERS = Manners(
    report=lambda _event, _text: None,
    turn=lambda: 0,
    pace=lambda _count: 0.0,
    rest=lambda _: None,
    rest_no_more=lambda _: None,
    hold=lambda _: True,
)
"""Of a closed connection."""
