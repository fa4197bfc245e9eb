"""Prometheus metrics of the data socket: what clients ask, how long answers take, and how late the event loop is."""

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from ...core.errors import ERROR_CODES

if TYPE_CHECKING:
    from .metrics import Maker

_ANSWER_BUCKETS_S = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_DELAY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LOOK_EVERY_S = 1.0


class SocketMetrics:
    """Labels are the kinds of frames, of which there are some forty (proto/frames.py)."""

    def __init__(self, make: "Maker") -> None:
        self._asked_total = make.counter("requests", "Frames that clients of the data socket sent", "request")
        self.refused_total = make.counter("requests_refused", "Requests answered with an error", "reason")
        for code in ERROR_CODES:
            self.refused_total.labels(code)
        self._answer_s = make.histogram(
            "request_duration_seconds",
            "Answering the requests that are not answered at once, refusals included",
            _ANSWER_BUCKETS_S,
            "request",
        )
        self._answering = make.gauge("requests_answering", "Requests that wait for their answer now")
        self._delay_s = make.histogram(
            "event_loop_delay_seconds",
            "How much later than asked for the event loop called back; looked at once a second",
            _DELAY_BUCKETS_S,
        )
        self._asked: dict[str, Counter] = {}
        self._answers: dict[str, Histogram] = {}

    def asked(self, request: str) -> None:
        """Count a frame; on the event loop only."""
        counter = self._asked.get(request)
        if counter is None:
            counter = self._asked[request] = self._asked_total.labels(request)
        counter.inc()

    @contextlib.contextmanager
    def answering(self, request: str) -> Generator[None]:
        """Measure the block that answers a request; on the event loop only."""
        histogram = self._answers.get(request)
        if histogram is None:
            histogram = self._answers[request] = self._answer_s.labels(request)
        began_s = time.monotonic()
        self._answering.inc()
        try:
            yield
        finally:
            self._answering.dec()
            histogram.observe(time.monotonic() - began_s)

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure how late callbacks are for as long as the loop runs."""
        due_s = loop.time() + _LOOK_EVERY_S

        def look() -> None:
            self._delay_s.observe(max(0.0, loop.time() - due_s))
            self.watch_loop(loop)

        loop.call_at(due_s, look)
