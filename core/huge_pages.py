"""Shared memory in huge pages, which the kernel gives a memfd by itself only where its administrator said so.

Of what lies in them the processor finds, and the kernel pins for direct I/O, 512 pages at once (ADR 0092). A huge page
is mapped as one where its address in the process, too, is a multiple of its size: core/mapping.py sees to that.
"""

import functools
import os
from pathlib import Path

from . import advice

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

_USEFUL_BYTES_MAX = 32 * 1024**2
"""ARM with pages of 64 KiB has huge ones of 512 MiB: a slot seldom holds a whole one."""


@functools.cache
def huge_page_bytes() -> int:
    """Return the size of a huge page, 2 MiB on x86; 0: this kernel has none, or such as no arena is made of."""
    try:
        size_bytes = int(_SIZE.read_bytes())  # as text: a codec, which not everybody may import any more
    except (OSError, ValueError):
        return 0
    return size_bytes if size_bytes <= _USEFUL_BYTES_MAX else 0


def take_huge_pages(memfd: int, octets: memoryview, begin_bytes: int, end_bytes: int) -> bool:
    """Have a range of a memfd, all mapped in `octets`, in huge pages as far as whole ones lie in it; tell if all came.

    Bytes stay as they are. What comes in none has ordinary pages, or none yet: where memory is in pieces, or the
    administrator denies huge pages, or the kernel is older than 6.1. For a thread: the kernel clears the memory.

    Raises:
        OSError: there is no memory.
    """
    size = huge_page_bytes()
    if not size:
        return False
    begin, end = -(-begin_bytes // size) * size, end_bytes // size * size
    if begin >= end:
        return True
    for offset in range(begin, end, size):
        os.posix_fallocate(memfd, offset, 1)  # of nothing at all the kernel makes no huge page
    return advice.madvise(advice.address_of(octets) + begin, end - begin, advice.COLLAPSE)
