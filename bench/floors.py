"""What a snapshot must do at least, in one thread with nothing around it: a mark for what everstep costs beside it.

As cheap as we know how: checksums of what the copy is about to read, a copy that leaves the processor's caches alone,
into memory in huge pages, written in large pieces.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import xxhash
from gpt import Job

from everstep.checkpoint.direct_io import alignment_in
from everstep.core.advice import address_of
from everstep.core.huge_pages import take_huge_pages
from everstep.core.mapping import map_shared
from everstep.hook.tensor_bytes import copy_bytes, pinned

PIECE_BYTES = 256 * 1024
"""In the cache from the checksum to the copy."""
WRITE_BYTES = 8 * 1024 * 1024


class CheckedCopy:
    """The state copied with a checksum of all bytes: what any snapshot costs that is verified when it is read again."""

    def __init__(self, job: Job) -> None:
        """Take the memory for it, as the daemon does."""
        self._job = job
        size_bytes = sum(each.nbytes for each in job.tensors())
        self.size_bytes = -(-size_bytes // WRITE_BYTES) * WRITE_BYTES
        memfd = os.memfd_create("floor")
        try:
            self.view = map_shared(memfd, self.size_bytes, is_writable=True)
            os.truncate(memfd, self.size_bytes)
            take_huge_pages(memfd, self.view, 0, self.size_bytes)
        finally:
            os.close(memfd)

    def __call__(self) -> None:
        """Copy, and take the checksum."""
        for _ in self.copied():
            pass

    def copied(self) -> Iterator[int]:
        """Copy piece by piece; yield how many bytes are there."""
        base, at, checksum = address_of(self.view), 0, xxhash.xxh3_64()
        for source in self._job.tensors():
            with pinned(source) as octets:
                for begin in range(0, source.nbytes, PIECE_BYTES):
                    piece = octets[begin : begin + PIECE_BYTES]
                    checksum.update(piece)
                    copy_bytes(base + at, source.data_ptr() + begin, piece.nbytes)
                    at += piece.nbytes
                    yield at


class WrittenCopy:
    """The same, written over a file that is there, with O_DIRECT where possible, and synced: what any checkpoint costs
    that is durable. No manifest, no name, no second one to go back to."""

    def __init__(self, job: Job, path: Path) -> None:
        """Write it for the first time."""
        self._copy = CheckedCopy(job)
        direct = os.O_DIRECT if alignment_in(path.parent) is not None else 0
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | direct, 0o600)
        os.posix_fallocate(self._fd, 0, self._copy.size_bytes)
        self()

    def __call__(self) -> None:
        """Copy, take the checksum, write, and wait until it is durable."""
        written_bytes = 0
        for copied_bytes in self._copy.copied():
            while copied_bytes - written_bytes >= WRITE_BYTES:
                written_bytes += self._write(written_bytes)
        while written_bytes < self._copy.size_bytes:
            written_bytes += self._write(written_bytes)
        os.fdatasync(self._fd)

    def _write(self, offset_bytes: int) -> int:
        return os.pwrite(self._fd, self._copy.view[offset_bytes : offset_bytes + WRITE_BYTES], offset_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
