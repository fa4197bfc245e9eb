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
from everstep.daemon.control.health import SERVICES
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

STATES = cast(Any, health_pb2.HealthCheckResponse)


def check(channel: grpc.Channel, service: str = "") -> int:
    stub = cast(Any, health_pb2_grpc.HealthStub(channel))
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)


def checked(channel: grpc.Channel) -> set[int]:
    """Return what is said of the whole server and of the service by its name."""
    return {check(channel, service) for service in SERVICES}


def test_a_daemon_that_takes_work_is_serving(node_config: Path, socket_path: Path) -> None:
    with (
        node_daemon(node_config, socket_path),
        grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel,
    ):
        assert checked(channel) == {STATES.SERVING}
        with pytest.raises(grpc.RpcError) as caught:
            check(channel, "another")
        assert cast(Any, caught.value).code() is grpc.StatusCode.NOT_FOUND


def test_one_that_drains_is_not(socket_path: Path, devices: list[Path], pause: Pause) -> None:
    phase = Phase("everstep.checkpoint.commit:head_of")
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
            client.drain(cancel=True)
            assert checked(channel) == {STATES.NOT_SERVING}, "it ends all the same"
        pause.go()
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


def test_a_node_that_was_drained_is_not_until_it_takes_runs_again(
    node_config: Path, socket_path: Path
) -> None:
    with (
        node_daemon(node_config, socket_path),
        grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel,
        connected(socket_path) as client,
    ):
        for _ in range(2):
            assert client.drain().is_draining
            assert checked(channel) == {STATES.NOT_SERVING}
            assert not client.drain(cancel=True).is_draining
            assert checked(channel) == {STATES.SERVING}


def test_a_probe_hears_of_a_drain_while_it_still_waits_for_what_is_sealed(
    socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    with (
        pausing_daemon(pause, Phase("everstep.checkpoint.commit:head_of")) as daemon,
        FakeTrainer(socket_path) as trainer,
        grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel,
        connected(socket_path) as client,
    ):
        trainer.open_run(devices)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        pause.reached(daemon)
        assert client.drain(deadline_s=1.0).unsettled_count == 1
        assert checked(channel) == {STATES.NOT_SERVING}
        client.drain(cancel=True)
        assert checked(channel) == {STATES.SERVING}
        pause.go()
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
