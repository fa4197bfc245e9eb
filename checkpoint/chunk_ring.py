"""The chunks of shared memory that a shard passes through on its way from the devices into tensors."""

import threading

from ..core.errors import UsageError


class RingClosedError(Exception):
    """Nobody takes chunks out any more."""


class ChunkRing:
    """Equal slots, each free, lent to a reader, or delivered. Thread-safe."""

    def __init__(self, slot_count: int, slot_size_bytes: int) -> None:
        self.slot_size_bytes = slot_size_bytes
        self._free = list(range(slot_count))
        self._delivered: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()

    def take(self) -> int:
        """Return the offset of a free slot, waiting for one. Raises RingClosedError."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise RingClosedError
            return self._free.pop() * self.slot_size_bytes

    def deliver(self, offset_bytes: int) -> int:
        """Return the slot at this offset, which is full now; whoever takes its bytes gives it back."""
        slot = offset_bytes // self.slot_size_bytes
        with self._changed:
            self._delivered.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Take back a delivered slot. Raises UsageError for any other."""
        with self._changed:
            if slot not in self._delivered:
                raise UsageError(f"slot {slot} of the ring was not delivered")
            self._delivered.remove(slot)
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Let whoever waits for a slot, or will, give up. Again is nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
