"""What shared preparation tells Prometheus."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..control.metrics import Maker

_WAIT_BUCKETS_S = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class ShareMetrics:
    """Over all groups."""

    def __init__(self, make: "Maker") -> None:
        self.jobs = make.gauge("share_jobs", "Jobs that take part in shared preparation")
        self.bytes = make.gauge("share_bytes", "Bytes of prepared batches and of what jobs stage them in")
        self.published_total = make.counter(
            "share_batches_published", "Batches that were kept for other jobs"
        )
        self.taken_total = make.counter("share_batches_taken", "Batches that a job was given")
        self.private_total = make.counter(
            "share_private_answers", "Times that a job was told to prepare batches for itself"
        )
        self.expired_total = make.counter("share_leases_expired", "Leases that took longer than their time")
        self.refused_total = make.counter(
            "share_publications_refused", "Prepared batches that did not hold or had no room"
        )
        self.wait_s = make.histogram(
            "share_wait_duration_seconds",
            "Time that a job waited for the batch it asked for, or to be told to prepare it itself",
            _WAIT_BUCKETS_S,
        )
