"""What a snapshot must do at least, in one thread with nothing around it: a mark for what everstep costs beside it."""

import mmap
import os
from collections.abc import Iterator
from ctypes import memmove
from pathlib import Path
from typing import Self

import xxhash
from gpt import Job

from everstep.checkpoint.checksum import block_checksum
from everstep.checkpoint.direct_io import alignment_in
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES
from everstep.hook.tensor_bytes import BufferPin

PIECE_BYTES = 256 * 1024


class CheckedCopy:
    """The state copied with a checksum of all bytes, taken of each piece while it is in the cache: what any snapshot
    costs that is verified when it is read again."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._targets = [bytearray(each.nbytes) for each in job.tensors()]

    def __call__(self) -> None:
        """Copy, and take the checksum."""
        checksum = xxhash.xxh3_64()
        for target, source in zip(self._targets, self._job.tensors(), strict=True):
            pin = BufferPin(memoryview(target))
            for begin in range(0, source.nbytes, PIECE_BYTES):
                piece = memoryview(target)[begin : begin + PIECE_BYTES]
                memmove(pin.address + begin, source.data_ptr() + begin, piece.nbytes)
                checksum.update(piece)
            pin.release()


class WrittenCopy:
    """The same, and each block written over a file that is there, with O_DIRECT where that is possible, synced at the
    end: what any checkpoint costs that is durable. No manifest, no name, no second one to go back to."""

    def __init__(self, job: Job, path: Path) -> None:
        """Write it for the first time."""
        self._job = job
        size_bytes = sum(each.nbytes for each in job.tensors())
        self._size_bytes = -(-size_bytes // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES
        self._map = mmap.mmap(-1, self._size_bytes)  # whole pages, as O_DIRECT wants them
        self._view = memoryview(self._map)
        self._pin = BufferPin(self._view)
        direct = os.O_DIRECT if alignment_in(path.parent) is not None else 0
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | direct, 0o600)
        os.posix_fallocate(self._fd, 0, self._size_bytes)
        self()

    def __call__(self) -> None:
        """Copy, take the checksums, write, and wait until it is durable."""
        written_bytes = 0
        for copied_bytes in self._copied():
            while copied_bytes - written_bytes >= BLOCK_SIZE_BYTES:
                block = self._view[written_bytes : written_bytes + BLOCK_SIZE_BYTES]
                block_checksum(block)
                written_bytes += os.pwrite(self._fd, block, written_bytes)
        os.fdatasync(self._fd)

    def _copied(self) -> Iterator[int]:
        """Copy piece by piece; yield how many bytes are there, padding at the end included."""
        at = 0
        for source in self._job.tensors():
            for begin in range(0, source.nbytes, PIECE_BYTES):
                size_bytes = min(PIECE_BYTES, source.nbytes - begin)
                memmove(self._pin.address + at, source.data_ptr() + begin, size_bytes)
                at += size_bytes
                yield at
        yield self._size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._pin.release()
        self._view.release()
        self._map.close()
