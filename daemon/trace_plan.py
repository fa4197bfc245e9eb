"""A checkpoint's way through the daemon as spans: their ids, names and times. Pure; nothing of OpenTelemetry.

The trace of a checkpoint follows from its name, so that all ranks of all nodes write to the same trace without telling
each other, and `everstep show` knows it without asking anybody. A restore is in the trace of what it restores.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.ids import CheckpointId

NS = 1_000_000_000
Attribute = str | int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlan:
    """One span."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    """Unix time."""
    end_ns: int
    attributes: dict[str, Attribute] = field(default_factory=dict[str, Attribute])

    def __post_init__(self) -> None:
        assert 0 < self.start_ns <= self.end_ns, self
        assert self.trace_id, self
        assert self.span_id, self


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStage:
    """What one device did for a shard, in seconds."""

    path: str
    write_s: float
    sync_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStages:
    """When a shard was where, as Unix time in seconds."""

    begun_s: float
    """Its copy began."""
    sealed_s: float
    writing_s: float
    """The first byte may have gone to a device: before the seal where it was written while it was copied."""
    committed_s: float
    devices: Sequence[DeviceStage]


def trace_id_of(run_id: str, checkpoint: CheckpointId) -> int:
    """Return the 128-bit id of a checkpoint's trace."""
    digest = hashlib.sha256(f"everstep-trace\0{run_id}\0{checkpoint}".encode()).digest()
    return int.from_bytes(digest[:16], "big") or 1


def trace_text(run_id: str, checkpoint: CheckpointId) -> str:
    """Return it as W3C's traceparent has it: 32 hex digits."""
    return f"{trace_id_of(run_id, checkpoint):032x}"


def shard_spans(run_id: str, checkpoint: CheckpointId, rank: int, stages: ShardStages) -> list[SpanPlan]:
    """Return the spans of a committed shard: copy, write and fsync of each device, manifest, and the whole."""
    trace_id = trace_id_of(run_id, checkpoint)
    root_id = _span_id(trace_id, rank, "shard")
    begin = min(stages.begun_s, stages.sealed_s, stages.writing_s)
    whole = {"everstep.run": run_id, "everstep.checkpoint": str(checkpoint), "everstep.rank": rank}

    def span(name: str, start_s: float, end_s: float, which: str = "", **attributes: Attribute) -> SpanPlan:
        start_s = min(max(start_s, begin), stages.committed_s)
        end_s = min(max(end_s, start_s), stages.committed_s)
        return SpanPlan(
            name=name,
            trace_id=trace_id,
            span_id=_span_id(trace_id, rank, name, which),
            parent_id=root_id,
            start_ns=int(start_s * NS),
            end_ns=int(end_s * NS),
            attributes={f"everstep.{key}": value for key, value in attributes.items()},
        )

    spans = [
        SpanPlan(
            name="shard",
            trace_id=trace_id,
            span_id=root_id,
            parent_id=None,
            start_ns=int(begin * NS),
            end_ns=int(max(stages.committed_s, begin) * NS),
            attributes=whole,
        ),
        span("copy", stages.begun_s, stages.sealed_s),
    ]
    durable_s = stages.writing_s
    for device in stages.devices:
        written_s = stages.writing_s + device.write_s
        synced_s = written_s + device.sync_s
        durable_s = max(durable_s, synced_s)
        spans.append(
            span(
                "write",
                stages.writing_s,
                written_s,
                device.path,
                device=device.path,
                size_bytes=device.size_bytes,
            )
        )
        spans.append(span("fsync", written_s, synced_s, device.path, device=device.path))
    return [*spans, span("manifest", durable_s, stages.committed_s)]


def restore_span(
    run_id: str, checkpoint: CheckpointId, rank: int, begun_s: float, ended_s: float, *, in_memory: bool
) -> SpanPlan:
    """Return the span of a shard's restore, from its request to the trainer's word that it has it."""
    trace_id = trace_id_of(run_id, checkpoint)
    return SpanPlan(
        name="restore",
        trace_id=trace_id,
        span_id=_span_id(trace_id, rank, "restore", f"{begun_s}"),
        parent_id=None,
        start_ns=int(begun_s * NS),
        end_ns=int(max(ended_s, begun_s) * NS),
        attributes={
            "everstep.run": run_id,
            "everstep.checkpoint": str(checkpoint),
            "everstep.rank": rank,
            "everstep.in_memory": in_memory,
        },
    )


def _span_id(trace_id: int, rank: int, *names: str) -> int:
    digest = hashlib.sha256("\0".join((f"{trace_id:032x}", str(rank), *names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1
