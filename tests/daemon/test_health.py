"""What a probe without a token hears."""

from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

STATES = cast(Any, health_pb2.HealthCheckResponse)


def check(channel: grpc.Channel, service: str = "") -> int:
    stub = cast(Any, health_pb2_grpc.HealthStub(channel))
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)


def test_a_daemon_that_takes_work_is_serving(node_config: Path, socket_path: Path) -> None:
    with (
        node_daemon(node_config, socket_path),
        grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel,
    ):
        for service in ("", "everstep.node.v1.Node"):
            assert check(channel, service) == STATES.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(channel, "another")
        assert cast(Any, caught.value).code() is grpc.StatusCode.NOT_FOUND


def test_one_that_drains_is_not(socket_path: Path, devices: list[Path], pause: Pause) -> None:
    phase = Phase("everstep.checkpoint.commit:manifest_of")
    with (
        pausing_daemon(pause, phase) as daemon,
        FakeTrainer(socket_path) as trainer,
        grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel,
    ):
        trainer.open_run(devices)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        pause.reached(daemon)
        with connected(socket_path) as client:
            daemon.terminate()
            wait_until(lambda: client.status().daemon.is_draining)
            wait_until(lambda: check(channel) == STATES.NOT_SERVING)
        pause.go()
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
