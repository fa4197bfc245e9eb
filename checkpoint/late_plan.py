"""Which device of a shard is not waited for any longer, because another one writes its segments sooner. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

LATE_FACTOR = 6.0
"""Times the expected time: a drive that is a few times slower is relieved by its share and not left behind."""
LATE_WRITE_S = 1.5
"""However short is expected: drives pause, and machines do."""
LATE_CALL_S = 10.0
"""For calls whose time nothing foretells: making files, allocating, fsync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a device does for a shard at this moment."""

    what: str
    """For messages: "writing"."""
    running_s: float
    expected_s: float = 0.0
    """By the bytes that wait for the device and what it is known to move."""
    patience_s: float = LATE_CALL_S
    """As long it may take in any case."""

    @property
    def is_late(self) -> bool:
        """Tell whether it takes longer than anything explains."""
        return self.running_s > max(self.patience_s, LATE_FACTOR * self.expected_s)

    @property
    def text(self) -> str:
        """Return it as a reason."""
        return f"{self.what} has taken {self.running_s:.1f} s, expected {self.expected_s:.1f} s"


def late_device(calls: Sequence[Sequence[Call]]) -> tuple[int, Call] | None:
    """Return the first device that is late, with the call; None while all are waited for.

    `calls` holds what each device does now: nothing where it has finished, or waits for others. One is late only where
    some device has nothing to do, and could write instead, and none is at work that is still in its time: where
    everything stands still it is the machine, and while others write nothing is lost by waiting.
    """
    late = [next((call for call in mine if call.is_late), None) for mine in calls]
    if all(calls) or any(mine and call is None for mine, call in zip(calls, late, strict=True)):
        return None
    return next(((index, call) for index, call in enumerate(late) if call is not None), None)
