"""A command whose success announces the end of a run: one at a time, beside something else that its thread hears."""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence

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
        return self._child is not None and self._child.poll() is None and time.monotonic() < self._until_s

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
            self._warn(error)
            return False
        self._until_s = time.monotonic() + COMMAND_DEADLINE_S
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(self._child.pid)
        return True

    def end(self) -> bool:
        """Tell whether what was started has succeeded; kill what still runs, and leave nothing behind."""
        assert self._child is not None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._child.poll() is None:
            self._kill(self._child)
        return self._child.returncode == 0

    def _kill(self, child: "subprocess.Popen[bytes]") -> None:
        if time.monotonic() >= self._until_s:
            self._warn(f"it took more than {COMMAND_DEADLINE_S:.0f} s")
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        try:
            child.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._warn("it cannot be killed, and is not asked again before it has ended")

    def _warn(self, reason: object) -> None:
        logger.warning("notice_command_failed command=%s reason=%s", self.name, reason)
