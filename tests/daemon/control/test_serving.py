"""What holds for every call: typed errors, bounds that are said, and what a tool may ask without a token."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from everstep.checkpoint.testing import make_state, opened, save
from everstep.core.errors import LimitError, NotFoundError, VersionMismatchError
from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.status_codes import error_of, trailing_metadata
from everstep.daemon.testing import daemon_process, node_daemon
from everstep.proto import node_pb2 as pb

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def client(socket_path: Path) -> Iterator[ControlClient]:
    with daemon_process(socket_path), connected(socket_path) as found:
        yield found


def metadata_of(client: ControlClient, call: Any, request: object, **options: Any) -> tuple[grpc.Call, Any]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call(request, metadata=client._metadata, **options))
    error: Any = caught.value
    return error, dict(error.trailing_metadata())


def test_a_refusal_carries_what_is_wrong_and_what_to_do(client: ControlClient) -> None:
    request = pb.ExportCheckpointRequest(selector=pb.Selector(run="größe"))
    error, trailing = metadata_of(client, client._stub.ExportCheckpoint, request, timeout=5)
    info = pb.ErrorInfo.FromString(trailing["everstep-error-bin"])
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert (info.code, info.message, info.retryable) == ("NotFoundError", "no run 'größe'", False)
    assert info.hint
    assert trailing["everstep-code"] == info.code
    assert trailing["everstep-hint-bin"].decode() == info.hint


def test_errors_survive_the_way_and_older_daemons_are_understood() -> None:
    error = LimitError("too many " + "x" * 5000, hint="wait " + "y" * 5000)
    sent = trailing_metadata(error)
    found = error_of(dict(sent), "")
    assert type(found) is LimitError
    assert error.message.startswith(found.message)
    assert len(found.message) == 2000
    assert error.hint.startswith(found.hint)
    older = {key: value for key, value in sent if key != "everstep-error-bin"}
    assert isinstance(error_of(older, "as it was"), LimitError)
    assert error_of({"everstep-error-bin": b"\xff"}, "") is None
    unknown = pb.ErrorInfo(code="FromTheFuture", message="m", hint="h").SerializeToString()
    assert str(error_of({"everstep-error-bin": unknown}, "")) == "m (h)"


def test_streams_need_a_deadline_but_those_that_follow(client: ControlClient) -> None:
    request = pb.ExportCheckpointRequest(selector=pb.Selector(run="x"))
    error, _ = metadata_of(client, client._stub.ExportCheckpoint, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in (error.details() or "")


def test_what_is_too_large_is_said_with_the_bound(client: ControlClient) -> None:
    with pytest.raises(LimitError, match="no room") as caught:
        client.checkpoints("x" * 2**21)
    assert "1 MiB" in caught.value.hint


def test_lists_that_are_too_large_are_refused_with_the_bound_and_less_is_given(
    node_config: Path, socket_path: Path, devices: list[Path]
) -> None:
    """As beyond 16 MiB, which takes some hundred thousand checkpoints: this daemon's bound is 4 KiB."""
    with opened(devices) as (store, _):
        for number in range(60):
            store.run(os.geteuid(), f"run-{number:02d}-{'x' * 50}", create=True)
        run = store.run(os.geteuid(), "long", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store)
        for step in range(1, 61):
            save(run, state, CheckpointId(1, step))
    script = (str(SCRIPTS / "small_answers_daemon.py"),)
    with node_daemon(node_config, socket_path, program=script), connected(socket_path) as client:
        for ask in (client.runs, lambda: client.checkpoints("long"), lambda: client.checkpoints("")):
            with pytest.raises(LimitError, match="no room for the call") as caught:
                ask()
            assert "answers of up to 16 MiB" in caught.value.hint
            assert "ask for less" in caught.value.hint
        less = client._call(client._stub.ListCheckpoints, pb.ListCheckpointsRequest(run="long", count_max=3))
        assert [each.step for each in less.checkpoints] == [60, 59, 58]
        assert client.run("long").checkpoint_count == 60, "it goes on"


def test_a_call_that_the_daemon_does_not_know_is_a_matter_of_versions(client: ControlClient) -> None:
    channel: Any = grpc.insecure_channel(f"unix:{client._hold.welcome.control_socket}")
    with channel:
        newer = channel.unary_unary(
            "/everstep.node.v1.Node/FromTheFuture",
            request_serializer=pb.GetStatusRequest.SerializeToString,
            response_deserializer=pb.GetStatusResponse.FromString,
        )
        with pytest.raises(VersionMismatchError, match="does not know") as caught:
            client._call(newer, pb.GetStatusRequest())
    assert "version" in caught.value.hint


def test_reflection_is_off_unless_it_is_wanted(client: ControlClient, socket_path: Path) -> None:
    del client
    path = control_socket_path(socket_path)
    with grpc.insecure_channel(f"unix:{path}") as channel, pytest.raises(grpc.RpcError) as caught:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_tells_what_node_proto_does(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write("reflection = true\n")
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        with grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert "everstep.node.v1.Node" in database.get_services()
            found = database.FindFileContainingSymbol("everstep.node.v1.Node")
        methods = {method.name for method in found.service[0].method}
        assert methods == {method.name for method in pb.DESCRIPTOR.services_by_name["Node"].methods}
        with pytest.raises(NotFoundError):
            client.run("nobody")
