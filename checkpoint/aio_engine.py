"""The engine on kernel AIO, for O_DIRECT files: up to `queue_depth` blocks of one transfer in flight."""

import time

from .arena_map import ArenaMaps
from .block_flight import Flight
from .block_io import open_span
from .engine import EngineConfig, EngineKind, Progress, Transfer, TransferDone, no_progress
from .kernel_aio import AioContext


class AioEngine:
    """An `Engine` on kernel AIO.

    Every call lets go of the GIL once per batch of blocks, not per block: with a busy thread beside it,
    getting the GIL back is what costs: Python hands it over only after a switch interval.

    Raises:
        OSError: no kernel AIO here (see `AioContext`).
    """

    name = EngineKind.AIO.value

    def __init__(self, config: EngineConfig | None = None, *, on_progress: Progress = no_progress) -> None:
        self._config = config or EngineConfig()
        self._on_progress = on_progress
        self._context = AioContext(self._config.queue_depth)
        self._maps = ArenaMaps()

    def run(self, transfer: Transfer) -> TransferDone:
        """Move every byte, see `Engine.run`."""
        started_s = time.perf_counter()
        if transfer.length_bytes:
            span = open_span(transfer, self._maps)
            Flight(self._context, span, self._config.block_size_bytes).run(self._on_progress)
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=time.perf_counter() - started_s)

    def forget(self, arena_fd: int) -> None:
        """Unmap the arena."""
        self._maps.forget(arena_fd)

    def close(self) -> None:
        """Give the kernel's context back and unmap every arena."""
        self._context.close()
        self._maps.close()
