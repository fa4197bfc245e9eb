"""The engine on io_uring: as on kernel AIO, with submission and waiting in one call, and for any file."""

import time

from .arena_map import ArenaMap, ArenaMaps
from .block_flight import Flight
from .block_io import open_span
from .engine import EngineConfig, EngineKind, Progress, Transfer, TransferDone, no_progress
from .uring import Ring


class UringEngine:
    """An `Engine` on io_uring.

    A process that is killed may be reaped before its requests have ended, unlike one with kernel AIO. `held_fd`
    is a file that the ring holds until they have: who watches it from outside knows when all is quiet.

    Raises:
        OSError: no io_uring here (see `Ring`).
    """

    name = EngineKind.URING.value

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        on_progress: Progress = no_progress,
        held_fd: int | None = None,
    ) -> None:
        self._config = config or EngineConfig()
        self._on_progress = on_progress
        self._ring = Ring(self._config.queue_depth, held_fd=held_fd)
        self._buffers = self._ring.register_buffers() if self._config.register_arenas else None
        self._maps = ArenaMaps(on_unmap=self._unpin)

    def run(self, transfer: Transfer) -> TransferDone:
        """Move every byte, see `Engine.run`."""
        started_s = time.perf_counter()
        if transfer.length_bytes:
            span = open_span(transfer, self._maps)
            if self._buffers is not None:
                begin_bytes = transfer.arena_offset_bytes
                self._buffers.cover(span.arena, begin_bytes, begin_bytes + span.io_length_bytes)
            with self._ring.registered_file(transfer.file_fd):
                Flight(self._ring, span, self._config.block_size_bytes).run(self._on_progress)
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=time.perf_counter() - started_s)

    def _unpin(self, arena: ArenaMap) -> None:
        if self._buffers is not None:
            self._buffers.release(arena)

    def forget(self, arena_fd: int) -> None:
        """Unpin and unmap the arena."""
        self._maps.forget(arena_fd)

    def close(self) -> None:
        """Unpin and unmap every arena and give the ring back."""
        self._maps.close()
        self._ring.close()
