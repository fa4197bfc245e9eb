"""Prometheus metrics of the caches: totals of the node, without a label that names a dataset or a user."""

from typing import TYPE_CHECKING

from ...proto import frames
from .space_plan import Refusal

if TYPE_CHECKING:
    from ..control.metrics import Maker


class CacheMetrics:
    """What the caches hold, and what readers say of their use. The book sets the gauges."""

    def __init__(self, make: "Maker") -> None:
        self.bytes = make.gauge("cache_bytes", "Bytes used in all caches, their indexes included")
        self.allocated_bytes = make.gauge(
            "cache_allocated_bytes", "Bytes of memory that all caches take, of which cache_bytes are used"
        )
        self.budget_bytes = make.gauge("cache_budget_bytes", "Bytes that all caches may take")
        self.largest_user_bytes = make.gauge(
            "cache_largest_user_bytes", "Bytes of memory that the caches of the user who has most take"
        )
        self.short = make.gauge(
            "caches_short", "Caches that got less memory than their budget: everstep cache list says why"
        )
        self.samples = make.gauge("cache_samples", "Samples in all caches")
        self.caches = make.gauge("caches", "Caches, one for each dataset and user")
        self.clients = make.gauge("cache_clients", "Processes that read a cache")
        self.filled_total = make.counter("cache_filled_samples", "Samples put into caches")
        self.filled_bytes = make.counter("cache_filled_bytes", "Bytes of samples put into caches")
        self.known_total = make.counter(
            "cache_known_samples", "Samples that a second reader brought, too, and that were there already"
        )
        self.refused_total = make.counter("cache_refused_samples", "Samples not admitted", "reason")
        for refusal in Refusal:
            self.refused_total.labels(refusal.value)
        self.dropped_total = make.counter(
            "caches_dropped", "Caches without a reader that made room for another, or were dropped by hand"
        )
        self._reads = make.counter(
            "cache_reads", "Samples that readers asked for, as they report it", "source"
        )
        self._read_bytes = make.counter(
            "cache_read_bytes", "Bytes of the samples that readers asked for", "source"
        )
        for place in ("memory", "dataset", "peers"):
            self._reads.labels(place)
            self._read_bytes.labels(place)

    def add_use(self, use: frames.CacheUse) -> None:
        """Add what a reader has read since it told it last."""
        self._reads.labels("memory").inc(use.hit_count)
        self._reads.labels("dataset").inc(use.miss_count)
        self._read_bytes.labels("memory").inc(use.hit_bytes)
        self._read_bytes.labels("dataset").inc(use.miss_bytes)
        self._reads.labels("peers").inc(use.peer_count)
        self._read_bytes.labels("peers").inc(use.peer_bytes)
        self.refused_total.labels(Refusal.OVERSIZED.value).inc(use.oversized_count)
