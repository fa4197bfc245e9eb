"""One cache arena: a memfd that only this daemon writes, through a mapping made before it was sealed.

What clients get is a descriptor opened for reading. The seals hold for whoever opens the memfd again through /proc:
no write, no writable mapping, no hole, no other size (ADR 0045). So nobody's access ever faults.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from ...checkpoint import linux
from ...dataloader.cache.arena_format import (
    INDEX_WORD,
    RECORD_HEAD_BYTES,
    WORD_BYTES,
    Header,
    record_bytes,
    write_header,
)
from .space_plan import Refusal, Space

if TYPE_CHECKING:
    from .staging import Staging

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | linux.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One sample in a client's staging."""

    sample: int
    offset_bytes: int
    length: int
    digest: int


CopyResult = tuple[list[tuple[Item, int]], list[tuple[Item, Refusal]]]
"""What was copied, with its place, and what was not, with the reason."""


class CacheArena:
    """Owned by the event loop; `copy` alone runs in a thread, one at a time."""

    def __init__(self, sample_count: int, limit_bytes: int, file_bytes: int) -> None:
        """Make the memfd, none of whose pages is there yet, with room for more than the budget, which may grow."""
        self.space = Space(sample_count=sample_count, limit_bytes=limit_bytes)
        self.file_bytes = file_bytes
        self.published_count = 0
        self._fd = os.memfd_create("everstep-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.read_fd = -1
        try:
            os.ftruncate(self._fd, file_bytes)
            os.fchmod(self._fd, 0o400)
            self._map = mmap.mmap(self._fd, file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self.read_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._close_descriptors()
            raise
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")

    def allocate(self, end_bytes: int) -> None:
        """Have all pages up to there; for a thread. OSError where the kernel has none."""
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

    def copy(self, staging: "Staging", items: Sequence[Item]) -> CopyResult:
        """Copy as many of these samples as there are pages for; return (sample, place) and (sample, why not) of those.

        For a thread. What was copied is not published yet. A sample whose bytes are not what its digest says leaves
        no trace: the next one is copied over it. `items` must not be there, nor name a sample twice.
        """
        copied: list[tuple[Item, int]] = []
        refused: list[tuple[Item, Refusal]] = []
        for item in items:
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

    def _copy(self, staging: "Staging", item: Item) -> bool:
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
        self._bytes.release()
        self._map.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self._fd, self.read_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self.read_fd = -1
