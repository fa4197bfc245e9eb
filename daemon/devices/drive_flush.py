"""What a flush of a directory's drive does: its write cache by the kernel's word, and how long an fsync takes.

A drive with a volatile cache must empty it at each fsync. One that answers at once has a capacitor or a battery, or
loses what it acknowledged.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from .flush_plan import UNKNOWN

_FSYNC_COUNT = 3


@dataclass(frozen=True, slots=True)
class DriveFlush:
    """Of one directory."""

    write_cache: str
    """`write back` (volatile), `write through`, or `unknown`: memory, a network, a loop device's file."""
    fsync_s: float | None
    """The shortest of a few, of 4 KiB; None where no file without a name can be made."""


def look_at_flush(directory: Path) -> DriveFlush:
    """Return what is found out about a directory; it leaves nothing there."""
    return DriveFlush(_write_cache(directory.stat().st_dev), _fsync_s(directory))


def _write_cache(file_system_id: int) -> str:
    """Return the kernel's word for the drive; of a partition that of its disk."""
    device = Path(f"/sys/dev/block/{os.major(file_system_id)}:{os.minor(file_system_id)}")
    with contextlib.suppress(OSError):
        device = device.resolve(strict=True)
        for place in (device, device.parent):
            with contextlib.suppress(FileNotFoundError):
                return (place / "queue" / "write_cache").read_text().strip()
    return UNKNOWN


def _fsync_s(directory: Path) -> float | None:
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return min(_timed_fsync_s(fd, number) for number in range(_FSYNC_COUNT))
    except OSError:  # full, for example, which others say
        return None
    finally:
        os.close(fd)


def _timed_fsync_s(fd: int, number: int) -> float:
    os.pwrite(fd, bytes([number]) * 4096, number * 4096)
    began_s = time.perf_counter()
    os.fsync(fd)
    return time.perf_counter() - began_s
