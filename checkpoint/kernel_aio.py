"""The kernel's asynchronous I/O (io_setup(2), io_submit(2), io_getevents(2)), bound without libaio.

It is asynchronous only for files opened with O_DIRECT; for others io_submit does the whole transfer itself.
"""

import errno
import os
import time
from collections.abc import Sequence
from typing import Protocol, cast

from cffi import FFI

from .engine import TransferKind
from .linux import SYSCALL, raw_syscall

# include/uapi/linux/aio_abi.h for a little-endian machine, which x86-64 and aarch64 Linux are.
_CDEF = """
struct iocb {
    uint64_t aio_data;
    uint32_t aio_key;
    uint32_t aio_rw_flags;
    uint16_t aio_lio_opcode;
    int16_t  aio_reqprio;
    uint32_t aio_fildes;
    uint64_t aio_buf;
    uint64_t aio_nbytes;
    int64_t  aio_offset;
    uint64_t aio_reserved2;
    uint32_t aio_flags;
    uint32_t aio_resfd;
};

struct io_event {
    uint64_t data;
    uint64_t obj;
    int64_t  res;
    int64_t  res2;
};

struct aio_timespec {
    int64_t tv_sec;
    int64_t tv_nsec;
};
"""

_RETRY_PAUSE_S = 0.001
_RETRY_DEADLINE_S = 5.0  # a kernel short of request memory recovers in milliseconds or is in real trouble


_OPCODES = {TransferKind.READ: 0, TransferKind.WRITE: 1}
"""aio_lio_opcode: IOCB_CMD_PREAD, IOCB_CMD_PWRITE."""


class _Iocb(Protocol):
    aio_data: int
    aio_lio_opcode: int
    aio_fildes: int
    aio_buf: int
    aio_nbytes: int
    aio_offset: int


class _IoEvent(Protocol):
    data: int
    res: int


class _Timespec(Protocol):
    tv_sec: int
    tv_nsec: int


_ffi = FFI()
_ffi.cdef(_CDEF)


def _address(cdata: FFI.CData) -> int:
    return int(_ffi.cast("uintptr_t", cdata))


class AioContext:
    """One kernel AIO context: a `BlockQueue` whose memory is all made once.

    Raises:
        OSError: EAGAIN: fs.aio-max-nr of the node is used up; ENOSYS, EPERM: no kernel AIO here.
    """

    name = "aio"

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.depth = depth
        self.in_flight = 0
        """Requests that the kernel holds."""
        self._iocb_memory = _ffi.new("struct iocb[]", depth)
        self._queue_memory = _ffi.new("uint64_t[]", depth)
        self._event_memory = _ffi.new("struct io_event[]", depth)
        self._timeout_memory = _ffi.new("struct aio_timespec *")
        self._iocbs = [cast(_Iocb, self._iocb_memory[slot]) for slot in range(depth)]
        self._events = [cast(_IoEvent, self._event_memory[index]) for index in range(depth)]
        self._timeout = cast(_Timespec, cast(object, self._timeout_memory))
        iocb_size_bytes = _ffi.sizeof("struct iocb")
        self._iocb_addresses = [_address(self._iocb_memory) + slot * iocb_size_bytes for slot in range(depth)]
        self._queue_address = _address(self._queue_memory)
        self._event_address = _address(self._event_memory)
        self._timeout_address = _address(self._timeout_memory)
        self._context_id = self._setup()

    def _setup(self) -> int:
        context = _ffi.new("uint64_t *")
        result = raw_syscall(SYSCALL.io_setup, self.depth, _address(context))
        if result < 0:
            raise OSError(-result, f"io_setup({self.depth}): {os.strerror(-result)}")
        return cast(int, context[0])

    def prepare(
        self,
        slot: int,
        kind: TransferKind,
        *,
        file_fd: int,
        address: int,
        length_bytes: int,
        offset_bytes: int,
    ) -> None:
        """Fill a free slot; nothing happens before `submit`."""
        iocb = self._iocbs[slot]
        iocb.aio_data = slot
        iocb.aio_lio_opcode = _OPCODES[kind]
        iocb.aio_fildes = file_fd
        iocb.aio_buf = address
        iocb.aio_nbytes = length_bytes
        iocb.aio_offset = offset_bytes

    def submit(self, slots: Sequence[int]) -> int:
        """Hand prepared slots to the kernel, in order; return how many it took.

        Fewer than given means that it is out of requests: reap, then submit the rest.

        Raises:
            OSError: the kernel refused the first slot that it did not take (EBADF, EINVAL, …); the slots
                before it are in flight.
        """
        for index, slot in enumerate(slots):
            self._queue_memory[index] = self._iocb_addresses[slot]
        taken = 0
        deadline_s: float | None = None
        while taken < len(slots):
            result = self._submit_once(taken, len(slots) - taken)
            if result > 0:
                taken += result
                self.in_flight += result
            elif result in {-errno.EAGAIN, -errno.ENOMEM, 0}:
                if self.in_flight:
                    break
                deadline_s = deadline_s or time.monotonic() + _RETRY_DEADLINE_S
                if time.monotonic() > deadline_s:
                    raise OSError(errno.EAGAIN, f"io_submit took nothing for {_RETRY_DEADLINE_S:.0f} s")
                time.sleep(_RETRY_PAUSE_S)
            elif result != -errno.EINTR:
                raise OSError(-result, os.strerror(-result))
        return taken

    def _submit_once(self, first: int, count: int) -> int:
        return raw_syscall(SYSCALL.io_submit, self._id(), count, self._queue_address + 8 * first)

    def reap(self, min_count: int, *, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for completions; return (slot, bytes moved or negative errno) of each.

        At least `min_count`, or all that are in flight, unless the time is over; as many more as are ready.
        """
        min_count = min(min_count, self.in_flight)
        deadline_s = time.monotonic() + timeout_s
        done: list[tuple[int, int]] = []
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            found = self._getevents(max(0, min_count - len(done)), left_s)
            done += [(event.data, event.res) for event in self._events[:found]]
            if len(done) >= min_count or left_s <= 0:
                return done

    def _getevents(self, min_count: int, timeout_s: float) -> int:
        self._timeout.tv_sec = int(timeout_s)
        self._timeout.tv_nsec = int(timeout_s % 1 * 1e9)
        result = raw_syscall(
            SYSCALL.io_getevents,
            self._id(),
            min_count,
            self.depth,
            self._event_address,
            self._timeout_address,
        )
        if result == -errno.EINTR:
            return 0
        if result < 0:
            raise OSError(-result, f"io_getevents: {os.strerror(-result)}")
        self.in_flight -= result
        return result

    def close(self) -> None:
        """Give the context back; the kernel first waits for what is in flight. Again is nothing."""
        if self._context_id:
            raw_syscall(SYSCALL.io_destroy, self._context_id)
            self._context_id = 0
            self.in_flight = 0

    def _id(self) -> int:
        if not self._context_id:
            raise ValueError("the AIO context is closed")
        return self._context_id
