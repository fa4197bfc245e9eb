"""What other nodes had of the samples that a reader asked for: memory that the daemon fills and this process reads."""

import mmap
import os
from collections.abc import Sequence

from ...proto import peer_frames

INBOX_BYTES = 32 * 1024 * 1024
INBOX_KEPT_BYTES = 4 * 1024 * 1024
"""Pages beyond this are given back before the next request."""


class Inbox:
    """One request at a time. What came is there until the next one is asked for."""

    def __init__(self) -> None:
        self.mapping: mmap.mmap | None = None
        self.number = self.asked_number = 0
        """Of the requests for the inbox itself, and for the samples that it is to hold."""
        self.is_waiting = False
        self.absent: set[int] = set()
        """Samples that were asked for and that no peer has."""
        self.left_out: list[int] = []
        """Peers have these, but there was no room for them."""
        self._asked: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}
        self._touched_bytes = 0

    def use(self, fd: int, size_bytes: int) -> None:
        """Map the memory, and close its descriptor.

        Raises:
            OSError: it cannot be mapped.
        """
        try:
            self.mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)

    def asked(self, number: int, samples: Sequence[int]) -> None:
        """These are to come; what lies here is over."""
        self.asked_number, self.is_waiting = number, True
        self._asked, self.left_out = set(samples), []
        self.absent.clear()
        self._places.clear()
        if self._touched_bytes > INBOX_KEPT_BYTES and self.mapping is not None:
            self.mapping.madvise(mmap.MADV_REMOVE, INBOX_KEPT_BYTES)
        self._touched_bytes = 0

    def gave(self, reply: peer_frames.PeersGave) -> None:
        """The daemon has answered."""
        if reply.re != self.asked_number:
            return
        self.is_waiting = False
        self._places = {sample: (begin, length) for sample, begin, length in reply.items}
        self._touched_bytes = max((begin + length for begin, length in self._places.values()), default=0)
        self.left_out = reply.left_out
        self.absent = self._asked - set(self._places) - set(reply.left_out)

    def expects(self, sample: int) -> bool:
        """Tell whether a sample is here, or has been asked for and may come."""
        return sample in self._places or (self.is_waiting and sample in self._asked)

    def unread(self) -> list[int]:
        """Return what peers have of the last request and has not been read."""
        return [*self._places, *self.left_out]

    def take(self, sample: int) -> bytes | None:
        """Return the bytes of a sample, once; None: it is not here."""
        found = self._places.pop(sample, None)
        if found is None or self.mapping is None:
            return None
        begin, length = found
        return self.mapping[begin : begin + length]

    def close(self) -> None:
        """Give the memory back."""
        if self.mapping is not None:
            self.mapping.close()
            self.mapping = None
        self._places.clear()
        self.is_waiting = False
