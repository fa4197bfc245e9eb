"""An engine whose work is done in a process of its own, out of reach of the daemon's GIL.

One socket pair (SOCK_SEQPACKET: a message arrives whole, with its fds) connects the two. Messages are small
msgpack unions; the file's fd travels with each transfer, an arena's fd once. The process ends when its end of
the socket closes, so it never outlives the daemon, and ignores the signals by which a terminal or a service
manager stops the daemon, which still has snapshots to drain then.

A pipe says when it is quiet: the process holds its only writing end, and so does its io_uring. That a process has
been reaped means the end of its kernel AIO but not of its io_uring [tried: 3.6 s later on a slow drive, ADR 0018];
that nobody holds the pipe any more means the end of both.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from typing import NoReturn

import msgspec

from ..core.errors import DeadlineError, EngineLostError, StorageError
from .arena_map import ARENA_MAPS_MAX
from .engine import Engine, EngineConfig, EngineKind, Transfer, TransferDone, TransferKind
from .engine_kinds import make_engine

_log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 60.0
"""Without any progress for so long the process is ended. The kernel gives a drive 30 s and tries again."""

END_TIMEOUT_S = 5.0
"""How long the process may take to end, first when asked, then when killed."""

_START_TIMEOUT_S = 30.0
_PROGRESS_PERIOD_S = 0.1
_MESSAGE_BYTES_MAX = 8192


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is started for: a command line argument."""

    kind: EngineKind
    config: EngineConfig
    held_fd: int
    """Writing end of the pipe that says when all is quiet."""


class _Run(msgspec.Struct, frozen=True, tag=True):
    """Do a transfer. Carries the file's fd, then the arena's if `arena_follows`."""

    kind: TransferKind
    arena: int
    arena_follows: bool
    arena_offset_bytes: int
    file_offset_bytes: int
    length_bytes: int


class _Forget(msgspec.Struct, frozen=True, tag=True):
    """Let go of an arena; not answered."""

    arena: int


class _Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is made."""


class _Moved(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of the running transfer."""

    bytes_moved: int


class _Done(msgspec.Struct, frozen=True, tag=True):
    bytes_moved: int
    busy_s: float


class _Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine raised OSError, or ValueError where errno is None."""

    errno: int | None
    message: str


_Request = _Run | _Forget
_Reply = _Ready | _Moved | _Done | _Failed

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[_Request] = msgspec.msgpack.Decoder(_Request)
_replies: msgspec.msgpack.Decoder[_Reply] = msgspec.msgpack.Decoder(_Reply)
_tasks = msgspec.json.Decoder(_Task)


class ProcessEngine:
    """An `Engine` that hands its work to a spawned process; making one waits until the process is ready.

    The process holds the arenas' memory alive until `forget`, `close` or the end of this process.

    Raises:
        OSError: the engine could not be made there (see `AioContext`).
        StorageError: the process did not start.
    """

    def __init__(
        self,
        kind: EngineKind,
        config: EngineConfig | None = None,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self.name = f"{kind.value} in a process"
        self._end_timeout_s = end_timeout_s
        self._arenas: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._arenas_sent_count = 0
        self._broken = ""
        self._channel, self._quiet_fd, self._process = _spawn(kind, config or EngineConfig())
        try:
            self._channel.settimeout(_START_TIMEOUT_S)
            self._await_ready()
        except BaseException:
            self.close()
            raise
        self._channel.settimeout(stall_timeout_s)

    @property
    def pid(self) -> int:
        """Of the process that does the work."""
        return self._process.pid

    def run(self, transfer: Transfer) -> TransferDone:
        """Move every byte, see `Engine.run`."""
        if self._broken:
            error = EngineLostError if self._is_over() else StorageError
            raise error(f"the I/O process {self.pid} {self._broken}", hint="make a new engine")
        self._send_transfer(transfer)
        while True:
            match self._receive():
                case _Moved():
                    continue
                case _Done() as done:
                    return TransferDone(bytes_moved=done.bytes_moved, busy_s=done.busy_s)
                case _Failed() as failed:
                    _raise_failed(failed)
                case _Ready():
                    self._give_up("answered out of turn")

    def forget(self, arena_fd: int) -> None:
        """Have the process unmap and close the arena."""
        stat = os.fstat(arena_fd)
        arena = self._arenas.pop((stat.st_dev, stat.st_ino), None)
        if arena is not None and not self._broken:
            self._send(_Forget(arena), [])

    def close(self) -> None:
        """End the process and reap it; one that does not end in time is killed.

        Where even that takes too long the log says so, and a later call tries again.
        """
        self._broken = self._broken or "was closed"
        self._channel.close()
        self._arenas.clear()
        if self._quiet_fd < 0:
            return
        if not self._ended():
            self._process.kill()
            if not self._ended():
                _log.error("engine_process_stuck pid=%d waited_s=%.0f", self.pid, 2 * self._end_timeout_s)
                return
        os.close(self._quiet_fd)
        self._quiet_fd = -1

    def _await_ready(self) -> None:
        match self._receive():
            case _Ready():
                return
            case _Failed() as failed:
                _raise_failed(failed)
            case _Moved() | _Done():
                self._give_up("answered out of turn")

    def _send_transfer(self, transfer: Transfer) -> None:
        stat = os.fstat(transfer.arena_fd)
        key = (stat.st_dev, stat.st_ino)
        known = self._arenas.get(key)
        arena = self._arenas_sent_count if known is None else known
        request = _Run(
            kind=transfer.kind,
            arena=arena,
            arena_follows=known is None,
            arena_offset_bytes=transfer.arena_offset_bytes,
            file_offset_bytes=transfer.file_offset_bytes,
            length_bytes=transfer.length_bytes,
        )
        self._send(
            request, [transfer.file_fd] if known is not None else [transfer.file_fd, transfer.arena_fd]
        )
        self._remember(key, arena)

    def _remember(self, key: tuple[int, int], arena: int) -> None:
        if key not in self._arenas:
            self._arenas_sent_count += 1
        self._arenas[key] = arena
        self._arenas.move_to_end(key)
        if len(self._arenas) > ARENA_MAPS_MAX:
            _, oldest = self._arenas.popitem(last=False)
            self._send(_Forget(oldest), [])

    def _send(self, request: _Request, fds: list[int]) -> None:
        try:
            socket.send_fds(self._channel, [_encode(request)], fds)
        except (ConnectionError, TimeoutError) as exc:
            self._give_up("ended", exc, error=EngineLostError)

    def _receive(self) -> _Reply:
        try:
            message = self._channel.recv(_MESSAGE_BYTES_MAX)
        except TimeoutError as exc:
            self._give_up(f"made no progress for {self._channel.gettimeout()} s", exc)
        except ConnectionError as exc:
            self._give_up("ended", exc, error=EngineLostError)
        if not message:
            self._give_up("ended", error=EngineLostError)
        return _replies.decode(message)

    def _give_up(
        self, what: str, cause: Exception | None = None, *, error: type[StorageError] = StorageError
    ) -> NoReturn:
        """Kill the process, wait until nothing touches arena and file any more, and raise."""
        self._broken = what
        self._process.kill()
        if not self._ended():
            raise DeadlineError(
                f"the I/O process {self.pid} {what} and does not end: its device hangs in the kernel",
                hint="do not use this range of the arena again; look at the kernel log; the node may need a reboot",
            ) from cause
        raise error(
            f"the I/O process {self.pid} {what} (exit status {self._process.returncode})",
            hint="the transfer is lost; make a new engine and look for the reason in the daemon's log",
        ) from cause

    def _is_over(self) -> bool:
        """Tell whether the process has ended, and its last request."""
        return self._process.poll() is not None and (self._quiet_fd < 0 or _is_quiet(self._quiet_fd, 0.0))

    def _ended(self) -> bool:
        """Wait for the process, then for its last request; tell whether both ended in time."""
        deadline_s = time.monotonic() + self._end_timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._end_timeout_s)
        return self._process.returncode is not None and _is_quiet(
            self._quiet_fd, max(0.0, deadline_s - time.monotonic())
        )


def _is_quiet(quiet_fd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(quiet_fd, 0)  # POLLHUP is always told
    return bool(poller.poll(timeout_s * 1000))


def _spawn(kind: EngineKind, config: EngineConfig) -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    quiet_fd, held_fd = os.pipe()
    task = _Task(kind=kind, held_fd=held_fd, config=config)
    try:
        with theirs:
            process = subprocess.Popen(
                # -P: `/`, where it runs, must not be a place to import from.
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), msgspec.json.encode(task)],
                pass_fds=[theirs.fileno(), held_fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
            )
    except BaseException:
        ours.close()
        os.close(quiet_fd)
        raise
    finally:
        os.close(held_fd)
    return ours, quiet_fd, process


def _raise_failed(failed: _Failed) -> NoReturn:
    if failed.errno is None:
        raise ValueError(failed.message)
    raise OSError(failed.errno, failed.message)


class _Worker:
    """The process's side: one engine, the arenas' fds, one transfer after the other."""

    def __init__(self, channel: socket.socket, task: _Task) -> None:
        self._channel = channel
        self._arena_fds: dict[int, int] = {}
        self._progress_due_s = 0.0
        self._engine: Engine = make_engine(
            task.kind, task.config, on_progress=self._report, held_fd=task.held_fd
        )

    def serve(self) -> None:
        """Work until the other end closes."""
        self._send(_Ready())
        while True:
            message, fds, flags, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES_MAX, 2)
            if not message:
                return
            assert not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
            match _requests.decode(message):
                case _Run() as request:
                    self._send(self._run(request, fds))
                case _Forget(arena):
                    self._forget(arena)

    def _run(self, request: _Run, fds: list[int]) -> _Reply:
        file_fd = fds[0]
        if request.arena_follows:
            self._arena_fds[request.arena] = fds[1]
        try:
            done = self._engine.run(
                Transfer(
                    kind=request.kind,
                    arena_fd=self._arena_fds[request.arena],
                    arena_offset_bytes=request.arena_offset_bytes,
                    file_fd=file_fd,
                    file_offset_bytes=request.file_offset_bytes,
                    length_bytes=request.length_bytes,
                )
            )
        except OSError as exc:
            return _Failed(exc.errno or 0, exc.strerror or str(exc))
        except ValueError as exc:
            return _Failed(None, str(exc))
        finally:
            os.close(file_fd)
        return _Done(done.bytes_moved, done.busy_s)

    def _forget(self, arena: int) -> None:
        arena_fd = self._arena_fds.pop(arena)
        self._engine.forget(arena_fd)
        os.close(arena_fd)

    def _report(self, bytes_moved: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._progress_due_s:
            self._progress_due_s = now_s + _PROGRESS_PERIOD_S
            self._send(_Moved(bytes_moved))

    def _send(self, reply: _Reply) -> None:
        self._channel.sendall(_encode(reply))


def main(arguments: list[str]) -> None:
    """Serve the socket whose fd is the first argument, as the second says, until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel_fd, task = int(arguments[0]), _tasks.decode(arguments[1])
    with socket.socket(fileno=channel_fd) as channel, contextlib.suppress(ConnectionError):
        try:
            worker = _Worker(channel, task)
        except OSError as exc:
            channel.sendall(_encode(_Failed(exc.errno or 0, exc.strerror or str(exc))))
            return
        worker.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
