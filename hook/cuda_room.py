"""Memory of a CUDA device for copies on it: only what neither training nor its allocator's cache holds.

What torch's caching allocator has reserved and not allocated at a boundary is where the next forward pass puts its
activations. So it does not count as free here, and is never taken: copies live in the side stream's own part of the
cache. Training does not use that, but torch gives it back to the driver when training would run out of memory.
"""

from dataclasses import dataclass
from typing import cast

import torch

RESERVE_BYTES_MIN = 1024**3
RESERVE_SHARE = 16
"""One part in so many of the device, or RESERVE_BYTES_MIN, stays free beside a copy: for longer batches, NCCL, …"""


@dataclass(frozen=True, slots=True)
class _Allocator:
    """Events of torch's allocator on one device, counted since the process began."""

    freed: int
    """Times that memory went back to the driver: all of a cache may be gone."""
    short: int
    """Times that the driver refused: then torch empties its caches and tries again, or raises."""


class CudaRoom:
    """What copies on one device may take. Used by the training thread."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Copies are written on `stream`, and read there or on streams that it waits for."""
        self._device, self._stream = device, stream
        self._kept_bytes = 0
        """The last copy's memory: it is in the stream's part of the cache unless something was freed since."""
        self._then: _Allocator | None = None
        """As that copy was given its memory."""

    def free_bytes(self, needed_bytes: int) -> int:
        """Return how much a copy of `needed_bytes` may take; negative where less than the reserve is free."""
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        free = min(free, allowed - torch.cuda.memory_reserved(self._device))
        if (
            self._then is not None
            and self._then.freed == self._now().freed
            and needed_bytes <= self._kept_bytes
        ):
            free += self._kept_bytes
        return free - max(RESERVE_BYTES_MIN, total // RESERVE_SHARE)

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """Return so much memory; None where there is none but what training will need.

        It may be let go by any thread, once what the stream does with it has been enqueued.
        """
        before = self._now()
        try:
            with torch.cuda.stream(self._stream):
                taken = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            self._then = None
            return None
        self._then, self._kept_bytes = self._now(), size_bytes
        return taken if self._then == before else None  # else torch has emptied training's cache for it

    def became_short(self) -> bool:
        """Tell, once, whether memory ran short since the last copy took some: beside it, or soon after."""
        then = self._then
        if then is None or then.short == (now := self._now()).short:
            return False
        self._then = _Allocator(then.freed, now.short)
        return True

    def _now(self) -> _Allocator:
        counts = cast("dict[str, int]", torch.cuda.memory_stats(self._device))
        return _Allocator(counts["num_device_free"], counts["num_alloc_retries"] + counts["num_ooms"])
