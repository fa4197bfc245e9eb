"""Spans of checkpoints to an OpenTelemetry collector (`[traces] endpoint`, `pip install everstep[otel]`).

Without an endpoint nothing of OpenTelemetry is imported and no time is taken. Spans are made when a shard is committed,
of what was measured anyway, and handed to the SDK's own thread, which drops them where the collector is away.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from ..checkpoint.shard_write import DeviceWrite
from ..core.errors import ConfigError
from ..core.ids import CheckpointId
from .trace_plan import DeviceStage, ShardStages, SpanPlan, restore_span, shard_spans, trace_text

if TYPE_CHECKING:
    from .registry import RankRecord

logger = logging.getLogger(__name__)

FLUSH_DEADLINE_MS = 3000


class TracesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[traces]`: where spans go."""

    endpoint: str = ""
    """OTLP over gRPC: http://127.0.0.1:4317, or https://. Empty: nowhere."""

    def check(self) -> None:
        """ConfigError for what is no address."""
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"traces.endpoint is {self.endpoint!r}", hint="http://host:4317 or https://host:4317"
            )


class Traces:
    """Owned by the event loop."""

    def __init__(self, section: TracesSection, version: str) -> None:
        """Raise ConfigError where an endpoint is given and OpenTelemetry is not installed."""
        self._export: Callable[[SpanPlan], None] | None = None
        self._shutdown: Callable[[], None] = lambda: None
        self._begun: dict[tuple[int, int, int], float] = {}
        self._fetches: dict[int, tuple[CheckpointId, float]] = {}
        if section.endpoint:
            self._export, self._shutdown = _exporter(section.endpoint, version)

    @property
    def enabled(self) -> bool:
        """Tell whether anybody wants spans."""
        return self._export is not None

    def copy_begun(self, rank: "RankRecord", arena: int, slot: int) -> None:
        """A trainer begins to copy into a slot."""
        if self.enabled:
            self._begun[id(rank), arena, slot] = time.time()

    def committed(
        self,
        rank: "RankRecord",
        place: tuple[int, int],
        checkpoint: CheckpointId,
        *,
        sealed_ago_s: float,
        writing_ago_s: float,
        writes: tuple[DeviceWrite, ...],
    ) -> str:
        """A shard from slot `place` (arena, slot) is committed now; return its trace's id, empty without traces."""
        if self._export is None:
            return ""
        now_s = time.time()
        sealed_s = now_s - sealed_ago_s
        paths = {device.device_id: str(device.path) for device in rank.run.opened.store.devices}
        stages = ShardStages(
            begun_s=self._begun.pop((id(rank), *place), sealed_s),
            sealed_s=sealed_s,
            writing_s=now_s - writing_ago_s,
            committed_s=now_s,
            devices=[_stage(write, paths) for write in writes],
        )
        self._send(shard_spans(rank.run.run_id, checkpoint, rank.rank, stages))
        return trace_text(rank.run.run_id, checkpoint)

    def restore_begun(self, rank: "RankRecord", checkpoint: CheckpointId) -> None:
        """A trainer asks for its shard."""
        if self.enabled:
            self._fetches[id(rank)] = checkpoint, time.time()

    def restored(self, rank: "RankRecord", *, in_memory: bool) -> None:
        """A trainer has what it asked for."""
        if (fetch := self._fetches.pop(id(rank), None)) is not None:
            checkpoint, begun_s = fetch
            run_id = rank.run.run_id
            self._send(
                [restore_span(run_id, checkpoint, rank.rank, begun_s, time.time(), in_memory=in_memory)]
            )

    def close(self) -> None:
        """Send what is left, for some seconds at most: a call for a thread."""
        self._shutdown()

    def _send(self, spans: list[SpanPlan]) -> None:
        assert self._export is not None
        for span in spans:
            self._export(span)


def _stage(write: DeviceWrite, paths: Mapping[str, str]) -> DeviceStage:
    return DeviceStage(
        path=paths.get(write.device_id, write.device_id),
        write_s=write.write_s,
        sync_s=write.sync_s,
        size_bytes=write.size_bytes,
    )


def _exporter(endpoint: str, version: str) -> tuple[Callable[[SpanPlan], None], Callable[[], None]]:
    """Return what takes a span, and what ends it; everything of OpenTelemetry is imported here."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"traces.endpoint is {endpoint!r}, and OpenTelemetry is not installed ({error.name})",
            hint="pip install 'everstep[otel]', or leave the endpoint out",
        ) from error
    resource = Resource.create({"service.name": "everstep", "service.version": version})
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    processor = BatchSpanProcessor(exporter)

    def context(span: SpanPlan, span_id: int) -> SpanContext:
        return SpanContext(
            span.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    def export(span: SpanPlan) -> None:
        processor.on_end(
            ReadableSpan(
                name=span.name,
                context=context(span, span.span_id),
                parent=None if span.parent_id is None else context(span, span.parent_id),
                resource=resource,
                attributes=span.attributes,
                kind=SpanKind.INTERNAL,
                start_time=span.start_ns,
                end_time=span.end_ns,
            )
        )

    def shutdown() -> None:
        processor.force_flush(FLUSH_DEADLINE_MS)
        processor.shutdown()

    return export, shutdown
