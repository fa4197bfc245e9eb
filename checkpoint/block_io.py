"""What every engine does alike: check a transfer, go on after a short completion, say where it failed."""

import errno
import fcntl
import os
from dataclasses import dataclass

from .arena_map import ArenaMap, ArenaMaps
from .direct_io import ASSUMED_ALIGNMENT
from .engine import Transfer, TransferKind
from .linux import DioAlignment, dio_alignment

_BUFFERED = DioAlignment(memory_bytes=1, offset_bytes=1)

NOT_NOW = frozenset({errno.EINTR, errno.EAGAIN})
"""The kernel put a block off, with nothing moved: that says nothing of the device, and the block is asked for again."""

ASKED_AGAIN_MAX = 1000
"""Times in a row that one block is: at least a second with the pauses. Then it is an error like any other."""

ASK_AGAIN_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A checked transfer with its arena mapped. Positions count from the transfer's first byte."""

    transfer: Transfer
    arena: ArenaMap
    alignment_bytes: int
    """Of positions and lengths; 1 through the page cache."""
    io_length_bytes: int
    """What is asked of the kernel: the transfer's length, for a direct read rounded up to the alignment."""

    def block_size_bytes(self, wanted_bytes: int) -> int:
        """Return the block size to use: the wanted one, rounded up to the file's alignment."""
        return -(-wanted_bytes // self.alignment_bytes) * self.alignment_bytes

    def progress(self, position_bytes: int, asked_bytes: int, moved_bytes: int) -> int:
        """Return how far a block that was asked for at `position_bytes` has come, after the kernel moved some.

        `asked_bytes` when it is finished. Less after a short completion: a multiple of the alignment, from
        where the rest must be asked for again (a direct transfer cannot go on in the middle of a sector).

        Raises:
            OSError: nothing usable moved: ENODATA for a read (the file ends here), EIO for a write.
        """
        assert 0 <= moved_bytes <= asked_bytes
        if moved_bytes == asked_bytes or position_bytes + moved_bytes >= self.transfer.length_bytes:
            return asked_bytes
        usable_bytes = moved_bytes - moved_bytes % self.alignment_bytes
        if usable_bytes:
            return usable_bytes
        at_bytes = self.transfer.file_offset_bytes + position_bytes + moved_bytes
        if self.transfer.kind is TransferKind.READ:
            end_bytes = self.transfer.file_offset_bytes + self.transfer.length_bytes
            raise OSError(
                errno.ENODATA, f"the file ends at byte {at_bytes}, asked for were bytes to {end_bytes}"
            )
        raise OSError(errno.EIO, f"the file took nothing more at byte {at_bytes}")

    def failure(self, error_number: int, position_bytes: int, length_bytes: int) -> OSError:
        """Return the error of one block: errno, and where in the file."""
        offset_bytes = self.transfer.file_offset_bytes + position_bytes
        return OSError(
            error_number,
            f"{self.transfer.kind.value} of {length_bytes} bytes at byte {offset_bytes}: {os.strerror(error_number)}",
        )


def open_span(transfer: Transfer, maps: ArenaMaps) -> Span:
    """Return the transfer, checked, with its arena mapped.

    Raises:
        ValueError: misaligned for this file, or not within the arena.
        OSError: one of the fds is not open (EBADF), or the arena cannot be mapped so.
    """
    alignment = _alignment_of(transfer.file_fd)
    unit_bytes = max(alignment.memory_bytes, alignment.offset_bytes)
    reading = transfer.kind is TransferKind.READ
    io_length_bytes = (
        -(-transfer.length_bytes // unit_bytes) * unit_bytes if reading else transfer.length_bytes
    )
    if (transfer.arena_offset_bytes | transfer.file_offset_bytes | io_length_bytes) % unit_bytes:
        raise ValueError(f"direct I/O on this file needs multiples of {unit_bytes} bytes: {transfer}")
    end_bytes = transfer.arena_offset_bytes + io_length_bytes
    arena_size_bytes = os.fstat(transfer.arena_fd).st_size
    if end_bytes > arena_size_bytes:
        raise ValueError(
            f"the transfer needs the arena to byte {end_bytes}, it has {arena_size_bytes}: {transfer}"
        )
    return Span(
        transfer=transfer,
        arena=maps.get(transfer.arena_fd, writable=reading),
        alignment_bytes=unit_bytes,
        io_length_bytes=io_length_bytes,
    )


def _alignment_of(file_fd: int) -> DioAlignment:
    if not fcntl.fcntl(file_fd, fcntl.F_GETFL) & os.O_DIRECT:
        return _BUFFERED
    told = dio_alignment(file_fd)
    return told if told is not None and told.is_possible else ASSUMED_ALIGNMENT
