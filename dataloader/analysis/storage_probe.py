"""How fast storage is beside training: files that left memory are read by one thread, by several, and with pauses."""

# ruff: noqa: PTH116 - strings: between timed reads

import os
import statistics
import threading
import time
from collections.abc import Sequence

from .calibration_plan import Probe
from .page_cache import drop_open

READERS = 16
SECONDS = 1.0
BYTES_MAX = 512 * 1024 * 1024
PIECE = 1024 * 1024
PIECES_MAX = 4096
PACED_READS = 32
PACED_SHARE = 0.2
"""Of the bandwidth, that reads with pauses use."""


def probe_storage(paths: Sequence[str], *, sample_bytes: float, seconds: float = SECONDS) -> Probe | None:
    """Return what storage does for reads of a sample's size; None where there is too little to read.

    A few places are read by one thread with pauses; half of the rest by one thread, one after the other, and the other
    half by READERS threads at once.
    """
    size = max(4096, min(PIECE, int(sample_bytes)))
    places = _places(paths, size)
    few = min(PACED_READS, len(places) // 4)
    paced, places = places[:few], places[few:]
    half = len(places) // 2
    if half < 2:
        return None
    for path in dict.fromkeys(path for path, _ in [*paced, *places]):
        _drop(path)
    alone = _read_all(places[:half:1], size, readers=1, seconds=seconds)
    many = _read_all(places[half:], size, readers=READERS, seconds=seconds)
    if not alone.count or not many.size_bytes:
        return None
    scale = max(1.0, sample_bytes / size)
    bytes_per_s = many.size_bytes / many.elapsed_s
    return Probe(
        read_s=scale * alone.elapsed_s / alone.count,
        bytes_per_s=bytes_per_s,
        paced_s=_read_paced(paced, size, pause_s=size / bytes_per_s / PACED_SHARE, scale=scale),
    )


class _Reads:
    """What some threads have read."""

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0
        self.elapsed_s = 1e-9


def _places(paths: Sequence[str], size: int) -> list[tuple[str, int]]:
    """Return (file, offset) of reads that are spread over the files, at most BYTES_MAX in all."""
    found: list[tuple[str, int]] = []
    for path in paths:
        try:
            length = os.stat(path).st_size
        except OSError:
            continue
        count = min(length // size, 64) or int(length > 0)
        found += [(path, number * (length // count) // 4096 * 4096) for number in range(count)]
    most = max(4, min(PIECES_MAX, BYTES_MAX // size))
    step = max(1, len(found) // most)
    # Neighbours in a file go to the same half, or read-ahead of the one would serve the other.
    return found[::step][:most]


def _read_all(places: Sequence[tuple[str, int]], size: int, *, readers: int, seconds: float) -> _Reads:
    reads, lock = _Reads(), threading.Lock()
    waiting = iter(places)
    begun_s = time.perf_counter()

    def work() -> None:
        while time.perf_counter() - begun_s < seconds:
            with lock:
                place = next(waiting, None)
            if place is None:
                return
            length = _read(*place, size)
            with lock:
                reads.count += length > 0
                reads.size_bytes += length

    threads = [threading.Thread(target=work) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reads.elapsed_s = max(1e-9, time.perf_counter() - begun_s)
    return reads


def _read_paced(
    places: Sequence[tuple[str, int]], size: int, *, pause_s: float, scale: float
) -> float | None:
    """Return the median seconds of a read after a pause, or None."""
    times: list[float] = []
    until_s = time.perf_counter() + SECONDS
    for path, offset in places:
        time.sleep(pause_s)
        begun_s = time.perf_counter()
        if _read(path, offset, size):
            times.append(scale * (time.perf_counter() - begun_s))
        if begun_s > until_s:
            break
    return statistics.median(times) if times else None


def _read(path: str, offset: int, size: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_RANDOM)
        return len(os.pread(fd, size, offset))
    except OSError:
        return 0
    finally:
        os.close(fd)


def _drop(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        drop_open(fd)
    finally:
        os.close(fd)
