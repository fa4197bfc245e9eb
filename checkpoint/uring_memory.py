"""The memory that an io_uring shares with the kernel: both rings and the submission entries.

Who reads a ring's tail must not have read an entry before it (acquire), and who writes a tail or head must have
finished with the entries (release). On x86-64 a plain aligned load and store of 32 bits is just that, which is what
C11's acquire and release compile to there; on other machines it is not, and `ORDERED_MACHINES` leaves them out.
"""

import mmap
from collections.abc import Sequence
from typing import Protocol, cast

from cffi import FFI

from . import uring_abi as abi
from .linux import madvise_dontfork

ORDERED_MACHINES = frozenset({"x86_64"})
"""Where plain loads and stores are ordered enough, as `uname -m` says it."""

UINT32_MAX = 0xFFFFFFFF


class RingMemory:
    """The rings of one fd, mapped. Submission entry n is `sqes[n]`, in whatever order they are handed over."""

    def __init__(self, ring_fd: int, params: abi.Params) -> None:
        sq, cq = params.sq_off, params.cq_off
        sq_end_bytes = sq.array + 4 * params.sq_entries
        cq_end_bytes = cq.cqes + abi.ffi.sizeof("struct io_uring_cqe") * params.cq_entries
        sqes_size_bytes = abi.ffi.sizeof("struct io_uring_sqe") * params.sq_entries
        self._rings = _Mapping(ring_fd, max(sq_end_bytes, cq_end_bytes), abi.OFFSET_RINGS)
        self._entries = _Mapping(ring_fd, sqes_size_bytes, abi.OFFSET_SQES)
        self._sq_mask = params.sq_entries - 1
        self._cq_mask = params.cq_entries - 1
        self._sq_tail = self._rings.uint32_at(sq.tail)
        self._sq_array = self._rings.uint32_at(sq.array)
        self._cq_head = self._rings.uint32_at(cq.head)
        self._cq_tail = self._rings.uint32_at(cq.tail)
        sqes = self._entries.pointer("struct io_uring_sqe *", 0)
        self.sqes = [cast(abi.Sqe, sqes[index]) for index in range(params.sq_entries)]
        cqes = self._rings.pointer("struct io_uring_cqe *", cq.cqes)
        self._cqes = [cast(abi.Cqe, cqes[index]) for index in range(params.cq_entries)]

    def submit(self, slots: Sequence[int]) -> None:
        """Put entries at the tail of the submission ring: the kernel takes them at the next io_uring_enter."""
        tail = self._sq_tail[0]
        for index, slot in enumerate(slots):
            self._sq_array[(tail + index) & self._sq_mask] = slot
        self._sq_tail[0] = (tail + len(slots)) & UINT32_MAX

    def withdraw(self, count: int) -> None:
        """Take the last entries back that the kernel has not taken; without SQPOLL it looks only when entered."""
        self._sq_tail[0] = (self._sq_tail[0] - count) & UINT32_MAX

    def completions(self) -> list[tuple[int, int]]:
        """Take all completions that are there: (user_data, result)."""
        head, tail = self._cq_head[0], self._cq_tail[0]
        taken = [self._cqes[index] for index in ring_indices(head, tail, self._cq_mask)]
        done = [(cqe.user_data, cqe.res) for cqe in taken]
        self._cq_head[0] = tail
        return done

    def close(self) -> None:
        """Unmap; nothing is in flight."""
        self._rings.close()
        self._entries.close()


def ring_indices(head: int, tail: int, mask: int) -> list[int]:
    """Return the places of the entries from head up to tail: free-running counters of 32 bits that wrap."""
    return [(head + index) & mask for index in range((tail - head) & UINT32_MAX)]


class _Uint32s(Protocol):
    def __getitem__(self, index: int) -> int: ...
    def __setitem__(self, index: int, value: int) -> None: ...


class _Mapping:
    """One range of a ring's fd, mapped shared; no child of fork has it."""

    def __init__(self, ring_fd: int, size_bytes: int, offset_bytes: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._memory = mmap.mmap(ring_fd, size_bytes, flags=flags, offset=offset_bytes)
        madvise_dontfork(self._memory)
        self._pin = abi.ffi.from_buffer(self._memory)

    def pointer(self, c_type: str, offset_bytes: int) -> FFI.CData:
        """Return a pointer into the mapping, valid until `close`."""
        return abi.ffi.cast(c_type, abi.address_of(self._pin) + offset_bytes)

    def uint32_at(self, offset_bytes: int) -> _Uint32s:
        """Return one number of the ring, or the first of an array of them."""
        return cast(_Uint32s, cast(object, self.pointer("uint32_t *", offset_bytes)))

    def close(self) -> None:
        """Unmap."""
        abi.ffi.release(self._pin)
        self._memory.close()
