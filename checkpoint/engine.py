"""The seam between the persist pipeline and what moves bytes: plain values in, plain values out.

An engine knows arena fds, file fds, offsets and lengths, nothing of segments, devices or paths; so the same
seam holds for an engine in a thread (`aio_engine`, `plain_engine`) and in a process (`engine_process`).
`engine_choice` says which one a directory gets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

BLOCK_SIZE_MULTIPLE_BYTES = 4096
QUEUE_DEPTH_MAX = 1024  # fs.aio-max-nr is 65,536 for the whole node

Progress = Callable[[int], None]
"""Called by an engine, one call at a time, with the bytes of the running transfer moved so far; must not block."""


class TransferKind(Enum):
    """Direction, seen from the file."""

    WRITE = "write"
    READ = "read"


class EngineKind(Enum):
    """How an engine asks the kernel."""

    AIO = "aio"
    """Kernel AIO: many blocks in flight from one thread; wants O_DIRECT."""
    URING = "uring"
    """io_uring: as AIO, and asynchronous for any file."""
    PLAIN = "plain"
    """pwrite and pread from a few threads; any file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Move one range between an arena and a file, as a whole; the engine cuts it into blocks.

    With a file opened with O_DIRECT, arena offset and file offset are multiples of the file's alignment, and
    so is the length of a write (the arena has zeros there; the caller cuts the file afterwards). The length
    of a read is exact in any case: it may end in the middle of a block, and then the arena's bytes up to the
    next multiple of the alignment may be overwritten too.
    """

    kind: TransferKind
    arena_fd: int
    arena_offset_bytes: int
    file_fd: int
    file_offset_bytes: int
    length_bytes: int

    def __post_init__(self) -> None:
        if self.arena_offset_bytes < 0 or self.file_offset_bytes < 0 or self.length_bytes < 0:
            raise ValueError(f"a transfer's offsets and length cannot be negative: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDone:
    """A transfer that moved every byte. Written bytes are not durable before the caller's fdatasync."""

    bytes_moved: int
    """The transfer's length."""
    busy_s: float
    """From the call to the last completion; bytes_moved / busy_s is the device's throughput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine cuts and overlaps."""

    block_size_bytes: int = 1024 * 1024
    """DeepNVMe's; larger blocks are cut by the kernel anyway."""
    queue_depth: int = 256
    """A drive is saturated by 8 to 32; the rest keeps it busy while another thread holds the GIL (ADR 0019)."""
    register_arenas: bool = False
    """io_uring: pin the pages of arenas once, not for each block. Saves CPU; ADR 0018 says when it costs speed."""

    def __post_init__(self) -> None:
        if self.block_size_bytes <= 0 or self.block_size_bytes % BLOCK_SIZE_MULTIPLE_BYTES:
            raise ValueError(
                f"block_size_bytes must be a multiple of {BLOCK_SIZE_MULTIPLE_BYTES}, got {self.block_size_bytes}"
            )
        if not 1 <= self.queue_depth <= QUEUE_DEPTH_MAX:
            raise ValueError(f"queue_depth must be 1 to {QUEUE_DEPTH_MAX}, got {self.queue_depth}")


class Engine(Protocol):
    """Moves bytes between arenas and files. One per device, used by one thread at a time."""

    @property
    def name(self) -> str:
        """What `everstep status` shows."""
        ...

    def run(self, transfer: Transfer) -> TransferDone:
        """Block until every byte has moved.

        After a return or a raise nothing touches the arena or the file any more, with the one exception below.

        Raises:
            OSError: errno of the first failed block, the message says where in the file; ENODATA: the file
                is shorter than the read. The caller adds the path. Which blocks of the range moved is unknown.
            ValueError: the transfer breaks the rules of `Transfer` or does not lie within the arena.
            StorageError: the engine's process ended or stood still and was ended; make a new engine.
            DeadlineError: its process could not be ended either (a device that hangs in the kernel): it may
                still write to or read from this range of the arena, which must not be used again.
        """
        ...

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena; call it before the arena's last fd is closed. An unknown one is nothing."""
        ...

    def close(self) -> None:
        """Release everything, including processes. Again is nothing."""
        ...


def no_progress(_bytes_moved: int) -> None:
    """Ignore progress: the default of engines that nobody watches."""
