"""Why a due checkpoint was not taken: a text for people, and one of a few reasons for metrics."""

from ..proto.frames import SkipReason

NO_ARENA = "the arena is being allocated"
NO_ROOM_YET = "the memory for the arena is not free yet"
PINNING = "the arena is being pinned for CUDA"
NO_SLOT = (
    "no free slot: what they hold is not saved yet, or a device that hangs still reads it; the next due boundary tries "
    "again; where this stays, the devices are slower than the interval (a longer one, more slots or faster devices "
    "help), or a device, the daemon or another rank does not answer (everstep status)"
)
STILL_COPYING = "the previous snapshot is still being copied"
NO_DAEMON = "no daemon"
CAPTURING = "a CUDA graph is being captured"

_REASONS = {
    NO_ARENA: SkipReason.ARENA,
    NO_ROOM_YET: SkipReason.ARENA,
    PINNING: SkipReason.ARENA,
    NO_SLOT: SkipReason.SLOT,
    STILL_COPYING: SkipReason.COPYING,
    NO_DAEMON: SkipReason.DAEMON,
    CAPTURING: SkipReason.CAPTURING,
}


PASSING = frozenset({SkipReason.ARENA, SkipReason.SLOT, SkipReason.COPYING, SkipReason.DAEMON})
"""What the last boundary waits for: it is not taken again."""


def skip_reason(text: str) -> SkipReason:
    """Return what a text means, which may go on behind a colon; any other one is the message of an error."""
    found = (kind for known, kind in _REASONS.items() if text == known or text.startswith(f"{known}: "))
    return next(found, SkipReason.ERROR)
