"""The engine that works everywhere: one pwrite or pread after the other, for any file."""

import os
import time

from .arena_map import ArenaMaps
from .block_io import ASK_AGAIN_PAUSE_S, ASKED_AGAIN_MAX, NOT_NOW, Span, open_span
from .engine import EngineConfig, EngineKind, Progress, Transfer, TransferDone, TransferKind, no_progress


class PlainEngine:
    """An `Engine` that copies through the page cache, or block by block where the file is direct."""

    name = EngineKind.PLAIN.value

    def __init__(self, config: EngineConfig | None = None, *, on_progress: Progress = no_progress) -> None:
        self._config = config or EngineConfig()
        self._on_progress = on_progress
        self._maps = ArenaMaps()

    def run(self, transfer: Transfer) -> TransferDone:
        """Move every byte, see `Engine.run`."""
        started_s = time.perf_counter()
        if transfer.length_bytes:
            self._move(open_span(transfer, self._maps))
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=time.perf_counter() - started_s)

    def _move(self, span: Span) -> None:
        block_size_bytes = span.block_size_bytes(self._config.block_size_bytes)
        position_bytes = 0
        while position_bytes < span.io_length_bytes:
            asked_bytes = min(block_size_bytes, span.io_length_bytes - position_bytes)
            moved_bytes = _move_block(span, position_bytes, asked_bytes)
            position_bytes += span.progress(position_bytes, asked_bytes, moved_bytes)
            self._on_progress(position_bytes)

    def forget(self, arena_fd: int) -> None:
        """Unmap the arena."""
        self._maps.forget(arena_fd)

    def close(self) -> None:
        """Unmap every arena."""
        self._maps.close()


def _move_block(span: Span, position_bytes: int, length_bytes: int) -> int:
    """Return how many bytes the kernel moved, asked again while it puts the block off."""
    for _ in range(ASKED_AGAIN_MAX):
        try:
            return _move_once(span, position_bytes, length_bytes)
        except OSError as exc:
            if exc.errno not in NOT_NOW:
                raise
            time.sleep(ASK_AGAIN_PAUSE_S)
    return _move_once(span, position_bytes, length_bytes)


def _move_once(span: Span, position_bytes: int, length_bytes: int) -> int:
    transfer = span.transfer
    begin_bytes = transfer.arena_offset_bytes + position_bytes
    offset_bytes = transfer.file_offset_bytes + position_bytes
    with span.arena.view[begin_bytes : begin_bytes + length_bytes] as block:
        try:
            if transfer.kind is TransferKind.WRITE:
                return os.pwrite(transfer.file_fd, block, offset_bytes)
            return os.preadv(transfer.file_fd, [block], offset_bytes)
        except OSError as exc:
            raise span.failure(exc.errno or 0, position_bytes, length_bytes) from exc
