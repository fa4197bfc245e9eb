"""Somebody else on a drive: files that take all room there is, to the last block, and give it back."""

import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_FOLDER = "others"
_LEAST_BYTES = 512
"""Less than a block of any file system; a small ext4 has blocks of 1 KiB."""
_HOLD_MOST_S = 0.05
_FREE_AFTER_S = 120.0


def fill(drive: Path) -> int:
    """Take every free block of a drive, allocated and never written, and return how many bytes that was.

    ext4 gives freed blocks to nobody before its journal has committed: so this goes on until a commit brings no more.
    """
    folder = drive / _FOLDER
    folder.mkdir(exist_ok=True)
    taken_bytes = 0
    while found_bytes := _fill_once(folder):
        taken_bytes += found_bytes
        _commit(folder)
    return taken_bytes


def _fill_once(folder: Path) -> int:
    taken_bytes, size_bytes = 0, 1 << 30
    number = len(list(folder.iterdir()))
    while size_bytes >= _LEAST_BYTES:
        try:
            _allocate(folder / f"{number}", size_bytes)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
            (folder / f"{number}").unlink(missing_ok=True)
            size_bytes //= 2
            continue
        taken_bytes += size_bytes
        number += 1
    return taken_bytes


def _commit(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def empty(drive: Path) -> None:
    """Give it all back, and return when it is there: XFS frees the blocks of removed files a little later."""
    free_bytes = _free_bytes(drive)
    wanted_bytes = free_bytes + _remove_all(drive) * 9 // 10  # the rest went into metadata, perhaps
    deadline_s = time.monotonic() + _FREE_AFTER_S
    while _free_bytes(drive) < wanted_bytes:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{drive} has not got its room back after {_FREE_AFTER_S:.0f} s")
        time.sleep(0.001)


def _free_bytes(drive: Path) -> int:
    """Return what is free with what only root may have, which goes first and comes back last."""
    found = os.statvfs(drive)
    return found.f_bfree * found.f_frsize


def _remove_all(drive: Path) -> int:
    """Remove the files, and return how many bytes they had."""
    folder, size_bytes = drive / _FOLDER, 0
    for path in folder.iterdir() if folder.is_dir() else ():
        size_bytes += path.stat().st_blocks * 512
        path.unlink()
    return size_bytes


def _allocate(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    finally:
        os.close(fd)


class Filler:
    """Fills drives and empties them, in a thread, at moments that nobody else knows; with the block they are empty."""

    def __init__(self, drives: Sequence[Path], source: random.Random) -> None:
        self.fill_count = 0
        self._drives, self._random = drives, source
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Filler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for drive in self._drives:
            empty(drive)

    def _run(self) -> None:
        while not self._ends.wait(self._random.uniform(0, _HOLD_MOST_S)):
            drive = self._random.choice(self._drives)
            if self._random.random() < 0.6:
                self.fill_count += fill(drive) > 0
            else:
                _remove_all(drive)
