"""One data-socket connection on the event loop: frames in, frames (with at most one descriptor each) out."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from ..proto.frames import FRAME_SIZE_BYTES_MAX, HELLO_SIZE_BYTES_MAX, Reply, Request
from ..proto.wire import FrameError, FrameReader, decode_request, pack

logger = logging.getLogger(__name__)

OUTBOX_FRAMES_MAX = 4096
"""A client that reads nothing is cut off before its unread events fill the daemon's memory."""


class Connection:
    """Owns the socket. `on_frame` and `on_closed` run on the loop; `on_closed` runs once."""

    def __init__(
        self, sock: socket.socket, on_frame: Callable[[Request], None], on_closed: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(size_bytes_max=HELLO_SIZE_BYTES_MAX)
        self._outbox: deque[tuple[memoryview, int | None]] = deque()
        self._on_frame, self._on_closed = on_frame, on_closed
        self._closed = self._writing = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def trust(self) -> None:
        """Allow frames of full size: the peer has said Hello."""
        self._reader.size_bytes_max = FRAME_SIZE_BYTES_MAX

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame; a given descriptor is duplicated, so the caller keeps its own."""
        if self._closed:
            return
        if len(self._outbox) >= OUTBOX_FRAMES_MAX:
            logger.warning("peer_not_reading frames=%d", len(self._outbox))
            self.close()
            return
        self._outbox.append((memoryview(pack(frame)), None if fd is None else os.dup(fd)))
        self._flush()

    def close(self) -> None:
        """Close the socket and whatever was not sent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._reader.close()
        for _, fd in self._outbox:
            if fd is not None:
                os.close(fd)
        self._outbox.clear()
        self._on_closed()

    def close_when_sent(self) -> None:
        """Close after the queued frames; used to refuse with a reason."""
        self._flush()
        self.close()

    def _readable(self) -> None:
        try:
            if not self._reader.receive(self._sock):
                self.close()
                return
            if self._reader.fd_count:
                raise FrameError("clients send no descriptors")
            while not self._closed and (body := self._reader.next_body()) is not None:
                self._on_frame(decode_request(body))
        except BlockingIOError:
            return
        except FrameError as error:
            logger.warning("bad_frame reason=%s", error)
            self.close()
        except OSError:
            self.close()

    def _flush(self) -> None:
        try:
            while self._outbox:
                data, fd = self._outbox[0]
                sent = self._send_once(data, fd)
                if fd is not None:
                    os.close(fd)
                if sent < len(data):
                    self._outbox[0] = (data[sent:], None)
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            self._watch_writable()
        except OSError:
            self.close()
        else:
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._sock.fileno())

    def _send_once(self, data: memoryview, fd: int | None) -> int:
        return self._sock.send(data) if fd is None else socket.send_fds(self._sock, [data], [fd])

    def _watch_writable(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._flush)
