"""Work in a forked process that answers when it is asked, and can be killed with all of its workers."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

ANSWER_S = 900.0
LOOK_S = 0.5
END_S = 30.0

ended_by: list[int] = []
"""Signals that told this process to end. An exception that a handler raises while the process forks is lost."""

Talk = Callable[[], Any]


class ChildError(Exception):
    """The work failed; its traceback is the message."""


class Child:
    """A process that runs a generator function: each `next()` here is one `yield` there."""

    def __init__(self, connection: "Connection[Any, Any]", pid: int, death: int) -> None:
        self._connection, self.pid = connection, pid
        self._death = death
        """A pidfd: its workers, which inherit its end of the connection, may outlive it."""

    def start(self) -> None:
        """Let it work towards its next value."""
        self._connection.send(None)

    def value(self) -> Any:
        """Return its next value.

        Raises:
            ChildError: it failed, or took too long.
        """
        until_s = time.monotonic() + ANSWER_S
        while not (ready := wait([self._connection, self._death], LOOK_S)) and time.monotonic() < until_s:
            if ended_by:
                raise SystemExit(128 + ended_by[0])
        if not ready:
            raise ChildError(f"process {self.pid} did not answer within {ANSWER_S:g} s")
        if self._connection not in ready:
            raise ChildError(f"process {self.pid} has died")
        try:
            value, error = self._connection.recv()
        except EOFError as ended:
            raise ChildError(f"process {self.pid} has ended") from ended
        if error is not None:
            raise ChildError(error)
        return value

    def next(self) -> Any:
        """Let it work, and return its next value."""
        self.start()
        return self.value()


@contextlib.contextmanager
def child(work: Callable[..., Generator[Any]], *arguments: Any) -> Generator[Child]:
    """Start a process on `work`; it and all that it has started are gone after the block."""
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_run, args=(theirs, ours, work, arguments))
    process.start()
    theirs.close()
    assert process.pid is not None
    with contextlib.suppress(OSError):  # it does so itself, too: whoever is first
        os.setpgid(process.pid, process.pid)
    death = os.pidfd_open(process.pid)
    try:
        yield Child(ours, process.pid, death)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()
        os.close(death)
        _wait_for_group(process.pid)


def _run(
    connection: "Connection[Any, Any]",
    other: "Connection[Any, Any]",
    work: Callable[..., Generator[Any]],
    arguments: tuple[Any, ...],
) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    other.close()
    try:
        values = work(*arguments)
        while True:
            connection.recv()
            connection.send((next(values), None))
    except (EOFError, StopIteration):
        pass
    except BaseException:  # noqa: BLE001  whoever asks raises it
        connection.send((None, traceback.format_exc()))


def _wait_for_group(group: int) -> None:
    """Return when no process of a killed group is left: its workers hold files open until they are gone."""
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


@contextlib.contextmanager
def ended_by_sigterm() -> Generator[None]:
    """Leave all blocks when the process is told to end: drives, groups and processes go with them."""
    owner = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)
        ended_by.append(number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
