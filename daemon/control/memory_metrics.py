"""Prometheus metrics of making arenas."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .metrics import Maker

_ALLOCATION_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class MemoryMetrics:
    """Their quotient, in s/GiB, is what the node's memory costs: 0.4 to 5 (docs/metrics.md)."""

    def __init__(self, make: "Maker") -> None:
        self._allocation_s = make.histogram(
            "arena_allocation_duration_seconds",
            "Allocating and touching the memory of an arena",
            _ALLOCATION_BUCKETS_S,
        )
        self._allocated_bytes = make.counter("arena_allocated_bytes", "Bytes of the arenas that were made")

    def allocated(self, size_bytes: int, allocation_s: float) -> None:
        """An arena is ready."""
        self._allocation_s.observe(allocation_s)
        self._allocated_bytes.inc(size_bytes)
