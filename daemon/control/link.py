"""How a client of the control API reaches a daemon and shows who it is: the data socket, a token or a certificate."""

import os
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from ...core.errors import DaemonUnavailableError
from ...core.version import VERSION
from ...proto import frames, node_pb2_grpc
from ...proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, Role
from ...proto.wire import FrameError, FrameReader, greet
from ..access.endpoint import Endpoint, endpoint_of_environment
from ..peer import identify

HELLO_DEADLINE_S = 5.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The data connection that keeps the token valid, and the daemon's life."""

    welcome: frames.Welcome
    pidfd: int


def open_client(stack: ExitStack, path: Path, *, hint: str) -> tuple[node_pb2_grpc.NodeStub, Hold, Path]:
    """Return what a client of the daemon on the data socket `path` is made with; `stack` ends it.

    `hint` says what else can be done where none answers.

    Raises:
        DaemonUnavailableError: none answers there.
        VersionMismatchError: one of another protocol version does.
    """
    endpoint = endpoint_of_environment(path)
    if endpoint is not None:  # a token's file, or a certificate over TCP: no connection of the data socket
        channel = stack.enter_context(endpoint.channel(_OPTIONS))
        return (
            node_pb2_grpc.NodeStub(channel),
            Hold(welcome=_known_by(endpoint), pidfd=-1),
            Path(endpoint.label),
        )
    hold = stack.enter_context(_greeted(path, hint))
    channel = grpc.insecure_channel(f"unix:{hold.welcome.control_socket}", options=_OPTIONS)
    return node_pb2_grpc.NodeStub(stack.enter_context(channel)), hold, path


def _known_by(endpoint: Endpoint) -> frames.Welcome:
    """Return what a client needs that has not been welcomed: the token, if its certificate does not speak for it."""
    return frames.Welcome(
        version="",
        protocol=PROTOCOL,
        token=endpoint.token,
        private=False,
        pid=0,
        control_socket=endpoint.target,
    )


@contextmanager
def _greeted(path: Path, hint: str) -> Generator[Hold]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(HELLO_DEADLINE_S)
        try:
            sock.connect(str(path))
        except OSError as error:
            raise DaemonUnavailableError(
                f"no daemon answers on {path} ({error.strerror or error})", hint=hint
            ) from error
        pidfd = identify(sock).pidfd
        try:
            yield Hold(welcome=_hello(sock, path), pidfd=pidfd)
        finally:
            os.close(pidfd)


def _hello(sock: socket.socket, path: Path) -> frames.Welcome:
    reader = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
    try:
        return greet(sock, reader, frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.CONTROL))
    except (OSError, FrameError) as error:
        raise DaemonUnavailableError(f"the daemon on {path} does not answer: {error}") from error
    finally:
        reader.close()
