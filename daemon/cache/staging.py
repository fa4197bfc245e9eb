"""The staging of one reader: a memfd that the daemon makes and the reader alone fills.

It is sealed against another size, so that nobody's mapping faults, and never mapped here: pread gives zeros for what
was never written, where a mapping would have pages made at the daemon's cost. Its pages are made by the reader, in the
reader's cgroup.
"""

import fcntl
import os
import weakref

from ...checkpoint import linux


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

    def read_into(self, target: memoryview, offset_bytes: int) -> bool:
        """Fill `target` from there; tell whether all of it came."""
        done = 0
        while done < len(target):
            count = os.preadv(self.fd, [target[done:]], offset_bytes + done)
            if count == 0:
                return False
            done += count
        return True
