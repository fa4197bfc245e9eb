"""The free space of each device as it was a moment ago, so that nobody who only looks waits for a device that hangs."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...checkpoint.device import Device

ASK_EVERY_S = 1.0
FIRST_ANSWER_S = 1.0
"""How long the opening of a store waits for what its devices say first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a device's file system said."""

    free_bytes: int
    """What this user may still write."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceReading:
    """What is known of a device's space now."""

    space: Space | None
    """None where its file system answered with an error, and before the first answer."""
    reason: str
    """That error; empty without one."""
    age_s: float
    """Since it was asked for that, or since the store was opened, before the first answer."""


def ask_space(path: str) -> Space:
    """Return the space of the file system at `path`, which may take for ever; OSError when it cannot be asked."""
    found = os.statvfs(path)
    return Space(
        free_bytes=found.f_bavail * found.f_frsize,
        total_bytes=found.f_blocks * found.f_frsize,
    )


class SpaceWatch:
    """Asks each device from a thread of its own, so that one that hangs holds nobody. Readings from any thread."""

    def __init__(self, devices: Sequence[Device], ask: Callable[[str], Space] = ask_space) -> None:
        self._ask = ask
        self._devices = tuple(devices)
        self._answers: dict[str, tuple[Space | None, str, float]] = {}
        self._began_s = time.monotonic()
        self._has_answered = {device.device_id: threading.Event() for device in self._devices}
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin to ask; return when every device has answered, or after a second."""
        for device in self._devices:
            threading.Thread(
                target=self._keep_asking, args=(device,), name="everstep-space", daemon=True
            ).start()  # a daemon thread: the process may end although a device hangs
        deadline_s = time.monotonic() + FIRST_ANSWER_S
        for answered in self._has_answered.values():
            answered.wait(max(deadline_s - time.monotonic(), 0.0))

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()

    def reading(self, device_id: str) -> SpaceReading:
        """Return the last answer of a device and its age; never waits."""
        space, reason, asked_s = self._answers.get(device_id, (None, "", self._began_s))
        return SpaceReading(space=space, reason=reason, age_s=time.monotonic() - asked_s)

    def _keep_asking(self, device: Device) -> None:
        while True:
            asked_s = time.monotonic()
            try:
                space, reason = self._ask(str(device.path)), ""
            except OSError as error:
                space, reason = None, f"{device.path}: {error.strerror}"
            self._answers[device.device_id] = (space, reason, asked_s)
            self._has_answered[device.device_id].set()
            if self._is_over.wait(ASK_EVERY_S):
                return
