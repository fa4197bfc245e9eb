"""What a device's queue has moved, and what waits in it: numbers that a scrape reads. Its queue's lock guards them."""

from dataclasses import dataclass, field

from ...checkpoint.engine import TransferKind


@dataclass(slots=True)
class DirectionCounts:
    """One of reading and writing; all but `queued_bytes` only grow."""

    moved_bytes: int = 0
    failed_count: int = 0
    """Transfers that ended with an error."""
    busy_s: float = 0.0
    """Of all pieces, from the moment a lane took one until it had moved."""
    waited_s: float = 0.0
    """Of all transfers, from being asked for until the first piece was taken."""
    queued_bytes: int = 0
    """Asked for, and not moved yet."""


@dataclass(slots=True)
class QueueCounts:
    """Both directions of one device."""

    read: DirectionCounts = field(default_factory=DirectionCounts)
    write: DirectionCounts = field(default_factory=DirectionCounts)

    def of(self, kind: TransferKind) -> DirectionCounts:
        """Return those of one direction."""
        return self.read if kind is TransferKind.READ else self.write
