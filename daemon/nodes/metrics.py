"""Prometheus metrics of the cache over several nodes: totals, without a label that names a peer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..control.metrics import Maker

_FETCH_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_FLOWS = ("fetched", "served", "offered", "taken")
FAILURES = ("deadline", "unreachable", "refused", "lied", "other")


class PeerMetrics:
    """What nodes ask of each other."""

    def __init__(self, make: "Maker") -> None:
        self.members = make.gauge(
            "cache_members", "Nodes that share caches, as this one knows; 0: it is alone"
        )
        self.left_alone = make.gauge("cache_peers_left_alone", "Peers that failed and are not asked now")
        self.samples = make.counter(
            "cache_peer_samples",
            "Samples fetched from peers, served to them, offered to their owners, taken in as their owner",
            "flow",
        )
        self.bytes = make.counter(
            "cache_peer_bytes", "Bytes of the samples that went to peers or came from them", "flow"
        )
        for flow in _FLOWS:
            self.samples.labels(flow)
            self.bytes.labels(flow)
        self.failures = make.counter("cache_peer_failures", "Calls of peers that failed", "reason")
        for reason in FAILURES:
            self.failures.labels(reason)
        self.passed_over = make.counter(
            "cache_peer_passed_over_samples",
            "Samples that were not asked of a peer because it had failed before",
        )
        self.given_up = make.counter(
            "cache_peer_given_up_samples",
            "Samples that could not be sent to their owner; it reads them itself",
        )
        self.disagreements = make.counter(
            "cache_peer_disagreements", "Calls of peers that go by another list of members"
        )
        self.fetch_seconds = make.histogram(
            "cache_peer_fetch_seconds", "Time of calls that fetched samples", _FETCH_BUCKETS_S
        )

    def count(self, flow: str, samples: int, size_bytes: int) -> None:
        """Add samples of one of the flows."""
        self.samples.labels(flow).inc(samples)
        self.bytes.labels(flow).inc(size_bytes)
