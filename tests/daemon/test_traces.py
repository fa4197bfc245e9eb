"""Spans of a real daemon at a real OTLP receiver; and what is so without one."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.daemon.trace_plan import DeviceStage, ShardStages, shard_spans, trace_text
from everstep.proto import frames

NAMES = [Path("nvme0"), Path("nvme1")]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name of it
        for of_resource in request.resource_spans:
            self.services |= {
                each.value.string_value
                for each in of_resource.resource.attributes
                if each.key == "service.name"
            }
            self.spans += [span for of_scope in of_resource.scope_spans for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver(node_config: Path) -> Iterator[Receiver]:
    servicer = Receiver()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    node_config.write_text(node_config.read_text() + f'[traces]\nendpoint = "http://127.0.0.1:{port}"\n')
    yield servicer
    server.stop(0).wait()


def test_a_checkpoint_and_its_restore_are_one_trace(
    receiver: Receiver, node_config: Path, socket_path: Path
) -> None:
    checkpoint = CheckpointId(1, 7)
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    with node_daemon(node_config, socket_path):
        with FakeTrainer(socket_path) as trainer:
            opened = trainer.open_run(NAMES)
            assert isinstance(opened, frames.RunOpened)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=1)
            trainer.event(frames.Persisted)
            arena.close()
            trainer.ask(frames.Detach(request_id=trainer.number()))
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(NAMES)
            trainer.begin_attempt(2)
            shard = trainer.fetch(checkpoint)
            assert isinstance(shard, frames.Streaming)
            trainer.stream(shard)
            trainer.send(frames.Restored(in_memory=False))
            trainer.ask(frames.Detach(request_id=trainer.number()))
    trace = trace_text(opened.run_id, checkpoint)
    assert receiver.services == {"everstep"}
    assert {span.trace_id.hex() for span in receiver.spans} == {trace}
    assert f"trace={trace}" in socket_path.with_name("daemon.log").read_text()
    by_name: dict[str, list[Any]] = {}
    for span in receiver.spans:
        by_name.setdefault(span.name, []).append(span)
    counts = {name: len(spans) for name, spans in by_name.items()}
    assert counts == {"shard": 1, "copy": 1, "write": 2, "fsync": 2, "manifest": 1, "restore": 1}
    shard_span = by_name["shard"][0]
    for span in receiver.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.name not in {"shard", "restore"}:
            assert span.parent_span_id == shard_span.span_id
            assert shard_span.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= shard_span.end_time_unix_nano
    assert len({span.span_id for span in receiver.spans}) == len(receiver.spans)


def test_stages_that_overlap_stay_within_the_whole() -> None:
    stages = ShardStages(
        begun_s=100.0,
        sealed_s=103.0,
        writing_s=101.0,
        committed_s=104.0,
        devices=[DeviceStage(path="/a", write_s=9.0, sync_s=1.0, size_bytes=5)],
    )
    spans = shard_spans("ab", CheckpointId(1, 2), 0, stages)
    seconds = {span.name: (span.start_ns / 1e9, span.end_ns / 1e9) for span in spans}
    assert seconds == {
        "shard": (100.0, 104.0),
        "copy": (100.0, 103.0),
        "write": (101.0, 104.0),
        "fsync": (104.0, 104.0),
        "manifest": (104.0, 104.0),
    }


def test_ranks_of_a_checkpoint_share_a_trace_and_no_span() -> None:
    stages = ShardStages(begun_s=1.0, sealed_s=2.0, writing_s=2.0, committed_s=3.0, devices=[])
    spans = [span for rank in range(2) for span in shard_spans("ab", CheckpointId(1, 2), rank, stages)]
    assert {f"{span.trace_id:032x}" for span in spans} == {trace_text("ab", CheckpointId(1, 2))}
    assert len({span.span_id for span in spans}) == len(spans)


def test_a_collector_that_is_away_costs_a_save_nothing(node_config: Path, socket_path: Path) -> None:
    node_config.write_text(node_config.read_text() + '[traces]\nendpoint = "http://127.0.0.1:9"\n')
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
        trainer.ask(frames.Detach(request_id=trainer.number()))


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, everstep.daemon.main, everstep.daemon.traces as traces;"
        "traces.Traces(traces.TracesSection(), 'x');"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
