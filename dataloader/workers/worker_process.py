"""The trainer's side of one worker: its process, its channel, its page, and how it ended."""

import os
import select
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, cast

from .cargo import Cargo, WorkerJob
from .channel import Ended, Kind, Message, pair, receive, send
from .phase import Phase
from .worker_main import run_worker
from .worker_page import STOP, WorkerPage

CLOSE_DEADLINE_S = 5.0
"""How long workers may take to end their present sample before they are killed; as in torch."""

_ASKED_TO_END = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGPWR, signal.SIGXCPU,
}  # fmt: skip

_trainer_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the trainer's ends in every forked child: held there, workers would not see their trainer die."""
    for each in list(_trainer_ends):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended."""

    code: int | None
    """As `Process.exitcode`: minus the signal's number."""

    @property
    def is_blamed(self) -> bool:
        """Whether what it did may have killed it; not where somebody asked it to end."""
        return self.code is None or -self.code not in _ASKED_TO_END

    def __str__(self) -> str:
        if self.code is not None and self.code < 0:
            return f"was killed by {_signal_name(-self.code)}"
        return f"exited with code {self.code}"


class WorkerProcess:
    """One worker from start to end; not thread safe."""

    def __init__(self, context: BaseContext, job: WorkerJob) -> None:
        """Start the process; UsageError where what it needs cannot be pickled."""
        self.worker = job.worker
        self._backlog: deque[tuple[Kind, int, bytes]] = deque()
        self.sock, theirs = pair()
        page_fd, cargo = WorkerPage.create(), Cargo(job)
        self._page = WorkerPage(page_fd)
        dies_with_parent = threading.current_thread() is threading.main_thread()
        try:
            self.sock.setblocking(False)
            _trainer_ends.add(self.sock)
            # A context has Process by its kind; the base class does not say so.
            self._process: BaseProcess = cast(Any, context).Process(
                target=run_worker,
                args=(theirs, cargo, dies_with_parent),
                name=f"everstep-worker-{job.worker}",
                daemon=True,
            )
            self._process.start()
            send(self.sock, Kind.PAGE, 0, b"", [page_fd])
        except Ended:
            pass  # it is dead already, which the pool will see
        except BaseException:
            self.sock.close()
            self._page.close()
            raise
        finally:
            theirs.close()
            cargo.close()
            os.close(page_fd)
        self.is_over = False
        """Whether it was reaped; then nothing else may be asked of it."""

        self.pid: int = self._process.pid or 0
        self.death_fd = _death_fd(self.pid, self._process.sentinel)

    # -- talking to it -------------------------------------------------------------------------------------------

    def post(self, kind: Kind, number: int, body: bytes) -> None:
        """Send a message, or keep it until the worker has read others. A dead worker's are lost with it."""
        self._backlog.append((kind, number, body))
        self.flush()

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait until the worker has read others."""
        return bool(self._backlog)

    def flush(self) -> None:
        """Send what was kept, as far as there is room."""
        while self._backlog:
            try:
                send(self.sock, *self._backlog[0])
            except BlockingIOError:
                return
            except Ended:
                self._backlog.clear()
                return
            self._backlog.popleft()

    def receive_nowait(self) -> Message | None:
        """Return the next message, or None where there is none yet; Ended after the last of a dead worker."""
        try:
            message = receive(self.sock)
        except BlockingIOError:
            return None
        self.flush()
        return message

    def void_below(self, number: int) -> None:
        """Let the worker skip all tickets below this number."""
        self._page.floor = number
        self._backlog.clear()

    @property
    def at(self) -> tuple[int, int]:
        """What the worker said last: number of the ticket, and place in it or a Phase."""
        return self._page.number, self._page.place

    @property
    def is_starting(self) -> bool:
        """Whether it is not ready yet."""
        return self._page.place == Phase.START

    # -- its end -------------------------------------------------------------------------------------------------

    def bury(self) -> Exit:
        """Reap a dead worker, or one that closed its channel; return how it ended, and let go of everything."""
        if not _wait_for([self.death_fd], 1.0):
            self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._release()
        return Exit(code)

    def ask_to_end(self) -> None:
        """Tell the worker to end before its next sample."""
        self._page.floor = STOP
        self.sock.close()

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()

    def reap(self) -> None:
        """Wait for a worker that ends, and let go of everything."""
        self._process.join()
        self._release()

    def _release(self) -> None:
        self.is_over = True
        self.sock.close()
        self._page.close()
        os.close(self.death_fd)
        self._process.close()


def end_workers(workers: list[WorkerProcess], owner_pid: int, deadline_s: float) -> None:
    """End all workers of a list and empty it: asked first, killed after the deadline. Nothing in a forked child.

    An interrupt (Ctrl-C) while they end is the deadline, and goes on its way when they have ended.
    """
    if os.getpid() != owner_pid:
        return
    ending = [each for each in workers if not each.is_over]
    workers.clear()
    ended = set[int]()
    try:
        for each in ending:
            each.ask_to_end()
        ended = _wait_for([each.death_fd for each in ending], deadline_s)
    finally:
        for each in ending:
            if each.death_fd not in ended:
                each.kill()
            each.reap()


def _wait_for(fds: Iterable[int], deadline_s: float) -> set[int]:
    """Return which of these were readable before the deadline; at once when all are."""
    waiting, ready = set(fds), set[int]()
    end = time.monotonic() + deadline_s
    while waiting:
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        events = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        if not events:
            break
        ready |= {fd for fd, _ in events}
        waiting -= ready
    return ready


def _death_fd(pid: int, sentinel: int) -> int:
    """Return a descriptor that is readable when the process has ended, whoever inherited what from it."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # forbidden in some containers; or reaped by the fork server already
        return os.dup(sentinel)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
