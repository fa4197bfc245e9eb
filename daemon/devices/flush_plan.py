"""When the durability of a drive is to be doubted. Pure."""

FSYNC_S_MIN = 50e-6
"""A flush of a volatile cache that is faster has not reached the medium."""

UNKNOWN = "unknown"
VOLATILE = "write back"


def is_doubtful(write_cache: str, fsync_s: float | None) -> bool:
    """Tell whether a drive answers sooner than one with a volatile cache can."""
    return write_cache == VOLATILE and fsync_s is not None and fsync_s < FSYNC_S_MIN
