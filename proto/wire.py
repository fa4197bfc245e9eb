"""Framing of the data socket: 4-byte little-endian length, then msgpack; descriptors ride on a frame's first byte."""

import array
import contextlib
import socket
import struct
from collections import deque
from typing import Final

import msgspec

from ..core.errors import DaemonUnavailableError, error_from_code
from .frames import FRAME_SIZE_BYTES_MAX, Failure, Hello, Reply, Request, Welcome

_LENGTH: Final = struct.Struct("<I")
_FDS_MAX: Final = 4
_CHUNK_BYTES: Final = 256 * 1024

_encoder = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)


class FrameError(Exception):
    """The peer sent something that is no frame; the connection must be closed."""


def pack(frame: Request | Reply) -> bytes:
    """Return the bytes of one frame."""
    body = _encoder.encode(frame)
    if len(body) > FRAME_SIZE_BYTES_MAX:
        raise FrameError(
            f"a {type(frame).__name__} frame of {len(body)} bytes is above {FRAME_SIZE_BYTES_MAX}"
        )
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects bytes and descriptors of one stream, hands out whole frames. Owns descriptors until they are taken."""

    def __init__(self, *, size_bytes_max: int) -> None:
        self.size_bytes_max = size_bytes_max
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive(self, sock: socket.socket) -> bool:
        """Read what is there; False at the end of the stream. Raises BlockingIOError like the socket."""
        ancillary = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
        data, items, flags, _ = sock.recvmsg(_CHUNK_BYTES, ancillary, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in items:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise FrameError("more descriptors than a frame may carry")
        self._buffer += data
        return bool(data)

    def next_body(self) -> bytes | None:
        """Return the next frame's bytes, or None when it has not arrived whole."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > self.size_bytes_max:
            raise FrameError(f"a frame of {size} bytes is above {self.size_bytes_max}")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def take_fd(self) -> int:
        """Return the oldest descriptor received; the caller closes it."""
        if not self._fds:
            raise FrameError("a descriptor was announced but did not come")
        return self._fds.popleft()

    @property
    def held_bytes(self) -> int:
        """Bytes received of frames that were not handed out."""
        return len(self._buffer)

    @property
    def fd_count(self) -> int:
        """Descriptors received and not yet taken."""
        return len(self._fds)

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self._fds:
            socket.close(self._fds.popleft())


def decode_request(body: bytes) -> Request:
    """Return a client's frame; FrameError when it is none."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(str(error)) from error


def decode_reply(body: bytes) -> Reply:
    """Return the daemon's frame; DaemonUnavailableError when it is none."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DaemonUnavailableError(f"the daemon sent a frame that cannot be read: {error}") from error


def greet(sock: socket.socket, reader: FrameReader, hello: Hello) -> Welcome:
    """Say Hello to a daemon and return its Welcome.

    Raises:
        EverstepError: the daemon's own reason where it refuses.
        DaemonUnavailableError: it says something else, or nothing.
        FrameError: it is no daemon.
        OSError: as of the socket.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused already: why waits to be read
        sock.sendall(pack(hello))
    while (body := reader.next_body()) is None:
        if not reader.receive(sock):
            raise DaemonUnavailableError("the daemon did not answer Hello: it closed the connection")
    reply = decode_reply(body)
    if isinstance(reply, Failure):
        raise error_from_code(reply.code, reply.message, reply.hint)
    if not isinstance(reply, Welcome):
        raise DaemonUnavailableError(f"the daemon answered Hello with {type(reply).__name__}")
    return reply
