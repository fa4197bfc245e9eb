"""Whether a CUDA device's part of a snapshot is copied on the device first, or at once to the host. Pure.

A copy to the host that ends before the optimizer wants to write costs training nothing, and no GPU memory. One that
does not makes the optimizer wait. A copy on the device ends much sooner, and then the one to the host may take its
time; but it takes as much GPU memory as is copied. So it is made only where need and room have both been measured.
"""

from dataclasses import dataclass
from enum import Enum

from ..core.durations import duration_text
from ..core.sizes import size_text

LATE = 1.1
"""A copy that takes so many times the window does not fit;"""
EARLY = 0.8
"""one that takes so much of it does. Between the two all stays as it is."""
WORTH_S = 0.01
"""Of waiting in each snapshot: less is worth no GPU memory."""
STREAK = 3
"""Measurements in a row before they are believed: first steps compile and allocate, and single copies are disturbed."""
STREAK_MAX = 256
"""Fits are believed later and later, up to this, when the copies to the host that followed did not fit after all."""
ENTRY_ROOM = 1.25
"""To begin, memory must be free for so many times what is needed; to go on, for once."""
REST_SHORT = 8
"""Snapshots to the host after memory became short;"""
REST_REFUSED = 64
"""and after memory was refused, or training itself ran short of it beside a copy."""


class Way(Enum):
    """How the bytes of a device come into the arena."""

    HOST = "host"
    """At once. Writers wait for it."""
    DEVICE = "device"
    """Into memory of the device, for which writers wait, and from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """What was measured of one snapshot on one device, in seconds of that device."""

    copy_s: float
    """The bytes came to the host."""
    window_s: float
    """From the boundary until the optimizer could have begun to write."""

    @property
    def is_late(self) -> bool:
        """Tell whether waiting for the copy costs something."""
        return self.copy_s > max(LATE * self.window_s, self.window_s + WORTH_S)

    @property
    def is_early(self) -> bool:
        """Tell whether the copy surely costs nothing."""
        return self.copy_s <= EARLY * self.window_s


@dataclass(slots=True)
class DeviceFirstMachine:
    """One device's choice: `choose` for each snapshot, `measured` when one has ended."""

    way: Way = Way.HOST
    """Of the newest snapshot."""
    _misfit: CopyTimes | None = None
    """The newest times that were late."""
    _needed_bytes: int = 0
    _late: int = 0
    _early: int = 0
    _early_needed: int = STREAK
    _is_too_long: bool = False
    _was_believed: bool = False
    """A fit that was measured in copies on the device ended them."""
    _rest: int = 0

    @property
    def wants_room(self) -> bool:
        """Tell whether `choose` will look at the free memory: only then it need be asked for."""
        return self._is_too_long and not self._rest

    def measured(self, times: CopyTimes) -> None:
        """Take what one snapshot took, whichever way it went."""
        self._misfit = times if times.is_late else self._misfit
        self._late = self._late + 1 if times.is_late else 0
        self._early = self._early + 1 if times.is_early else 0
        if not self._is_too_long and self._late >= STREAK:
            self._is_too_long = True
            if self._was_believed:
                self._early_needed = min(2 * self._early_needed, STREAK_MAX)
        elif self._is_too_long and self._early >= self._early_needed:
            self._is_too_long = False
            self._was_believed = self.way is Way.DEVICE

    def choose(self, *, needed_bytes: int, free_bytes: int) -> Way:
        """Return the way of the next snapshot, of `needed_bytes`; a copy may take `free_bytes` of memory at most."""
        assert needed_bytes > 0
        self._needed_bytes = needed_bytes
        was, self.way = self.way, Way.HOST
        if self.wants_room:
            room = needed_bytes if was is Way.DEVICE else ENTRY_ROOM * needed_bytes
            if free_bytes >= room:
                self.way = Way.DEVICE
            elif was is Way.DEVICE:
                self._rest = REST_SHORT
        else:
            self._rest = max(0, self._rest - 1)
        return self.way

    def refused(self) -> None:
        """Memory was short in spite of what was measured: this snapshot goes to the host, and the next ones."""
        self.way, self._rest = Way.HOST, REST_REFUSED

    @property
    def reason(self) -> str:
        """Return why snapshots go the way they do, for people; empty where copies to the host fit, or nobody knows."""
        if self._misfit is None or not self._is_too_long:
            return ""
        copy, window = duration_text(self._misfit.copy_s), duration_text(self._misfit.window_s)
        misfit = f"do not fit in {window} between boundary and optimizer step"
        memory = f"{size_text(self._needed_bytes)} of GPU memory"
        if self.way is Way.DEVICE:
            return f"copied on the device first: {copy} to the host {misfit}; {memory}"
        return f"copied to the host: {copy} {misfit}, but {memory} are not free"
