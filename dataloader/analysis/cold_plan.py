"""Whether a cold run was cold and a warm run warm, from bytes and names. Words and arithmetic only."""

from collections.abc import Sequence

from ...core.sizes import size_text

SLACK = 0.1
"""Share of the bytes that may be otherwise: headers read twice, read-ahead that nobody used."""
SLACK_BYTES = 256 * 1024
NAMES_SHOWN = 5


def cold_reasons(
    *, file_bytes: float, storage_bytes: float, unseen: Sequence[str], kept: Sequence[str]
) -> list[str]:
    """Return why the cold run's speed is more than it would be with nothing in memory; none is a cold run.

    `file_bytes` were read by calls during the steps that count, `storage_bytes` were delivered by storage.
    """
    reasons: list[str] = []
    if unseen:
        reasons.append(f"native code opened files by itself: {_names(unseen)}")
    if kept:
        reasons.append(f"files stayed in memory (tmpfs, or in use elsewhere): {_names(kept)}")
    if file_bytes > SLACK_BYTES and storage_bytes < (1.0 - SLACK) * file_bytes:
        if storage_bytes == 0.0:
            reasons.append(
                f"of {size_text(file_bytes)} that were read the kernel counts none from storage:"
                " memory, or a file system that does not count"
            )
        else:
            came = size_text(file_bytes - storage_bytes)
            reasons.append(f"{came} of {size_text(file_bytes)} that were read came from memory all the same")
    return reasons


def warm_reasons(*, file_bytes: float, storage_bytes: float) -> list[str]:
    """Return why the warm run's speed is less than it would be with everything in memory; none is a warm run."""
    if storage_bytes <= SLACK_BYTES or storage_bytes <= SLACK * max(file_bytes, storage_bytes):
        return []
    return [
        (
            f"{size_text(storage_bytes)} came from storage, though the run before had read them: memory is too small"
            " for them, or the script reads in another order each time"
        )
    ]


def _names(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:NAMES_SHOWN])
    rest = len(paths) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
