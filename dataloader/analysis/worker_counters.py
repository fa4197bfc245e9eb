"""Numbers that workers write and the training process reads: a row of doubles for each worker in one memfd.

Nothing is sent and nothing is locked: each row has one writer. Workers find the memfd below /proc of the process that
made it, whether they were forked or spawned, and nothing is left behind, whoever is killed.
"""

import contextlib
import mmap
import os
import weakref
from dataclasses import dataclass

ROWS = 256
FIELDS = ("batches", "samples", "busy_s", "fetch_s", "queued_s", "cpu_s", "file_bytes", "storage_bytes")
_ROW = len(FIELDS)
_SIZE_BYTES = ROWS * _ROW * 8


@dataclass(frozen=True, slots=True)
class WorkTotals:
    """Sums over all workers of one loader since it was first iterated."""

    batches: float = 0.0
    samples: float = 0.0
    busy_s: float = 0.0
    fetch_s: float = 0.0
    queued_s: float = 0.0
    cpu_s: float = 0.0
    file_bytes: float = 0.0
    """Read by calls, from wherever: memory or storage."""
    storage_bytes: float = 0.0
    """Of it, and of mapped files, what storage had to deliver."""

    def plus(self, other: "WorkTotals", factor: float = 1.0) -> "WorkTotals":
        """Return the sums with `factor` times the others added."""
        return WorkTotals(*(getattr(self, name) + factor * getattr(other, name) for name in FIELDS))


class Counters:
    """The rows of one loader's workers, in the process that made them."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("everstep-work", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _SIZE_BYTES)
        self._map = mmap.mmap(self._fd, _SIZE_BYTES)
        self._rows = memoryview(self._map).cast("d")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._finalizer = weakref.finalize(self, _close, self._fd, self._rows, self._map)

    def row(self, worker: int) -> "memoryview[float]":
        """Return a worker's row, in this process."""
        return _row(self._rows, worker)

    def totals(self) -> WorkTotals:
        """Return the sums of all rows: of each row as far as its worker is."""
        rows = self._rows.tolist()
        return WorkTotals(*(sum(rows[field::_ROW]) for field in range(_ROW)))

    def close(self) -> None:
        """Let the memory go, once the workers that write there have."""
        self._finalizer()


def open_row(path: str, worker: int) -> "memoryview[float] | None":
    """Return a worker's row, in the worker; None where the training process' descriptors are out of reach."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _row(memoryview(mmap.mmap(fd, _SIZE_BYTES)).cast("d"), worker)
    finally:
        os.close(fd)


def _row(rows: "memoryview[float]", worker: int) -> "memoryview[float]":
    place = worker % ROWS
    return rows[place * _ROW : (place + 1) * _ROW]


def _close(fd: int, rows: "memoryview[float]", mapped: mmap.mmap) -> None:
    rows.release()
    with contextlib.suppress(BufferError):  # a row of this process is still held; its memory goes with it
        mapped.close()
    os.close(fd)
