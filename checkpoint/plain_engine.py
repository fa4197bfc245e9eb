"""The engine that works everywhere: pwrite and pread from a few threads, for any file."""

import contextlib
import os
import threading
import time

from .arena_map import ArenaMaps
from .block_io import ASK_AGAIN_PAUSE_S, ASKED_AGAIN_MAX, NOT_NOW, Span, open_span
from .engine import EngineConfig, EngineKind, Progress, Transfer, TransferDone, TransferKind, no_progress

THREADS_MAX = 4
"""Calls at once, of which the caller's thread makes one. A device queue has several such engines; more threads would
stand in each other's way at the lock that writing holds on a file."""


class PlainEngine:
    """An `Engine` that copies through the page cache, or block by block where the file is direct."""

    name = EngineKind.PLAIN.value

    def __init__(self, config: EngineConfig | None = None, *, on_progress: Progress = no_progress) -> None:
        self._config = config or EngineConfig()
        self._on_progress = on_progress
        self._maps = ArenaMaps()
        self._thread_count = min(THREADS_MAX, self._config.queue_depth)

    def run(self, transfer: Transfer) -> TransferDone:
        """Move every byte, see `Engine.run`."""
        started_s = time.perf_counter()
        if transfer.length_bytes:
            self._move(open_span(transfer, self._maps))
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=time.perf_counter() - started_s)

    def _move(self, span: Span) -> None:
        blocks = _Blocks(span, span.block_size_bytes(self._config.block_size_bytes), self._on_progress)
        # Threads of this transfer alone: an engine that is idle has none. Where no more are to be had, fewer move it.
        helpers: list[threading.Thread] = []
        with contextlib.suppress(RuntimeError):
            for _ in range(min(self._thread_count, blocks.count) - 1):
                helper = threading.Thread(target=blocks.move_all, name="everstep-plain")
                helper.start()
                helpers.append(helper)
        blocks.move_all()
        for helper in helpers:
            helper.join()
        blocks.raise_error()

    def forget(self, arena_fd: int) -> None:
        """Unmap the arena."""
        self._maps.forget(arena_fd)

    def close(self) -> None:
        """Unmap every arena."""
        self._maps.close()


class _Blocks:
    """The blocks of one transfer, which several threads take in their order."""

    def __init__(self, span: Span, block_size_bytes: int, on_progress: Progress) -> None:
        self._span, self._size_bytes, self._on_progress = span, block_size_bytes, on_progress
        self._positions = iter(range(0, span.io_length_bytes, block_size_bytes))
        self._lock = threading.Lock()
        self._moved_bytes = 0
        self._errors: dict[int, BaseException] = {}
        """By position of the block."""

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-self._span.io_length_bytes // self._size_bytes)

    def move_all(self) -> None:
        """Move one block after the other until none is left or one has failed."""
        while (position_bytes := self._next()) is not None:
            length_bytes = min(self._size_bytes, self._span.io_length_bytes - position_bytes)
            try:
                _move_block(self._span, position_bytes, length_bytes)
            except BaseException as error:  # noqa: BLE001 - raised by whoever runs the transfer
                self._errors[position_bytes] = error
            else:
                with self._lock:
                    self._moved_bytes += length_bytes
                    self._on_progress(self._moved_bytes)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._errors else next(self._positions, None)

    def raise_error(self) -> None:
        """Raise the error of the first block in the file that failed, if any did."""
        if self._errors:
            raise self._errors[min(self._errors)]


def _move_block(span: Span, position_bytes: int, length_bytes: int) -> None:
    """Move a block, with as many calls as the kernel wants."""
    moved_bytes = 0
    while moved_bytes < length_bytes:
        at_bytes, left_bytes = position_bytes + moved_bytes, length_bytes - moved_bytes
        moved_bytes += span.progress(at_bytes, left_bytes, _ask(span, at_bytes, left_bytes))


def _ask(span: Span, position_bytes: int, length_bytes: int) -> int:
    """Return how many bytes the kernel moved, asked again while it puts the block off."""
    for _ in range(ASKED_AGAIN_MAX):
        try:
            return _ask_once(span, position_bytes, length_bytes)
        except OSError as exc:
            if exc.errno not in NOT_NOW:
                raise
            time.sleep(ASK_AGAIN_PAUSE_S)
    return _ask_once(span, position_bytes, length_bytes)


def _ask_once(span: Span, position_bytes: int, length_bytes: int) -> int:
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
