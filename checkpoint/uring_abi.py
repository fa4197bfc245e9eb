"""Structs and numbers of io_uring (include/uapi/linux/io_uring.h), in cffi's ABI mode; checked by a test."""

import errno
import os
from collections.abc import Sequence
from typing import Protocol, cast

from cffi import FFI

from .linux import SYSCALL, raw_syscall

OP_READ_FIXED = 4
OP_WRITE_FIXED = 5
OP_READ = 22
OP_WRITE = 23

SETUP_SUBMIT_ALL = 1 << 7  # Linux 5.18: one bad request does not hold up those behind it
SETUP_COOP_TASKRUN = (
    1 << 8
)  # 5.19: no interrupt of the thread, which enters the kernel for completions anyway

FEAT_SINGLE_MMAP = 1 << 0
FEAT_NODROP = 1 << 1
FEAT_EXT_ARG = 1 << 8

ENTER_GETEVENTS = 1 << 0
ENTER_EXT_ARG = 1 << 3

REGISTER_FILES = 2
REGISTER_FILES_UPDATE = 6
REGISTER_BUFFERS2 = 15
REGISTER_BUFFERS_UPDATE = 16
RSRC_REGISTER_SPARSE = 1 << 0
FIXED_FILE = 1 << 0

OFFSET_RINGS = 0
OFFSET_SQES = 0x10000000

_CDEF = """
struct io_sqring_offsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
    uint64_t user_addr;
};

struct io_cqring_offsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
    uint64_t user_addr;
};

struct io_uring_params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
    struct io_sqring_offsets sq_off;
    struct io_cqring_offsets cq_off;
};

struct io_uring_sqe {
    uint8_t  opcode;
    uint8_t  flags;
    uint16_t ioprio;
    int32_t  fd;
    uint64_t off;
    uint64_t addr;
    uint32_t len;
    uint32_t rw_flags;
    uint64_t user_data;
    uint16_t buf_index;
    uint16_t personality;
    int32_t  splice_fd_in;
    uint64_t addr3;
    uint64_t resv;
};

struct io_uring_cqe {
    uint64_t user_data;
    int32_t  res;
    uint32_t flags;
};

struct io_uring_files_update {
    uint32_t offset;
    uint32_t resv;
    uint64_t fds;
};

struct io_uring_rsrc_register {
    uint32_t nr;
    uint32_t flags;
    uint64_t resv2;
    uint64_t data;
    uint64_t tags;
};

struct io_uring_rsrc_update2 {
    uint32_t offset;
    uint32_t resv;
    uint64_t data;
    uint64_t tags;
    uint32_t nr;
    uint32_t resv2;
};

struct io_uring_getevents_arg {
    uint64_t sigmask;
    uint32_t sigmask_sz;
    uint32_t min_wait_usec;
    uint64_t ts;
};

struct uring_timespec {
    int64_t tv_sec;
    int64_t tv_nsec;
};

struct uring_iovec {
    uint64_t base;
    uint64_t len;
};
"""

ffi = FFI()
ffi.cdef(_CDEF)


class RingOffsets(Protocol):
    """Of the fields of a ring, in bytes; those that both rings have."""

    head: int
    tail: int
    ring_mask: int


class SqOffsets(RingOffsets, Protocol):
    """Of the submission ring."""

    array: int


class CqOffsets(RingOffsets, Protocol):
    """Of the completion ring."""

    cqes: int


class Params(Protocol):
    """struct io_uring_params."""

    sq_entries: int
    cq_entries: int
    flags: int
    features: int
    sq_off: SqOffsets
    cq_off: CqOffsets


class Sqe(Protocol):
    """struct io_uring_sqe."""

    opcode: int
    flags: int
    fd: int
    off: int
    addr: int
    len: int
    user_data: int
    buf_index: int


class Cqe(Protocol):
    """struct io_uring_cqe."""

    user_data: int
    res: int


class _Timespec(Protocol):
    tv_sec: int
    tv_nsec: int


def address_of(cdata: FFI.CData) -> int:
    """Return where a C object lies; the caller keeps it alive."""
    return int(ffi.cast("uintptr_t", cdata))


class WaitArgument:
    """struct io_uring_getevents_arg with a timeout: how long io_uring_enter waits."""

    def __init__(self) -> None:
        self._timeout = ffi.new("struct uring_timespec *")
        self._argument = ffi.new("struct io_uring_getevents_arg *", {"ts": address_of(self._timeout)})
        self._fields = cast(_Timespec, cast(object, self._timeout))
        self.address = address_of(self._argument)
        self.size_bytes = ffi.sizeof("struct io_uring_getevents_arg")

    def set(self, timeout_s: float) -> None:
        """Wait for so long from the call."""
        self._fields.tv_sec = int(timeout_s)
        self._fields.tv_nsec = int(timeout_s % 1 * 1e9)


def setup(entry_count: int, flags: int) -> tuple[int, Params]:
    """Return the fd of a new ring (close-on-exec) and what the kernel says of it; OSError if it gives none."""
    params = ffi.new("struct io_uring_params *", {"flags": flags})
    result = raw_syscall(SYSCALL.io_uring_setup, entry_count, address_of(params))
    if result < 0:
        raise OSError(-result, f"io_uring_setup({entry_count}): {os.strerror(-result)}")
    return result, cast(Params, cast(object, params))


def register_files(ring_fd: int, fds: Sequence[int]) -> None:
    """Let the ring itself hold files: until it is gone, which is after the end of its last request."""
    array = ffi.new("int32_t[]", list(fds))
    _register(ring_fd, REGISTER_FILES, address_of(array), len(fds))


def update_file(ring_fd: int, place: int, fd: int) -> None:
    """Hold a file under a place of the table; -1: let go of what it held."""
    held = ffi.new("int32_t[1]", [fd])
    update = ffi.new("struct io_uring_files_update *", {"offset": place, "fds": address_of(held)})
    _register(ring_fd, REGISTER_FILES_UPDATE, address_of(update), 1)


def register_no_buffers(ring_fd: int, place_count: int) -> None:
    """Make a table of registered buffers, all places empty (Linux 5.19)."""
    table = ffi.new("struct io_uring_rsrc_register *", {"nr": place_count, "flags": RSRC_REGISTER_SPARSE})
    _register(ring_fd, REGISTER_BUFFERS2, address_of(table), ffi.sizeof("struct io_uring_rsrc_register"))


def update_buffer(ring_fd: int, place: int, address: int, length_bytes: int) -> None:
    """Pin memory (at most 1 GiB) under a place of the table; address and length 0: let go of what it held."""
    vector = ffi.new("struct uring_iovec *", {"base": address, "len": length_bytes})
    update = ffi.new("struct io_uring_rsrc_update2 *", {"offset": place, "data": address_of(vector), "nr": 1})
    _register(
        ring_fd, REGISTER_BUFFERS_UPDATE, address_of(update), ffi.sizeof("struct io_uring_rsrc_update2")
    )


def _register(ring_fd: int, opcode: int, argument: int, argument_count: int) -> None:
    while True:
        result = raw_syscall(SYSCALL.io_uring_register, ring_fd, opcode, argument, argument_count)
        if result >= 0:
            return
        if result != -errno.EINTR:
            raise OSError(-result, f"io_uring_register({opcode}): {os.strerror(-result)}")
