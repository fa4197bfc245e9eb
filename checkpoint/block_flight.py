"""One transfer under way on an asynchronous queue of the kernel, from one thread: cut, submit, reap, go on."""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from .block_io import ASK_AGAIN_PAUSE_S, ASKED_AGAIN_MAX, NOT_NOW, Span
from .engine import Progress, TransferKind

_log = logging.getLogger(__name__)

FIRST_BLOCKS = 16
"""Of a transfer these go ahead: the device begins while the kernel pins the pages of the rest, 1 ms for 10 MiB. With
32 devices on 2 cores the last one began 0.25 s after the first."""

_SILENCE_S = 10.0
"""A device that completes nothing for so long is reported in the log; the kernel's own timeout is 30 s."""


class BlockQueue(Protocol):
    """A queue of the kernel with `depth` request slots, numbered from 0; one thread uses it at a time.

    A slot belongs to the caller until `submit` accepts it and again after `reap` returned it. Memory and
    file of an accepted slot belong to the kernel until then.
    """

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    @property
    def depth(self) -> int:
        """Number of slots."""
        ...

    @property
    def in_flight(self) -> int:
        """Number of slots that were accepted and have not been reaped."""
        ...

    def prepare(
        self,
        slot: int,
        kind: TransferKind,
        *,
        file_fd: int,
        address: int,
        length_bytes: int,
        offset_bytes: int,
    ) -> None:
        """Fill a free slot; nothing happens before `submit`."""
        ...

    def submit(self, slots: Sequence[int]) -> int:
        """Accept prepared slots, in order; return how many. Fewer than given: reap, then submit the rest.

        Raises:
            OSError: the first slot that was not accepted is refused for good; those before it are in flight.
        """
        ...

    def reap(self, min_count: int, *, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for completions; return (slot, bytes moved or negative errno) of each.

        At least `min_count`, or all that are in flight, unless the time is over; as many more as are ready.
        """
        ...


class Flight:
    """One transfer under way. A slot is free, prepared (again, after a short or refused one) or in flight."""

    def __init__(self, queue: BlockQueue, span: Span, block_size_bytes: int) -> None:
        self._queue = queue
        self._span = span
        self._block_size_bytes = span.block_size_bytes(block_size_bytes)
        self._free = list(range(queue.depth))
        self._prepared: list[int] = []
        self._positions = [0] * queue.depth
        self._lengths = [0] * queue.depth
        self._asked_again = [0] * queue.depth
        self._next_bytes = 0
        self._moved_bytes = 0

    def run(self, on_progress: Progress) -> None:
        """Move every byte; whatever happens, nothing is in flight afterwards."""
        try:
            while self._moved_bytes < self._span.io_length_bytes:
                self._fill()
                taken = self._submit()
                del self._prepared[:taken]
                done = self._reap()
                for slot, result in done:
                    self._complete(slot, result)
                if any(-result in NOT_NOW for _, result in done):
                    time.sleep(ASK_AGAIN_PAUSE_S)
                on_progress(self._moved_bytes)
        finally:
            while self._queue.in_flight:
                _wait(self._queue, self._queue.in_flight)

    def _fill(self) -> None:
        left = max(len(self._free) - FIRST_BLOCKS, 0) if self._next_bytes == 0 else 0
        while len(self._free) > left and self._next_bytes < self._span.io_length_bytes:
            length_bytes = min(self._block_size_bytes, self._span.io_length_bytes - self._next_bytes)
            self._prepare(self._free.pop(), self._next_bytes, length_bytes)
            self._next_bytes += length_bytes

    def _prepare(self, slot: int, position_bytes: int, length_bytes: int) -> None:
        transfer = self._span.transfer
        self._positions[slot] = position_bytes
        self._lengths[slot] = length_bytes
        self._queue.prepare(
            slot,
            transfer.kind,
            file_fd=transfer.file_fd,
            address=self._span.arena.address + transfer.arena_offset_bytes + position_bytes,
            length_bytes=length_bytes,
            offset_bytes=transfer.file_offset_bytes + position_bytes,
        )
        self._prepared.append(slot)

    def _submit(self) -> int:
        before = self._queue.in_flight
        try:
            return self._queue.submit(self._prepared)
        except OSError as exc:
            refused = self._prepared[self._queue.in_flight - before]
            raise self._span.failure(
                exc.errno or 0, self._positions[refused], self._lengths[refused]
            ) from exc

    def _reap(self) -> list[tuple[int, int]]:
        # A quarter at a time: few passages through the GIL, and three quarters keep the device busy meanwhile. Once the
        # last block is under way nothing follows, so that one passage is enough.
        is_last = self._next_bytes >= self._span.io_length_bytes and not self._prepared
        in_flight = self._queue.in_flight
        return _wait(self._queue, in_flight if is_last else max(1, in_flight // 4))

    def _complete(self, slot: int, result: int) -> None:
        position_bytes, asked_bytes = self._positions[slot], self._lengths[slot]
        if -result in NOT_NOW and self._asked_again[slot] < ASKED_AGAIN_MAX:
            self._asked_again[slot] += 1
            self._prepare(slot, position_bytes, asked_bytes)
            return
        if result < 0:
            raise self._span.failure(-result, position_bytes, asked_bytes)
        self._asked_again[slot] = 0
        done_bytes = self._span.progress(position_bytes, asked_bytes, result)
        self._moved_bytes += done_bytes
        if done_bytes == asked_bytes:
            self._free.append(slot)
        else:
            self._prepare(slot, position_bytes + done_bytes, asked_bytes - done_bytes)


def _wait(queue: BlockQueue, min_count: int) -> list[tuple[int, int]]:
    """Return completions, at least one; there is no giving up, since the kernel holds the arena's memory."""
    while True:
        done = queue.reap(min_count, timeout_s=_SILENCE_S)
        if done:
            return done
        _log.warning(
            "device_silent engine=%s in_flight=%d silent_s=%.0f", queue.name, queue.in_flight, _SILENCE_S
        )
