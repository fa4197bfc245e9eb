"""Writes a page to each device and makes it durable: a drive that died while nobody wrote is found before a job is.

The file has no name (O_TMPFILE), so that nothing is left of it, whatever ends the daemon.
"""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

from ...checkpoint.device import DISK_ID_NAME

DEADLINE_S = 10.0
"""A launcher waits 60 s (nvidia-resiliency-ext 0.7), and drives answer in milliseconds."""
FRESH_S = 1.0
"""Launchers that ask at the same time, one for each job, share one write."""
PAGE = bytes(4096)
_NO_SUCH_FILES = (errno.EOPNOTSUPP, errno.EISDIR)
"""What open(2) answers where a file system has no files without a name."""


def write_page(directory: str) -> None:
    """Return when a page was written there and made durable; OSError when it could not be.

    FileNotFoundError: the device is not there, though its mount point may be. Where a file system knows no files
    without a name nothing is written.
    """
    os.stat(f"{directory}/{DISK_ID_NAME}")  # noqa: PTH116
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_SUCH_FILES:
            raise
        return
    try:
        os.write(fd, PAGE)
        os.fdatasync(fd)
    finally:
        os.close(fd)


class DeviceProbe:
    """One write under way on each device at most, in a thread that the daemon's end does not wait for.

    Owned by the event loop.
    """

    def __init__(self, write: Callable[[str], None] = write_page, *, deadline_s: float = DEADLINE_S) -> None:
        self._write, self._deadline_s = write, deadline_s
        self._writes: dict[str, tuple[float, Future[OSError | None]]] = {}

    async def failures(self, directories: Collection[str]) -> Mapping[str, OSError]:
        """Return what failed, by directory; TimeoutError is an OSError, too, and means that it hangs."""
        asked = {directory: self._asked(directory) for directory in directories}
        if asked:
            waiting = [asyncio.wrap_future(future) for _, future in asked.values()]
            await asyncio.wait(waiting, timeout=self._deadline_s)
        found: dict[str, OSError] = {}
        for directory, (began_s, future) in asked.items():
            error = future.result() if future.done() else _hangs(time.monotonic() - began_s)
            if error is not None:
                found[directory] = error
        return found

    def _asked(self, directory: str) -> tuple[float, "Future[OSError | None]"]:
        """Return the write that is under way or has just ended, or begin one."""
        now_s = time.monotonic()
        known = self._writes.get(directory)
        if known is not None and (not known[1].done() or now_s - known[0] < FRESH_S):
            return known
        future: Future[OSError | None] = Future()
        future.set_running_or_notify_cancel()  # a caller who goes away does not take the answer from others
        threading.Thread(
            target=_answer, args=(self._write, directory, future), name="everstep-probe", daemon=True
        ).start()
        self._writes[directory] = (now_s, future)
        return self._writes[directory]


def _answer(write: Callable[[str], None], directory: str, future: "Future[OSError | None]") -> None:
    try:
        write(directory)
    except OSError as error:
        future.set_result(error)
    except BaseException as error:
        future.set_exception(error)
        raise
    else:
        future.set_result(None)


def _hangs(for_s: float) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"a write of 4 KiB has not ended for {for_s:.0f} s")
