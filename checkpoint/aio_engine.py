"""The engine for O_DIRECT files: up to `queue_depth` blocks of one transfer in flight, from one thread."""

import logging
import time

from .arena_map import ArenaMaps
from .block_io import Span, open_span
from .engine import EngineConfig, EngineKind, Progress, Transfer, TransferDone, TransferKind, no_progress
from .kernel_aio import AioContext, Opcode

_log = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""A device that completes nothing for so long is reported in the log; the kernel's own timeout is 30 s."""

_OPCODES = {TransferKind.WRITE: Opcode.WRITE, TransferKind.READ: Opcode.READ}


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
            _Flight(self._context, span, self._config.block_size_bytes).run(self._on_progress)
        return TransferDone(bytes_moved=transfer.length_bytes, busy_s=time.perf_counter() - started_s)

    def forget(self, arena_fd: int) -> None:
        """Unmap the arena."""
        self._maps.forget(arena_fd)

    def close(self) -> None:
        """Give the kernel's context back and unmap every arena."""
        self._context.close()
        self._maps.close()


class _Flight:
    """One transfer under way. A slot is free, prepared (again, after a short completion) or in flight."""

    def __init__(self, context: AioContext, span: Span, block_size_bytes: int) -> None:
        self._context = context
        self._span = span
        self._block_size_bytes = span.block_size_bytes(block_size_bytes)
        self._opcode = _OPCODES[span.transfer.kind]
        self._free = list(range(context.depth))
        self._prepared: list[int] = []
        self._positions = [0] * context.depth
        self._lengths = [0] * context.depth
        self._next_bytes = 0
        self._moved_bytes = 0

    def run(self, on_progress: Progress) -> None:
        """Move every byte; whatever happens, nothing is in flight afterwards."""
        try:
            while self._moved_bytes < self._span.io_length_bytes:
                self._fill()
                taken = self._submit()
                del self._prepared[:taken]
                for slot, result in self._reap():
                    self._complete(slot, result)
                on_progress(self._moved_bytes)
        finally:
            while self._context.in_flight:
                _wait(self._context, self._context.in_flight)

    def _fill(self) -> None:
        while self._free and self._next_bytes < self._span.io_length_bytes:
            length_bytes = min(self._block_size_bytes, self._span.io_length_bytes - self._next_bytes)
            self._prepare(self._free.pop(), self._next_bytes, length_bytes)
            self._next_bytes += length_bytes

    def _prepare(self, slot: int, position_bytes: int, length_bytes: int) -> None:
        transfer = self._span.transfer
        self._positions[slot] = position_bytes
        self._lengths[slot] = length_bytes
        self._context.prepare(
            slot,
            self._opcode,
            file_fd=transfer.file_fd,
            address=self._span.arena.address + transfer.arena_offset_bytes + position_bytes,
            length_bytes=length_bytes,
            offset_bytes=transfer.file_offset_bytes + position_bytes,
        )
        self._prepared.append(slot)

    def _submit(self) -> int:
        try:
            return self._context.submit(self._prepared)
        except OSError as exc:
            first = self._prepared[0]
            raise self._span.failure(exc.errno or 0, self._positions[first], self._lengths[first]) from exc

    def _reap(self) -> list[tuple[int, int]]:
        # A quarter at a time: few passages through the GIL, and three quarters keep the device busy meanwhile.
        return _wait(self._context, max(1, self._context.in_flight // 4))

    def _complete(self, slot: int, result: int) -> None:
        position_bytes, asked_bytes = self._positions[slot], self._lengths[slot]
        if result < 0:
            raise self._span.failure(-result, position_bytes, asked_bytes)
        done_bytes = self._span.progress(position_bytes, asked_bytes, result)
        self._moved_bytes += done_bytes
        if done_bytes == asked_bytes:
            self._free.append(slot)
        else:
            self._prepare(slot, position_bytes + done_bytes, asked_bytes - done_bytes)


def _wait(context: AioContext, min_count: int) -> list[tuple[int, int]]:
    """Return completions, at least one; there is no giving up, since the kernel holds the arena's memory."""
    while True:
        done = context.reap(min_count, timeout_s=_SILENCE_S)
        if done:
            return done
        _log.warning("device_silent engine=aio in_flight=%d silent_s=%.0f", context.in_flight, _SILENCE_S)
