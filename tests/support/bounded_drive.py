"""Drives of a bounded speed: real engines move real bytes, and take at least as long as such a drive would."""

import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from everstep.checkpoint.engine import Engine, Transfer, TransferDone


class BoundedDrive:
    """One drive, whatever the number of engines that write to it: it serves transfers in the order of their coming."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._guard = threading.Lock()
        self._waiting = deque[threading.Event]()

    def speed(self) -> float:
        """Return what it does now, in bytes per second; a drive that stands still makes its caller wait here."""
        return self.bytes_per_s

    def served(self, transfer: Transfer) -> None:
        """Take note of a transfer that has ended; they come one by one."""

    def run(self, transfer: Transfer, engine: Engine) -> TransferDone:
        """Move the bytes by this engine."""
        began_s = time.perf_counter()
        with self._turn():
            speed = self.speed()
            until_s = time.perf_counter() + transfer.length_bytes / speed
            done = engine.run(transfer)
            threading.Event().wait(max(until_s - time.perf_counter(), 0.0))
            self.served(transfer)
        return TransferDone(bytes_moved=done.bytes_moved, busy_s=time.perf_counter() - began_s)

    @contextmanager
    def _turn(self) -> Generator[None]:
        """Wait for those that came before; a Lock would let in whoever asks at the right moment."""
        mine = threading.Event()
        with self._guard:
            self._waiting.append(mine)
            if self._waiting[0] is mine:
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._guard:
                self._waiting.popleft()
                if self._waiting:
                    self._waiting[0].set()


class BoundedEngine:
    """An engine in front of such a drive."""

    def __init__(self, drive: BoundedDrive, engine: Engine) -> None:
        self.drive = drive
        self.name = engine.name
        self._engine = engine

    def run(self, transfer: Transfer) -> TransferDone:
        """See Engine."""
        return self.drive.run(transfer, self._engine)

    def forget(self, arena_fd: int) -> None:
        """See Engine."""
        self._engine.forget(arena_fd)

    def close(self) -> None:
        """See Engine."""
        self._engine.close()
