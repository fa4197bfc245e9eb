"""An io_uring by raw system calls (io_uring_setup(2), io_uring_enter(2)), without liburing."""

import errno
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from . import uring_abi as abi
from .engine import TransferKind
from .linux import SYSCALL, raw_syscall
from .uring_buffers import RegisteredBuffers
from .uring_memory import ORDERED_MACHINES, RingMemory

_FILE = 1
"""Place of the file of a transfer among the registered ones; the first is the caller's that the ring holds."""

_LENGTH_MAX_BYTES = 0x7FFFF000
"""MAX_RW_COUNT: the kernel moves no more in one call anyway; the rest is a short completion's."""

_OPCODES = {
    TransferKind.READ: (abi.OP_READ, abi.OP_READ_FIXED),
    TransferKind.WRITE: (abi.OP_WRITE, abi.OP_WRITE_FIXED),
}

_FEATURES = abi.FEAT_SINGLE_MMAP | abi.FEAT_NODROP | abi.FEAT_EXT_ARG

_OUT_OF_REQUESTS = {-errno.EAGAIN, -errno.EBUSY, -errno.ENOMEM}
_AGAIN = {-errno.EINTR, -errno.ETIME}

_RETRY_PAUSE_S = 0.001
_RETRY_DEADLINE_S = 5.0  # a kernel short of request memory recovers in milliseconds or is in real trouble


class Ring:
    """One io_uring: a `BlockQueue` in which slot n is submission entry n.

    `submit` only writes into the ring; the next `reap` hands over and waits in one system call. The completion
    ring has room for twice the requests that there can be: it cannot overflow.

    Raises:
        OSError: EPERM, ENOSYS: not allowed or not there (see `uring_probe`); EINVAL: older than Linux 5.19;
            ENOTSUP: not on this kind of machine.
    """

    name = "uring"

    def __init__(self, depth: int, *, held_fd: int | None = None) -> None:
        """Make a ring of `depth` slots that holds a file of the caller until its last request has ended."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        machine = os.uname().machine
        if machine not in ORDERED_MACHINES:
            raise OSError(errno.ENOTSUP, f"the order of memory accesses on {machine} is not known to suffice")
        self.depth = depth
        self.in_flight = 0
        """Requests that were submitted and have not been reaped."""
        self._staged = 0  # of those in flight: in the ring, and not yet taken by the kernel
        self._refused_s: float | None = None
        self._wait = abi.WaitArgument()
        self._fd, params = abi.setup(depth, abi.SETUP_SUBMIT_ALL | abi.SETUP_COOP_TASKRUN)
        try:
            if params.features & _FEATURES != _FEATURES:
                raise OSError(
                    errno.EINVAL, f"this kernel's io_uring is too old: features {params.features:#x}"
                )
            abi.register_files(self._fd, [-1 if held_fd is None else held_fd, -1])
            self._memory = RingMemory(self._fd, params)
        except BaseException:
            os.close(self._fd)
            raise
        self._buffers: RegisteredBuffers | None = None
        self._file_fd = -1

    def register_buffers(self) -> RegisteredBuffers:
        """Return the ring's registered memory, none yet; requests that lie in it use it from now on."""
        self._buffers = self._buffers or RegisteredBuffers(self._fd)
        return self._buffers

    @contextmanager
    def registered_file(self, fd: int) -> Generator[None]:
        """Let requests for this file find it without looking it up, while the block runs; none outlives the block."""
        abi.update_file(self._fd, _FILE, fd)
        self._file_fd = fd
        try:
            yield
        finally:
            self._file_fd = -1
            abi.update_file(self._fd, _FILE, -1)

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
        """Fill a free slot; nothing happens before `submit` and `reap`."""
        length_bytes = min(length_bytes, _LENGTH_MAX_BYTES)
        place = self._buffers.find(address, length_bytes) if self._buffers else None
        sqe = self._memory.sqes[slot]
        sqe.opcode = _OPCODES[kind][place is not None]
        is_registered = file_fd == self._file_fd
        sqe.flags = abi.FIXED_FILE if is_registered else 0
        sqe.fd = _FILE if is_registered else file_fd
        sqe.off = offset_bytes
        sqe.addr = address
        sqe.len = length_bytes
        sqe.user_data = slot
        sqe.buf_index = place or 0

    def submit(self, slots: Sequence[int]) -> int:
        """Put prepared slots into the ring, in order: all of them, there is always room."""
        self._check_open()
        assert self.in_flight + len(slots) <= self.depth
        self._memory.submit(slots)
        self._staged += len(slots)
        self.in_flight += len(slots)
        return len(slots)

    def reap(self, min_count: int, *, timeout_s: float) -> list[tuple[int, int]]:
        """Hand over what was submitted and wait, see `BlockQueue.reap`.

        Raises:
            OSError: the kernel takes no requests; those that it did not take are not in flight any more.
        """
        self._check_open()
        min_count = min(min_count, self.in_flight)
        deadline_s = time.monotonic() + timeout_s
        done = self._take()
        while self._staged or len(done) < min_count:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not (left_s or self._staged):
                break
            self._hand_over(max(0, min_count - len(done)), left_s)
            done += self._take()
        return done

    def _take(self) -> list[tuple[int, int]]:
        done = self._memory.completions()
        self.in_flight -= len(done)
        return done

    def _hand_over(self, min_count: int, timeout_s: float) -> None:
        """Enter the kernel once; it may take fewer than all, and then does not wait."""
        result = self._enter(self._staged, min_count, timeout_s)
        if result >= 0:
            self._staged -= result
            self._refused_s = None
        elif result in _OUT_OF_REQUESTS:
            self._await_room(-result)
        elif result not in _AGAIN:
            raise self._given_up(-result, "failed")

    def _await_room(self, error_number: int) -> None:
        """Wait for a completion, which gives its request back; if none can come, for a moment."""
        if self.in_flight > self._staged:
            self._enter(0, 1, _RETRY_DEADLINE_S)
            return
        now_s = time.monotonic()
        self._refused_s = self._refused_s or now_s
        if now_s > self._refused_s + _RETRY_DEADLINE_S:
            raise self._given_up(error_number, f"took nothing for {_RETRY_DEADLINE_S:.0f} s")
        time.sleep(_RETRY_PAUSE_S)

    def _given_up(self, error_number: int, what: str) -> OSError:
        """Take back what the kernel has not taken, so that it cannot go out with a later transfer."""
        self._memory.withdraw(self._staged)
        self.in_flight -= self._staged
        self._staged = 0
        self._refused_s = None
        return OSError(error_number, f"io_uring_enter {what}: {os.strerror(error_number)}")

    def _enter(self, submit_count: int, min_count: int, timeout_s: float) -> int:
        self._wait.set(timeout_s)
        return raw_syscall(
            SYSCALL.io_uring_enter,
            self._fd,
            submit_count,
            min_count,
            abi.ENTER_GETEVENTS | abi.ENTER_EXT_ARG,
            self._wait.address,
            self._wait.size_bytes,
        )

    def close(self) -> None:
        """Give the ring back; nothing is in flight. Again is nothing."""
        if self._fd >= 0:
            self._memory.close()
            os.close(self._fd)
            self._fd = -1

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError("the ring is closed")
