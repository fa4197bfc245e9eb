"""Whole messages with descriptors between a trainer and one worker: a connected pair of SEQPACKET sockets.

The kernel hands over a message as a whole or not at all, so a worker that is killed while it sends leaves no half of
one; what it sent before is still read after its death, then comes the end. One pair per worker, so no lock is shared.
A message is a head (kind, number) and a body; a body above `BODY_INLINE_MAX` travels in a memfd.
"""

import contextlib
import mmap
import os
import socket
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from ...core.errors import NodeError

BODY_INLINE_MAX = 16 << 10
"""Bytes. A socket takes some 200 KiB before its sender waits: a dozen of the largest."""

FDS_MAX = 200
"""Descriptors of a message; the kernel allows 253."""

_HEAD = struct.Struct("<BBq")
_MESSAGE_MAX = _HEAD.size + BODY_INLINE_MAX
_CONTROL_SIZE = socket.CMSG_SPACE(4 * (FDS_MAX + 1))


class Kind(IntEnum):
    """What a message says."""

    PAGE = 1
    TICKET = 2
    SOLO_TICKET = 3
    READY = 4
    MADE = 5
    FAILED_START = 6


@dataclass(frozen=True, slots=True)
class Message:
    """One message as received; whoever takes it closes the descriptors."""

    kind: Kind
    number: int
    body: bytes
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors of a message that nobody wants."""
        close_all(self.fds)


class Ended(Exception):  # noqa: N818  not an error: the other side is gone
    """The other side closed its socket or died."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, kind: Kind, number: int, body: bytes, fds: Iterable[int] = ()) -> None:
    """Send one message; the caller keeps and closes the descriptors.

    Raises:
        Ended: nobody will read it.
        BlockingIOError: the socket does not block and is full; nothing was sent.
    """
    all_fds, body_fd = array("i", fds), -1
    if len(body) > BODY_INLINE_MAX:
        body_fd = memfd(len(body))
        os.pwrite(body_fd, body, 0) if len(body) < (1 << 30) else _write_long(body_fd, body)
        all_fds.append(body_fd)
    try:
        head = _HEAD.pack(kind, body_fd >= 0, number)
        rest = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, all_fds)] if all_fds else []
        sock.sendmsg([head, body if body_fd < 0 else b""], rest)
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise Ended from exc
    finally:
        if body_fd >= 0:
            os.close(body_fd)


def receive(sock: socket.socket) -> Message:
    """Return the next message.

    Raises:
        Ended: there will be none.
        BlockingIOError: the socket does not block and there is none yet.
        NodeError: this process has too many files open to take its descriptors.
    """
    try:
        data, control, flags, _ = sock.recvmsg(_MESSAGE_MAX, _CONTROL_SIZE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as exc:
        raise Ended from exc
    if not data:
        raise Ended
    fds = [fd for _, _, content in control for fd in array("i", content)] if control else []
    if flags & socket.MSG_CTRUNC:
        close_all(fds)
        raise few_descriptors()
    kind, is_apart, number = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if is_apart:
        body_fd = fds.pop()
        try:
            body = _read_whole(body_fd)
        finally:
            os.close(body_fd)
    return Message(Kind(kind), number, body, fds)


def few_descriptors() -> NodeError:
    """Return the error of a trainer that has too many files open to take a batch."""
    return NodeError(
        "too many open files: the descriptors of a batch could not be received",
        hint="raise `ulimit -n`, or keep fewer batches at a time",
    )


def memfd(size_bytes: int) -> int:
    """Return a new memfd of this size; the caller closes it. Unlike /dev/shm it is bounded by memory alone."""
    fd = os.memfd_create("everstep-batch", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


def close_all(fds: Iterable[int]) -> None:
    """Close these descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _write_long(fd: int, body: bytes) -> None:
    with mmap.mmap(fd, len(body)) as area:
        area[:] = body


def _read_whole(fd: int) -> bytes:
    with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ) as area:
        return area[:]
