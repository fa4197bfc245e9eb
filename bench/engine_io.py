"""What the measurements of engines share: an arena full of bytes, and one timed write of it to a new file."""

import mmap
import os
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.engine import Engine, Transfer, TransferKind
from everstep.checkpoint.linux import fallocate, seal_size

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One write with its fdatasync."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """Of this process, all threads; what the kernel's own threads spend is in no engine's figure."""


@contextmanager
def arena(size_bytes: int) -> Generator[int]:
    """A memfd as the daemon makes them: every page touched, its size sealed."""
    fd = os.memfd_create("everstep-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        seal_size(fd)
        with mmap.mmap(fd, size_bytes) as content:
            block = os.urandom(MIB)
            for begin in range(0, size_bytes, MIB):
                content[begin : begin + MIB] = block
        yield fd
    finally:
        os.close(fd)


def write_new_file(engine: Engine, arena_fd: int, path: Path, size_bytes: int) -> Sample:
    """Write the arena to a new file whose blocks are reserved, as a segment's are, and remove it again."""
    file_fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        fallocate(file_fd, size_bytes)
        os.fsync(file_fd)
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        engine.run(
            Transfer(
                kind=TransferKind.WRITE,
                arena_fd=arena_fd,
                arena_offset_bytes=0,
                file_fd=file_fd,
                file_offset_bytes=0,
                length_bytes=size_bytes,
            )
        )
        os.fdatasync(file_fd)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
    finally:
        os.close(file_fd)
        path.unlink()
    return Sample(bytes_per_s=size_bytes / wall_s, cpu_s_per_gb=cpu_s / (size_bytes / 1e9))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (low, median, high)."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high
