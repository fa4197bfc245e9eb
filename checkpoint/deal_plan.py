"""Which device gets which segment of a shard, so that all finish together; and who takes over from whom. Pure.

`deal` is longest-processing-time first: the largest segment goes where it will be finished first, counting what is
queued there already. It is at most a third worse than the best deal, and the more segments the nearer. What it cannot
know, a drive that turns slow meanwhile, `victim` mends while the shard is written.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import NoSpaceError
from ..core.sizes import size_text

SPACE_MARGIN_BYTES = 16 * 1024 * 1024
"""Left free on each file system for manifests, attempts and the file system's own growth. Not to be set."""

STEAL_MARGIN = 0.5
"""A segment is taken over only where that ends the write sooner by this share of the segment's own time: a drive's
measured speed varies by a few per cent, and drives of one kind must not take from each other at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """What is known of a device before a deal."""

    device_id: str
    name: str
    """For messages."""
    volume: int
    """The file system it lies on: devices of one volume share its room."""
    speed_bytes_per_s: float | None = None
    """As measured; None: nobody knows yet."""
    backlog_bytes: int = 0
    """Dealt to it and not yet written, of all shards."""


def deal(
    sizes_bytes: Sequence[int], devices: Sequence[DeviceLoad], room_bytes: Mapping[int, int]
) -> tuple[str, ...]:
    """Return the device of each segment, by segment number; a pure function of its arguments.

    `room_bytes` is what each volume has left. A device of unknown speed counts as the median of the known ones. Equal
    devices get equal counts of equal segments; a device may get none.

    Raises:
        NoSpaceError: a segment fits on no device; the message has the figures.
    """
    speeds = _known_or_median(devices)
    finish_s = {each.device_id: each.backlog_bytes / speeds[each.device_id] for each in devices}
    room = dict(room_bytes)
    dealt = [""] * len(sizes_bytes)
    for segment in sorted(range(len(sizes_bytes)), key=lambda index: (-sizes_bytes[index], index)):
        size = sizes_bytes[segment]
        fitting = [each for each in devices if room[each.volume] >= size]
        if not fitting:
            raise _no_room(sizes_bytes, devices, room_bytes)
        chosen = min(fitting, key=lambda each: finish_s[each.device_id] + size / speeds[each.device_id])
        finish_s[chosen.device_id] += size / speeds[chosen.device_id]
        room[chosen.volume] -= size
        dealt[segment] = chosen.device_id
    return tuple(dealt)


def _known_or_median(devices: Iterable[DeviceLoad]) -> dict[str, float]:
    found = {each.device_id: each.speed_bytes_per_s for each in devices}
    known = [speed for speed in found.values() if speed]
    typical = statistics.median(known) if known else 1.0
    return {device_id: speed or typical for device_id, speed in found.items()}


def _no_room(
    sizes_bytes: Sequence[int], devices: Sequence[DeviceLoad], room_bytes: Mapping[int, int]
) -> NoSpaceError:
    names = {each.volume: each.name for each in reversed(devices)}
    rooms = [f"{name} has room for {max(room_bytes[volume], 0)} bytes" for volume, name in names.items()]
    return NoSpaceError(
        f"{', '.join(reversed(rooms))}, {sum(sizes_bytes)} are needed in {len(sizes_bytes)} segments",
        hint="free space there, lower keep_last, or add a device",
    )


def shortage(name: object, free_bytes: int) -> str:
    """Return why nothing can be written to a device with so much free space; empty where something can."""
    if free_bytes > SPACE_MARGIN_BYTES:
        return ""
    free, kept = size_text(free_bytes), size_text(SPACE_MARGIN_BYTES)
    return f"{name} has no room: {free} are free there, and {kept} of each file system stay free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a device still has to write of a shard."""

    device_id: str
    waiting_bytes: tuple[int, ...]
    """Sizes of its segments that nobody has begun, in its order."""
    running_bytes: int = 0
    """Of the segments being written."""
    running_s: float = 0.0
    """How long at least they have been written."""
    speed_bytes_per_s: float | None = None


def victim(thief_speed_bytes_per_s: float | None, works: Iterable[Work]) -> str | None:
    """Return whose last waiting segment a device that has run out should take over; None: nobody's.

    The one expected to finish last, and only where that clearly shortens the end: never among equal devices.
    """
    candidates = [work for work in works if work.waiting_bytes]
    if not candidates:
        return None
    speeds = [work.speed_bytes_per_s for work in candidates] + [thief_speed_bytes_per_s]
    typical = statistics.median([speed for speed in speeds if speed] or [1.0])
    last = max(candidates, key=lambda work: _left_s(work, typical))
    own_s = last.waiting_bytes[-1] / (thief_speed_bytes_per_s or typical)
    return last.device_id if _left_s(last, typical) > own_s * (1 + STEAL_MARGIN) else None


def _left_s(work: Work, typical_bytes_per_s: float) -> float:
    """Return when a device will have finished; one whose running segment takes long is no faster than that shows."""
    speed = work.speed_bytes_per_s or typical_bytes_per_s
    if work.running_bytes and work.running_s > 0:
        speed = min(speed, work.running_bytes / work.running_s)
    running_s = max(work.running_bytes / speed - work.running_s, 0.0)
    return running_s + sum(work.waiting_bytes) / speed
