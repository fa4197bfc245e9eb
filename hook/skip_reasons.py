"""Why a due checkpoint was not taken: a text for people, and one of a few reasons for metrics."""

from ..proto.frames import SkipReason

NO_ARENA = "the arena is being allocated"
PINNING = "the arena is being pinned for CUDA"
NO_SLOT = (
    "no free slot: the devices are slower than the interval; the next due boundary tries again; "
    "where this stays, a longer interval, more slots or faster devices help"
)
STILL_COPYING = "the previous snapshot is still being copied"
NO_DAEMON = "no daemon"
CAPTURING = "a CUDA graph is being captured"

_REASONS = {
    NO_ARENA: SkipReason.ARENA,
    PINNING: SkipReason.ARENA,
    NO_SLOT: SkipReason.SLOT,
    STILL_COPYING: SkipReason.COPYING,
    NO_DAEMON: SkipReason.DAEMON,
    CAPTURING: SkipReason.CAPTURING,
}


def skip_reason(text: str) -> SkipReason:
    """Return what a text means; what is none of the above is the message of an error."""
    return _REASONS.get(text, SkipReason.ERROR)
