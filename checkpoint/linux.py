"""Linux system calls that Python's library lacks, bound through cffi in ABI mode: nothing is compiled.

All of them are blocking, keep no state, may be called from any thread (cffi lets go of the GIL) and raise
`OSError` with errno. An interrupted call is repeated here, because PEP 475 covers only Python's own calls.
"""

import errno
import fcntl
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Protocol, cast

from cffi import FFI


@dataclass(frozen=True, slots=True, kw_only=True)
class SyscallNumbers:
    """Numbers of the bound calls on one architecture (asm/unistd_64.h; asm-generic/unistd.h)."""

    statx: int
    fstatfs: int
    renameat2: int
    fallocate: int
    io_setup: int
    io_destroy: int
    io_submit: int
    io_getevents: int
    io_uring_setup: int = 425
    io_uring_enter: int = 426
    io_uring_register: int = 427


_NUMBERS = {
    "x86_64": SyscallNumbers(
        statx=332,
        fstatfs=138,
        renameat2=316,
        fallocate=285,
        io_setup=206,
        io_destroy=207,
        io_submit=209,
        io_getevents=208,
    ),
    "aarch64": SyscallNumbers(
        statx=291,
        fstatfs=44,
        renameat2=276,
        fallocate=47,
        io_setup=0,
        io_destroy=1,
        io_submit=2,
        io_getevents=4,
    ),
}


def syscall_numbers(machine: str, *, pointer_bits: int) -> SyscallNumbers:
    """Return the numbers for `machine` (as `uname -m` says it); ImportError naming it where none are known."""
    if pointer_bits != 64 or machine not in _NUMBERS:
        raise ImportError(
            f"everstep binds Linux system calls for {' and '.join(_NUMBERS)} with 64-bit Python; "
            f"this is {machine} with {pointer_bits}-bit Python"
        )
    return _NUMBERS[machine]


SYSCALL = syscall_numbers(os.uname().machine, pointer_bits=sys.maxsize.bit_length() + 1)

F_SEAL_FUTURE_WRITE = 0x10
"""memfd seal: no new writable mapping, existing ones go on (Linux 5.1; no constant in Python 3.11)."""

SEALS_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of an arena: nobody who holds the fd can change its size, which would be SIGBUS for the others."""

_AT_EMPTY_PATH = 0x1000
_RENAME_NOREPLACE = 1
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""f_type of tmpfs and ramfs (include/uapi/linux/magic.h)."""

# include/uapi/linux/stat.h; checked by a test. Only the fields that we read have names.
# syscall(2) is variadic, but every argument that we pass is a long, and for longs the calling conventions of
# both architectures agree with a plain function of six. cffi calls those faster than variadic ones.
_CDEF = """
long syscall(long number, long a, long b, long c, long d, long e, long f);

struct everstep_statx {
    uint32_t stx_mask;
    uint8_t  before_dio[148];
    uint32_t stx_dio_mem_align;
    uint32_t stx_dio_offset_align;
    uint8_t  after_dio[96];
};

struct everstep_statfs {
    int64_t f_type;
    uint8_t after_type[112];
};
"""


class _Libc(Protocol):
    def syscall(self, *number_and_six: int) -> int: ...


class _Statfs(Protocol):
    f_type: int


class _Statx(Protocol):
    stx_mask: int
    stx_dio_mem_align: int
    stx_dio_offset_align: int


_ffi = FFI()
_ffi.cdef(_CDEF)
_libc = cast(_Libc, cast(object, _ffi.dlopen(None)))


def raw_syscall(number: int, a: int, b: int = 0, c: int = 0, *more: int) -> int:
    """Return what the kernel returned: a result >= 0, or the negative errno. Nothing is repeated or raised.

    Pointers are passed as integers; the caller keeps what they point at alive.
    """
    d, e, f = (*more, 0, 0, 0)[:3]
    result = _libc.syscall(number, a, b, c, d, e, f)
    return result if result >= 0 else -_ffi.errno


def _checked(number: int, *arguments: int) -> int:
    while True:
        result = raw_syscall(number, *arguments)
        if result >= 0:
            return result
        if result != -errno.EINTR:
            raise OSError(-result, os.strerror(-result))


def _address(cdata: FFI.CData) -> int:
    return int(_ffi.cast("uintptr_t", cdata))


@dataclass(frozen=True, slots=True, kw_only=True)
class DioAlignment:
    """What direct I/O on one file demands."""

    memory_bytes: int
    """Of the buffer's address."""
    offset_bytes: int
    """Of the offset in the file and of the length."""

    @property
    def is_possible(self) -> bool:
        """Tell whether the file can do it at all."""
        return self.memory_bytes > 0 < self.offset_bytes


def dio_alignment(file_fd: int) -> DioAlignment | None:
    """Return what O_DIRECT demands of this opened file (zeros: it cannot do it), or None where nobody says.

    It is asked of the opened file (STATX_DIOALIGN), since it differs between files of one file system: an
    encrypted or journalled file cannot do it. Kernels before 6.1 say nothing, and some file systems. The fd itself
    need not have been opened with O_DIRECT.
    """
    answer = _ffi.new("struct everstep_statx *")
    empty_path = _ffi.new("char[]", b"")
    _checked(SYSCALL.statx, file_fd, _address(empty_path), _AT_EMPTY_PATH, _STATX_DIOALIGN, _address(answer))
    found = cast(_Statx, cast(object, answer))
    if not found.stx_mask & _STATX_DIOALIGN:
        return None
    return DioAlignment(memory_bytes=found.stx_dio_mem_align, offset_bytes=found.stx_dio_offset_align)


def is_in_memory(file_fd: int) -> bool:
    """Tell whether an opened file is one of tmpfs or ramfs: its page cache is all that there is of it."""
    answer = _ffi.new("struct everstep_statfs *")
    _checked(SYSCALL.fstatfs, file_fd, _address(answer))
    return cast(_Statfs, cast(object, answer)).f_type in _IN_MEMORY


def rename_noreplace(src_dir_fd: int, src: str, dst_dir_fd: int, dst: str) -> None:
    """Rename atomically and never over an existing name: then FileExistsError, and nothing has changed.

    Not durable before an fsync of the destination's directory. EINVAL: the file system cannot do it.
    """
    names = [_ffi.new("char[]", _path_bytes(name)) for name in (src, dst)]
    try:
        _checked(
            SYSCALL.renameat2,
            src_dir_fd,
            _address(names[0]),
            dst_dir_fd,
            _address(names[1]),
            _RENAME_NOREPLACE,
        )
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, src, None, dst) from None


def fallocate(file_fd: int, length_bytes: int, *, offset_bytes: int = 0) -> None:
    """Reserve blocks for a range and extend the file to its end; what was not written reads as zeros.

    fallocate(2) itself: glibc's posix_fallocate, which Python offers, writes zeros where the file system
    cannot reserve, and a reservation that writes everything twice is none. Such a file system gives
    EOPNOTSUPP here; a full one ENOSPC, and ext4 then keeps the part that it could reserve [tried]: remove or
    truncate the file at once, or the disk stays full.
    """
    _checked(SYSCALL.fallocate, file_fd, 0, offset_bytes, length_bytes)


def seal_size(memfd: int) -> None:
    """Fix the size of a memfd (made with MFD_ALLOW_SEALING) for good; its content stays writable."""
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS_FIXED_SIZE)


def madvise_dontfork(mapping: mmap.mmap) -> None:
    """Keep a mapping out of children of fork: they neither copy its page tables nor hold its memory."""
    mapping.madvise(mmap.MADV_DONTFORK)


def _path_bytes(name: str) -> bytes:
    encoded = os.fsencode(name)
    if b"\0" in encoded:
        raise ValueError(f"a file name cannot hold a zero byte, got {name!r}")
    return encoded
