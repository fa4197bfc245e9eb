"""Which device of a shard is not waited for any longer, because another one writes its segments sooner. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

LATE_FACTOR = 6.0
"""Times the expected time: a drive that is a few times slower is relieved by its share and not left behind."""
LATE_WRITE_S = 1.5
"""However short is expected: drives pause, and machines do."""
LATE_CALL_S = 10.0
"""For calls whose time nothing foretells: making files, allocating, fsync."""
LATE_LOOK_S = 0.1
"""So often it is asked whether a device is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a device does for a shard at this moment."""

    what: str
    """For messages: "writing"."""
    running_s: float
    expected_s: float = 0.0
    """By the bytes that wait for the device and what it is known to move."""
    patience_s: float = LATE_CALL_S
    """As long others wait for it in any case."""

    def is_late(self, idle_s: float) -> bool:
        """Tell whether it takes longer than anything explains, and others have waited for it for long.

        `idle_s`: for how long one has had nothing to do. Until then all may have stood still: the machine, or what is
        below all drives.
        """
        waited_s = min(self.running_s, idle_s)
        return self.running_s > LATE_FACTOR * self.expected_s and waited_s > self.patience_s

    @property
    def text(self) -> str:
        """Return it as a reason."""
        return f"{self.what} has taken {self.running_s:.1f} s, expected {self.expected_s:.1f} s"


def late_device(calls: Sequence[Sequence[Call]], idle_s: float) -> tuple[int, Call] | None:
    """Return the first device that is late, with the call; None while all are waited for.

    `calls` holds what each device does now: nothing where it has finished, or waits for others. `idle_s`: for how long
    one has been able to write instead; 0 where none is: where everything stands still it is the machine. While one is
    at work that is still in its time nothing is lost by waiting.
    """
    late = [next((call for call in mine if call.is_late(idle_s)), None) for mine in calls]
    if any(mine and call is None for mine, call in zip(calls, late, strict=True)):
        return None
    return next(((index, call) for index, call in enumerate(late) if call is not None), None)
