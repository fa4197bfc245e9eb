"""How far a snapshot has been copied into its slot, for those who write it meanwhile."""

import threading
from collections.abc import Callable


class CopyAbandonedError(Exception):
    """The snapshot will never be sealed: what was written of it is of no use."""


class CopyGate:
    """Opens segment by segment, and whole when the snapshot is sealed. Thread-safe.

    In a ring segments take turns in the slot: `on_written` hears, in any thread, which one may be overwritten.
    """

    def __init__(self, on_written: Callable[[int], object] | None = None) -> None:
        self._on_written = on_written
        self._is_spent = False
        self._changed = threading.Condition()
        self._copied: set[int] = set()
        self._is_sealed = self._is_abandoned = False

    def copied(self, segment: int) -> None:
        """Every byte of a segment is in the slot and stays as it is."""
        with self._changed:
            self._copied.add(segment)
            self._changed.notify_all()

    def seal(self) -> None:
        """So is the whole snapshot, and it holds."""
        with self._changed:
            self._is_sealed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """It was given up: whoever waits, or will, gets CopyAbandonedError. Nothing once it is sealed."""
        with self._changed:
            self._is_abandoned = not self._is_sealed
            self._changed.notify_all()

    @property
    def is_ring(self) -> bool:
        """Tell whether segments take turns in the slot."""
        return self._on_written is not None

    @property
    def is_spent(self) -> bool:
        """Tell whether the slot may not hold all that was copied any more: it cannot be written once more."""
        return self._is_spent

    def written(self, segment: int) -> None:
        """A segment's bytes are needed in the slot no more: they are in its file and in its checksums."""
        if self._on_written is not None:
            self._is_spent = True
            self._on_written(segment)

    def wake(self) -> None:
        """Let those who wait look whether they are still to wait."""
        with self._changed:
            self._changed.notify_all()

    def wait_copied(self, segment: int, is_over: Callable[[], bool]) -> bool:
        """Return True when a segment may be read; False when `is_over` says so first (`wake` makes it asked)."""
        return self._wait(lambda: self._is_sealed or segment in self._copied, is_over)

    def wait_sealed(self) -> None:
        """Return when the snapshot is sealed."""
        self._wait(lambda: self._is_sealed, lambda: False)

    def _wait(self, is_open: Callable[[], bool], is_over: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_open() or self._is_abandoned or is_over())
            if self._is_abandoned:
                raise CopyAbandonedError
            return is_open()
