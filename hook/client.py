"""The trainer's end of the data socket: requests with deadlines, events by callback, descriptors with replies.

A reader thread receives; any thread may send. Nothing here survives a fork: children close what they inherited.
"""

import contextlib
import itertools
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from ..core.errors import DaemonUnavailableError, DeadlineError, EverstepError, error_from_code
from ..proto import frames
from ..proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, Reply, Request, Role
from ..proto.wire import FrameError, FrameReader, decode_reply, greet, pack

CONNECT_DEADLINE_S = 10.0
REQUEST_DEADLINE_S = 60.0
SEND_DEADLINE_S = 10.0
_INTERRUPTED = "a frame to the daemon was interrupted while it was sent"

Answer = tuple[Reply, int | None]
"""A reply and the descriptor that came with it; the caller closes the descriptor."""

CARRY_DESCRIPTOR = frames.ArenaReady | frames.Fetched | frames.Streaming | frames.SegmentOpened

_open_clients: "weakref.WeakSet[DaemonClient]" = weakref.WeakSet()


class DaemonClient:
    """One connection to a daemon. `on_event` gets frames that answer no request, on the reader thread."""

    def __init__(self, path: Path, role: Role, version: str, on_event: Callable[[Reply], None]) -> None:
        """Connect and say Hello.

        Raises:
            DaemonUnavailableError: nobody answers on `path`.
            VersionMismatchError: the daemon speaks another protocol.
        """
        self._sock = _connect(path)
        self._on_event = on_event
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._broken: EverstepError | None = None
        self._frames = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
        try:
            self.welcome = self._greet(role, version)
        except BaseException:
            self._sock.close()
            raise
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_DEADLINE_S))
        self._thread = threading.Thread(target=self._read_loop, name="everstep-reader", daemon=True)
        self._thread.start()
        _open_clients.add(self)

    @property
    def broken(self) -> EverstepError | None:
        """Return why the connection is of no use any more, or None."""
        return self._broken

    def send(self, frame: Request) -> None:
        """Send a frame that is not answered; DaemonUnavailableError when the daemon is gone.

        Whoever is interrupted here (Ctrl-C) does not know what is out, perhaps half a frame: that ends the connection.
        """
        data = pack(frame)
        try:
            with self._lock:
                if self._broken is not None:
                    raise self._broken
                self._send_all(data)
        except EverstepError:
            raise
        except BaseException:
            self.break_off(_INTERRUPTED)
            raise

    def tell(self, frame: Request) -> bool:
        """Send what needs no answer; False when the daemon is gone."""
        try:
            self.send(frame)
        except EverstepError:
            return False
        return True

    def _send_all(self, data: bytes) -> None:
        """Under the lock, whatever happens: behind half a frame nobody else may send."""
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise self.break_off(f"the daemon does not take frames: {error}") from error
        except BaseException:
            self.break_off(_INTERRUPTED)
            raise

    def break_off(self, why: str) -> EverstepError:
        """Let the reader end, who fails what is pending; return why the connection is of no use any more."""
        self._broken = self._broken or DaemonUnavailableError(why)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        return self._broken

    def ask(self, make: Callable[[int], Request]) -> "Future[Answer]":
        """Send `make(request_id)` and return the future of its answer; a Failure becomes that error."""
        number = next(self._numbers)
        future: Future[Answer] = Future()
        self._pending[number] = future
        try:
            self.send(make(number))
        except BaseException:
            self._pending.pop(number, None)
            future.add_done_callback(close_descriptor)  # the answer may have come before the interrupt
            raise
        if self._broken is not None:  # broke between send and now: nobody will answer
            self._fail_pending(self._broken)
        return future

    def request(self, make: Callable[[int], Request], deadline_s: float = REQUEST_DEADLINE_S) -> Answer:
        """Return the answer to `make(request_id)`; DeadlineError when it does not come in time."""
        try:
            return self.ask(make).result(deadline_s)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"the daemon (pid {self.welcome.pid}) did not answer within {deadline_s:.0f} s",
                hint="look at its log, beside its socket",
            ) from error

    def close(self) -> None:
        """End the connection and the reader thread. Again is nothing."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()
        _open_clients.discard(self)

    def close_in_child(self) -> None:
        """After a fork: let go of the inherited descriptor without disturbing the parent's connection."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())
        self._broken = DaemonUnavailableError(
            "this is a forked child; only the process that attached may checkpoint"
        )

    # -- reading

    def _greet(self, role: Role, version: str) -> frames.Welcome:
        try:
            hello = frames.Hello(protocol=PROTOCOL, version=version, role=role)
            return greet(self._sock, self._frames, hello)
        except (OSError, FrameError) as error:
            raise DaemonUnavailableError(f"the daemon did not answer Hello: {error}") from error

    def _next_frame(self) -> Reply:
        while (body := self._frames.next_body()) is None:
            if not self._frames.receive(self._sock):
                raise DaemonUnavailableError("the daemon closed the connection")
        return decode_reply(body)

    def _read_loop(self) -> None:
        try:
            while True:
                self._deliver(self._next_frame())
        except (OSError, FrameError) as error:
            self._break(DaemonUnavailableError(f"the connection to the daemon was lost: {error}"))
        except EverstepError as error:
            self._break(error)
        finally:
            self._frames.close()

    def _deliver(self, frame: Reply) -> None:
        # First what can fail: a request that is no longer pending would never be answered.
        fd = self._frames.take_fd() if isinstance(frame, CARRY_DESCRIPTOR) else None
        future = self._pending.pop(getattr(frame, "re", 0), None)
        if future is None:
            if fd is not None:
                os.close(fd)
            self._on_event(frame)
        elif isinstance(frame, frames.Failure):
            future.set_exception(error_from_code(frame.code, frame.message, frame.hint))
        else:
            future.set_result((frame, fd))

    def _break(self, error: EverstepError) -> None:
        with self._lock:
            self._broken = self._broken or error
        self._fail_pending(error)

    def _fail_pending(self, error: EverstepError) -> None:
        while self._pending:
            with contextlib.suppress(KeyError):
                _, future = self._pending.popitem()
                future.set_exception(error)


def close_descriptor(asked: "Future[Answer]") -> None:
    """Nobody wants an answer: close what comes with it, or has come."""
    if asked.exception() is None and (fd := asked.result()[1]) is not None:
        os.close(fd)


def _timeval(seconds: float) -> bytes:
    """Return a struct timeval."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_DEADLINE_S)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DaemonUnavailableError(f"no daemon answers on {path}: {error.strerror or error}") from error
    return sock


def _close_all_in_child() -> None:
    for client in list(_open_clients):
        client.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
