"""A job's connection to the daemon, for one thread at a time: frames out, frames in, and the staging."""

import contextlib
import itertools
import mmap
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import DaemonUnavailableError, error_from_code
from ...core.paths import data_socket_path
from ...core.version import VERSION
from ...proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, Failure, Hello, Reply, Request, Role, Welcome
from ...proto.share_frames import SHARE_CARRIES_DESCRIPTOR, PublishShare, ShareStaged, StageShare
from ...proto.starting import start_and_connect
from ...proto.wire import FrameError, FrameReader, decode_reply, pack
from ..tensor_tree import octets_of
from .batch_bytes import BatchBytes

CALL_DEADLINE_S = 10.0

Answer = tuple[Reply, int | None]
"""A frame and the descriptor that came with it, which the receiver closes."""

_links: "weakref.WeakSet[ShareLink]" = weakref.WeakSet()


class ShareLink:
    """Every method may raise DaemonUnavailableError; then the connection is of no use any more."""

    def __init__(self, path: Path) -> None:
        """Connect and say Hello.

        Raises:
            DaemonUnavailableError: nobody answers there.
            VersionMismatchError: the daemon speaks another protocol.
        """
        self._numbers = itertools.count(1)
        self._frames = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
        self._early: deque[Answer] = deque()
        self._staging: mmap.mmap | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(CALL_DEADLINE_S)
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise DaemonUnavailableError(f"no daemon answers on {path}: {error.strerror or error}") from error
        try:
            self.send(Hello(protocol=PROTOCOL, version=VERSION, role=Role.TRAINER))
            self._expect(Welcome, 0)
        except BaseException:
            self._sock.close()
            raise
        _links.add(self)

    def fileno(self) -> int:
        """Return what becomes readable when a frame comes."""
        return self._sock.fileno()

    def number(self) -> int:
        """Return a fresh request id."""
        return next(self._numbers)

    def send(self, frame: Request) -> None:
        """Send a frame."""
        try:
            self._sock.sendall(pack(frame))
        except OSError as error:
            raise DaemonUnavailableError(f"the daemon does not take frames: {error}") from error

    def ask(self, make: Callable[[int], Request]) -> Answer:
        """Return the answer to `make(request_id)`; a Failure is raised as that error. Other frames wait."""
        number = self.number()
        self.send(make(number))
        return self._expect(None, number)

    def frames(self) -> list[Answer]:
        """Return what came, without waiting."""
        found = list(self._early)
        self._early.clear()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while poll.poll(0):
            try:
                found += self._receive()
            except DaemonUnavailableError:
                if not found:
                    raise
                break  # said again by the next call
        return found

    def publish(self, batch: int, prepared: BatchBytes, left_out: Sequence[tuple[int, int, str]] = ()) -> int:
        """Put a batch into the staging and say so; return the number of the request.

        Raises:
            MemoryRefusedError: it is too large to be shared.
        """
        with memoryview(self._staging_of(prepared.size_bytes)) as staging:
            np.copyto(
                np.frombuffer(staging, dtype=np.uint8)[: prepared.size_bytes], octets_of(prepared.octets)
            )
        number = self.number()
        self.send(
            PublishShare(
                request_id=number,
                batch=batch,
                offset_bytes=0,
                size_bytes=prepared.size_bytes,
                xxh3=prepared.xxh3,
                left_out=list(left_out),
            )
        )
        return number

    def close(self) -> None:
        """End the connection. Again is nothing."""
        _links.discard(self)
        for _, fd in self._early:
            if fd is not None:
                os.close(fd)
        self._early.clear()
        self._frames.close()
        self._sock.close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def close_in_child(self) -> None:
        """After a fork: let go of the inherited descriptor without disturbing the parent's connection."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def _staging_of(self, size_bytes: int) -> mmap.mmap:
        if self._staging is None or len(self._staging) < size_bytes:
            reply, fd = self.ask(lambda number: StageShare(request_id=number, size_bytes=size_bytes))
            assert isinstance(reply, ShareStaged), reply
            assert fd is not None
            try:
                staging = mmap.mmap(fd, reply.size_bytes)
            finally:
                os.close(fd)
            if self._staging is not None:
                self._staging.close()
            self._staging = staging
        return self._staging

    def _expect(self, kind: type[Reply] | None, number: int) -> Answer:
        """Return the next frame of a kind, or the answer to a request."""
        while True:
            found: Answer | None = None
            for answer in self._receive():
                is_it = (
                    isinstance(answer[0], kind)
                    if kind is not None
                    else getattr(answer[0], "re", None) == number
                )
                if found is None and (is_it or (kind is not None and isinstance(answer[0], Failure))):
                    found = answer
                else:
                    self._early.append(answer)
            if found is not None:
                if isinstance(found[0], Failure):
                    raise error_from_code(found[0].code, found[0].message, found[0].hint)
                return found

    def _receive(self) -> list[Answer]:
        """Wait for bytes; return the frames that are whole with them."""
        try:
            if not self._frames.receive(self._sock):
                raise DaemonUnavailableError("the daemon closed the connection")
            found: list[Answer] = []
            while (body := self._frames.next_body()) is not None:
                frame = decode_reply(body)
                carries = isinstance(frame, SHARE_CARRIES_DESCRIPTOR)
                found.append((frame, self._frames.take_fd() if carries else None))
        except (OSError, FrameError) as error:
            raise DaemonUnavailableError(f"the connection to the daemon was lost: {error}") from error
        else:
            return found


def connect_or_start() -> ShareLink:
    """Return a connection to the user's daemon, which is started now if none answers.

    Raises:
        DaemonUnavailableError: it could not be started.
    """
    path = data_socket_path()
    try:
        return ShareLink(path)
    except DaemonUnavailableError:
        return start_and_connect(path, lambda: ShareLink(path))


def _close_all_in_child() -> None:
    for link in list(_links):
        link.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
