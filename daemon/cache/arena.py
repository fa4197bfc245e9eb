"""One cache arena: a memfd that only this daemon writes, through a mapping made before it was sealed.

What clients get is a descriptor opened for reading. The seals hold for whoever opens the memfd again through /proc:
no write, no writable mapping, no hole, no smaller size (ADR 0045). So nobody's access to a record ever faults. The file
ends where its pages end: a reader that touched more would have the kernel make pages that nobody admitted (ADR 0058).
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from ...checkpoint import linux
from ...core.mapping import map_shared
from ...dataloader.cache.arena_format import (
    INDEX_WORD,
    RECORD_HEAD_BYTES,
    WORD_BYTES,
    Header,
    record_bytes,
    write_header,
)
from ..admission_plan import PAGE_BYTES
from .space_plan import Refusal, Space

if TYPE_CHECKING:
    from .staging import Bytes

SEALS = fcntl.F_SEAL_SHRINK | linux.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL

COPY_BYTES = 16 * 1024 * 1024
"""So many, and one sample more, are copied and hashed at once: then the thread is for whoever else waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One sample in a client's staging."""

    sample: int
    offset_bytes: int
    length: int
    digest: int


@dataclass(frozen=True, slots=True)
class Found:
    """A published sample."""

    sample: int
    place: int
    length: int
    digest: int


CopyResult = tuple[list[tuple[Item, int]], list[tuple[Item, Refusal]]]
"""What was copied, with its place, and what was not, with the reason."""


class CacheArena:
    """Owned by the event loop; `copy` alone runs in a thread, one at a time."""

    def __init__(self, sample_count: int, limit_bytes: int, file_bytes: int) -> None:
        """Make the memfd, empty yet, and map what it may become, which is more than the budget: that may grow."""
        self.space = Space(sample_count=sample_count, limit_bytes=limit_bytes)
        self.file_bytes = file_bytes
        self.published_count = 0
        self._fd = os.memfd_create("everstep-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.read_fd = -1
        try:
            os.fchmod(self._fd, 0o400)
            self._bytes = map_shared(self._fd, file_bytes, is_writable=True)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self.read_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._close_descriptors()
            raise
        self._words = self._bytes.cast("Q")

    def allocate(self, end_bytes: int) -> None:
        """Have all pages up to there, where the file then ends; for a thread. OSError where the kernel has none."""
        begin_bytes = self.space.allocated_bytes
        linux.fallocate(self._fd, end_bytes - begin_bytes, offset_bytes=begin_bytes)

    def show(self) -> None:
        """Bring the header up to date."""
        space = self.space
        header = Header(
            sample_count=space.sample_count,
            capacity_bytes=space.capacity_bytes,
            free_bytes=space.free_bytes,
            used_bytes=space.used_bytes,
            published_count=self.published_count,
        )
        write_header(self._words, header)

    def known(self, item: Item) -> bool | None:
        """Tell whether a sample is there with the same bytes; None: it is not there."""
        place = self._words[INDEX_WORD + item.sample]
        if not place:
            return None
        word = place // WORD_BYTES
        return (self._words[word], self._words[word + 1]) == (item.length, item.digest)

    def find(self, sample: int) -> Found | None:
        """Return a published sample; None: it is not there."""
        place = self._words[INDEX_WORD + sample]
        if not place:
            return None
        word = place // WORD_BYTES
        return Found(sample, place, self._words[word], self._words[word + 1])

    def read(self, found: Sequence[Found]) -> list[bytes]:
        """Return the bytes of published samples; for a thread, while the cache is pinned."""
        begins = [each.place + RECORD_HEAD_BYTES for each in found]
        return [
            bytes(self._bytes[begin : begin + each.length]) for begin, each in zip(begins, found, strict=True)
        ]

    def copy(self, staging: "Bytes", items: Sequence[Item]) -> CopyResult:
        """Copy the first of these samples, as far as there are pages; return (sample, place) and (sample, why not).

        For a thread. What was copied is not published yet. A sample whose bytes are not what its digest says leaves
        no trace: the next one is copied over it. `items` must not be there, nor name a sample twice.
        """
        copied: list[tuple[Item, int]] = []
        refused: list[tuple[Item, Refusal]] = []
        handled_bytes = 0
        for item in items:
            if handled_bytes >= COPY_BYTES:
                break
            handled_bytes += item.length
            refusal = self.space.refusal(item.length)
            if refusal is None and not self.space.is_allocated_for(item.length):
                break
            if refusal is None and not self._copy(staging, item):
                refusal = Refusal.CORRUPT
            if refusal is None:
                copied.append((item, self.space.admit(item.length)))
            else:
                refused.append((item, refusal))
        return copied, refused

    def _copy(self, staging: "Bytes", item: Item) -> bool:
        """Put a record where the next one goes; tell whether its bytes have the digest that the reader sent.

        The bytes are read by pread, not through a mapping, and the digest is taken of the copy: whatever the client
        does to its staging meanwhile, what is published has the digest.
        """
        begin = self.space.used_bytes
        body = self._bytes[begin + RECORD_HEAD_BYTES : begin + RECORD_HEAD_BYTES + item.length]
        with body:
            if not staging.read_into(body, item.offset_bytes):
                return False
            if xxhash.xxh3_64_intdigest(body) != item.digest:
                return False
        end = begin + record_bytes(item.length)
        padding = begin + RECORD_HEAD_BYTES + item.length
        self._bytes[padding:end] = bytes(end - padding)  # of a longer one that was refused
        word = begin // WORD_BYTES
        self._words[word], self._words[word + 1] = item.length, item.digest
        return True

    def publish(self, copied: Sequence[tuple[Item, int]]) -> None:
        """Let readers see what was copied. On the event loop, after `copy` has returned in its thread.

        One aligned store of 8 bytes for each sample (arena_format.py, "Publication").
        """
        for item, place in copied:
            self._words[INDEX_WORD + item.sample] = place
        self.published_count += len(copied)

    def close(self) -> None:
        """Give the memory back, once every reader has unmapped it, too. Takes 0.16 s a GiB: for a thread."""
        self._words.release()
        self._bytes.release()  # the last view: unmaps
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self._fd, self.read_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self.read_fd = -1


def make_cache_arena(sample_count: int, budget_bytes: int, memory_bytes: int) -> CacheArena:
    """Return an arena that may become as large as the node's memory, or where addresses run out, as its budget.

    With 2 TiB of memory 60 caches take all addresses that a process has.
    """
    try:
        return CacheArena(sample_count, budget_bytes, memory_bytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return CacheArena(sample_count, budget_bytes, -(-budget_bytes // PAGE_BYTES) * PAGE_BYTES)
