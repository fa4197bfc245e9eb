"""Prometheus metrics of what comes back."""

import threading
import time
from typing import TYPE_CHECKING

from ...core.errors import ERROR_CODES

if TYPE_CHECKING:
    from .metrics import Maker

_SOURCES = ("memory", "disk")
_RESTORE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_FIRST_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class RestoreMetrics:
    """Shards that come back."""

    def __init__(self, make: "Maker") -> None:
        self.restored_total = make.counter(
            "restores", "Shards that trainers have taken whole, every byte verified", "source"
        )
        for source in _SOURCES:
            self.restored_total.labels(source)
        self.failed_total = make.counter("restores_failed", "Shards that failed verification", "reason")
        for code in ERROR_CODES:
            self.failed_total.labels(code)
        self.streaming = make.gauge("restores_streaming", "Shards on their way from the devices to trainers")
        self.streamed_bytes = make.counter(
            "restore_streamed_bytes", "Bytes read from devices and handed to trainers"
        )
        self.first_s = make.histogram(
            "restore_first_chunk_duration_seconds",
            "From a trainer's request to the first verified chunk in its memory",
            _FIRST_BUCKETS_S,
        )
        self.restore_s = make.histogram(
            "restore_duration_seconds",
            "Reading a shard from the devices, from the first byte asked for to the last one handed over",
            _RESTORE_BUCKETS_S,
        )

    def begin(self) -> "MeasuredRestore":
        """Return what hears of one shard on its way."""
        return MeasuredRestore(self)


class MeasuredRestore:
    """One shard's way from the devices. The reading threads call `delivered`, the event loop everything else."""

    def __init__(self, metrics: RestoreMetrics) -> None:
        self._metrics = metrics
        self._asked_s = self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._has_delivered = False
        metrics.streaming.inc()

    def reading(self) -> None:
        """The trainer is ready."""
        self._began_s = time.monotonic()

    def delivered(self, size_bytes: int) -> None:
        """A chunk is verified and in the ring."""
        self._metrics.streamed_bytes.inc(size_bytes)
        with self._lock:
            is_first, self._has_delivered = not self._has_delivered, True
        if is_first:
            self._metrics.first_s.observe(time.monotonic() - self._asked_s)

    def done(self) -> None:
        """All that was asked for has been handed over."""
        self._metrics.restore_s.observe(time.monotonic() - self._began_s)

    def close(self) -> None:
        """The trainer wants no more, or is gone."""
        self._metrics.streaming.dec()
