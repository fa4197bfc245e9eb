"""What another user of the node tries, by its real uid: at closed sockets, and at those that are open to everybody.

Needs root, which becomes that user for the moment in which it connects: whose a connection is, the kernel notes then.
"""

import contextlib
import socket
from collections.abc import Generator
from pathlib import Path

import grpc
import pytest
from hostile import HELLO, Attacked, Case, Evil, ended
from users import acting_as, open_the_way

from everstep.proto import frames
from everstep.proto import node_pb2 as pb
from everstep.proto.wire import pack

OTHER_UID = 65534
SERVICE = "/everstep.node.v1.Node/"


@contextlib.contextmanager
def opened(target: Attacked, *, sockets: bool = True) -> Generator[None]:
    """Let everybody pass to both sockets and use them, as a service manager may have made them; closed afterwards."""
    paths = (*target.socket.parents[:2], target.socket, target.control)
    modes = [path.stat().st_mode & 0o777 for path in paths]
    try:
        open_the_way(target.socket)
        for path in paths[2:] if sockets else ():
            path.chmod(0o666)
        yield
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)


def another(target: Attacked) -> Evil:
    """Return a trainer of the other user."""
    with acting_as(OTHER_UID):
        return Evil(target)


def code(target: Attacked, method: str, request: bytes = b"", token: str = "") -> grpc.StatusCode:
    """Return how a call of the other user ended, over a connection of its own."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with acting_as(OTHER_UID), target.channel() as channel:
        try:
            channel.unary_unary(SERVICE + method)(request, timeout=10, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


def closed_doors(target: Attacked) -> None:
    """It cannot connect: the directory keeps it out, and where others may pass that, each socket's own mode."""
    for way in (contextlib.nullcontext(), opened(target, sockets=False)):
        with way:
            with socket.socket(socket.AF_UNIX) as sock, acting_as(OTHER_UID), pytest.raises(PermissionError):
                sock.connect(str(target.socket))
            assert code(target, "GetStatus") is grpc.StatusCode.UNAVAILABLE


def another_on_the_data_socket(target: Attacked) -> None:
    """It is known by its uid, whatever it says: no run is saved for it, and the neighbour's is not its own."""
    with opened(target), another(target) as evil:
        assert isinstance(evil.hello, frames.Welcome)
        for name, takeover in (("evil", False), ("neighbour", False), ("neighbour", True)):
            refused = evil.open_run([Path("nvme0"), Path("nvme1")], name=name, takeover=takeover)
            assert isinstance(refused, frames.Failure), refused
            assert f"no runs of uid {OTHER_UID}" in refused.message
        for request in (
            frames.HandOver(request_id=1),
            frames.ReadManifest(request_id=1, run="neighbour", attempt=1, step=1, rank=0),
            frames.OpenSegment(request_id=1, run="neighbour", attempt=1, step=1, rank=0, segment=0),
        ):
            assert evil.refusal(request), request


def another_on_the_control_socket(target: Attacked) -> None:
    """Without a token nobody; with its own it sees no run of others, and nothing of the daemon is its to change."""
    status, wanted = grpc.StatusCode, pb.Selector(run="neighbour")
    with opened(target), another(target) as evil:
        assert isinstance(evil.hello, frames.Welcome)
        token = evil.hello.token
        for method in ("GetStatus", "ListRuns", "Drain", "Shutdown"):
            assert code(target, method) is status.UNAUTHENTICATED, method
            assert code(target, method, token="0" * 64) is status.UNAUTHENTICATED, method
        for method in ("Drain", "Shutdown", "DrainDevice", "RetireDevice", "InspectStores", "ReloadConfig"):
            assert code(target, method, token=token) is status.PERMISSION_DENIED, method
        for method, request in (
            ("GetRun", pb.GetRunRequest(run="neighbour")),
            ("RemoveRun", pb.RemoveRunRequest(run="neighbour", force=True)),
            ("GetCheckpoint", pb.GetCheckpointRequest(selector=wanted)),
            ("ForceCheckpoint", pb.ForceCheckpointRequest(run="neighbour")),
        ):
            assert code(target, method, request.SerializeToString(), token) is status.NOT_FOUND, method
    assert code(target, "GetStatus", token=token) is status.UNAVAILABLE, "closed again"


def another_takes_all_it_may(target: Attacked) -> None:
    """Its bound is its own: the daemon's user comes in while it holds as many connections as one user may."""
    with opened(target), acting_as(OTHER_UID):
        target.held += [target.connect() for _ in range(620)]
    assert all(f"uid {OTHER_UID}".encode() in ended(sock) for sock in target.held[-10:])
    with target.connect() as sock:
        sock.sendall(pack(HELLO))
        assert b"welcome" in sock.recv(1 << 16)


OTHER_USER: dict[str, Case] = {
    "other uid: closed sockets": closed_doors,
    "other uid: the data socket": another_on_the_data_socket,
    "other uid: the control socket": another_on_the_control_socket,
    "other uid: more connections than a user may have": another_takes_all_it_may,
}
