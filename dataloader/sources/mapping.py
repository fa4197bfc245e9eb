"""A file's bytes, mapped read-only without keeping a descriptor.

Python's own mmap keeps a duplicate of it: a thousand shards would use up a process's descriptors, and forks share them.
"""

import errno
import os
import stat
from typing import Protocol, cast

from cffi import FFI

_ffi = FFI()
_ffi.cdef("""
void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
int munmap(void *addr, size_t length);
""")
_PROT_READ = 1
_MAP_SHARED = 1


class _Libc(Protocol):
    def mmap(self, addr: "FFI.CData", length: int, *rest: int) -> "FFI.CData": ...
    def munmap(self, addr: "FFI.CData", length: int, /) -> int: ...


_libc = cast("_Libc", _ffi.dlopen(None))


def map_file(path: str) -> memoryview:
    """Return the bytes of a file that nobody will cut; they are unmapped when no view of them is left.

    The view must not be written to. OSError as open(2) and mmap(2) have it, EINVAL for what is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not hang
    try:
        status = os.fstat(fd)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if not size:
            return memoryview(b"")
        pointer = _libc.mmap(_ffi.NULL, size, _PROT_READ, _MAP_SHARED, fd, 0)
        if int(_ffi.cast("intptr_t", pointer)) == -1:
            number = _ffi.errno
            raise OSError(number, f"mapping {size} bytes: {errno.errorcode.get(number, number)}", path)
    finally:
        os.close(fd)
    mapped = _ffi.gc(_ffi.cast("char *", pointer), lambda address: _libc.munmap(address, size))
    return memoryview(_ffi.buffer(mapped, size)).toreadonly()
