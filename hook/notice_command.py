"""A command whose success announces the end of a run: one at a time, beside something else that its thread hears."""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence

from .thinned_lines import is_said

logger = logging.getLogger(__name__)

COMMAND_DEADLINE_S = 10.0
LOOK_S = 0.05
"""How often to look whether it has ended where no descriptor tells (pidfd_open: Linux 5.3)."""
REAP_S = 1.0
"""A killed command ends at once, unless it hangs in the kernel, or belongs to another user."""


class NoticeCommand:
    """Runs a command again and again, without a shell, in a process group of its own. Used by one thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._child: subprocess.Popen[bytes] | None = None
        self._descriptor: int | None = None
        self._until_s = 0.0
        self._failed = Counter[str]()
        """How often for which reason."""

    @property
    def name(self) -> str:
        """The program."""
        return self._arguments[0]

    @property
    def descriptor(self) -> int | None:
        """Readable when the command has ended; None: look again after `wait_s`."""
        return self._descriptor

    @property
    def wait_s(self) -> float:
        """How long to wait at most until the next look."""
        left_s = max(0.0, self._until_s - time.monotonic())
        return left_s if self._descriptor is not None else min(LOOK_S, left_s)

    @property
    def is_running(self) -> bool:
        """Tell whether it has neither ended nor had all of its time."""
        return self._child is not None and not _has_ended(self._child) and time.monotonic() < self._until_s

    def begin(self) -> bool:
        """Tell whether it was started: it may not be there, or the one before could not be killed."""
        if self._child is not None and self._child.poll() is None:
            return False
        try:
            self._child = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            self._warn(str(error))
            return False
        self._until_s = time.monotonic() + COMMAND_DEADLINE_S
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(self._child.pid)
        return True

    def end(self) -> bool:
        """Tell whether what was started has succeeded; kill what still runs of its group, and leave nothing behind."""
        assert self._child is not None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        has_succeeded = self._has_succeeded(self._child)
        _kill_group(self._child)
        try:
            self._child.wait(REAP_S)  # its status is 0 where somebody else has reaped it
        except subprocess.TimeoutExpired:
            self._warn("it cannot be killed, and is not asked again before it has ended")
        return has_succeeded

    def _has_succeeded(self, child: "subprocess.Popen[bytes]") -> bool:
        try:
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._warn("how it ended is not known: this process ignores SIGCHLD, or reaps all its children")
            return False
        if ended is None and time.monotonic() >= self._until_s:
            self._warn(f"it took more than {COMMAND_DEADLINE_S:.0f} s")
        return ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == 0

    def _warn(self, reason: str) -> None:
        """Log it; of each reason the first, the 10th, the 100th and so on."""
        self._failed[reason] += 1
        count = self._failed[reason]
        if is_said(count):
            alike = f" (as {count - 1} times before)" if count > 1 else ""
            logger.warning("notice_command_failed command=%s reason=%s%s", self.name, reason, alike)


def _has_ended(child: "subprocess.Popen[bytes]") -> bool:
    """Tell whether it has ended, without reaping it: until then its group's id is nobody else's."""
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else has reaped it
        return True


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    """Kill a command and all that it has started and left in its group."""
    with contextlib.suppress(ChildProcessError, PermissionError, ProcessLookupError):
        # First: of one that somebody else has reaped the id may be another's by now.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.killpg(child.pid, signal.SIGKILL)
