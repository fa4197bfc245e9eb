"""The staging of one reader: a memfd that the daemon makes and the reader alone fills.

It is sealed against another size, so that nobody's mapping faults, and never mapped here: pread gives zeros for what
was never written, where a mapping would have pages made at the daemon's cost. Its pages are made by the reader, in the
reader's cgroup.
"""

import fcntl
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

from ...checkpoint import linux


class Bytes(Protocol):
    """Where samples are copied from."""

    @property
    def size_bytes(self) -> int:
        """Return how many bytes there are."""
        ...

    def holds(self, offset_bytes: int, length: int) -> bool:
        """Tell whether the range lies in it."""
        ...

    def read_into(self, target: memoryview, offset_bytes: int) -> bool:
        """Fill `target` from there; tell whether all of it came."""
        ...


class Parcels:
    """Samples that came from another node, back to back."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.offsets_bytes: list[int] = []
        self.size_bytes = 0
        self._contents: dict[int, bytes] = {}
        for data in contents:
            self.offsets_bytes.append(self.size_bytes)
            self._contents[self.size_bytes] = data
            self.size_bytes += max(1, len(data))  # places are told apart by where they begin

    def holds(self, offset_bytes: int, length: int) -> bool:
        """Tell whether a sample of this length lies there."""
        return offset_bytes in self._contents and len(self._contents[offset_bytes]) == length

    def read_into(self, target: memoryview, offset_bytes: int) -> bool:
        """Fill `target` with the sample that lies there."""
        target[:] = self._contents[offset_bytes]
        return True


class Staging:
    """Its descriptor is closed when nobody refers to it any more: neither its client nor a copy in a thread."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("everstep-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, linux.SEALS_FIXED_SIZE)

    def holds(self, offset_bytes: int, length: int) -> bool:
        """Tell whether the range lies in it."""
        return offset_bytes >= 0 and length >= 0 and offset_bytes + length <= self.size_bytes

    def write_at(self, offset_bytes: int, data: bytes) -> None:
        """Put bytes there: into an inbox, which the daemon fills for its reader."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fd, view, offset_bytes)
            view, offset_bytes = view[done:], offset_bytes + done

    def read_into(self, target: memoryview, offset_bytes: int) -> bool:
        """Fill `target` from there; tell whether all of it came."""
        done = 0
        while done < len(target):
            count = os.preadv(self.fd, [target[done:]], offset_bytes + done)
            if count == 0:
                return False
            done += count
        return True
