"""The socket on which job launchers ask whether this node is well. Decode, ask, encode; nothing is decided here.

It asks for no token: a launcher of nvidia-resiliency-ext has none. What it answers names devices and how they are,
never a run or a user.
"""

# ruff: noqa: N802 - the methods are named by nvhcd.proto

import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec
from prometheus_client import Counter

from ...core.errors import ConfigError
from ...proto import nvhcd_pb2 as pb
from ...proto.nvhcd_pb2_grpc import HealthCheckServiceServicer, add_HealthCheckServiceServicer_to_server
from ..access.open_calls import OpenCalls
from .examine import Examiner

if TYPE_CHECKING:
    from ..node import Node

    _Context = grpc.aio.ServicerContext[Any, Any]
else:
    _Context = grpc.aio.ServicerContext

logger = logging.getLogger(__name__)

CALLS_MAX, STREAMS_MAX = 256, 16
CONNECTIONS_MAX = 512
HANDSHAKE_MS, IDLE_MS = 10_000, 60_000
REQUEST_BYTES_MAX = 64 * 1024
GRACE_S = 0.5
ASK_DEADLINE_S = 1.0

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
]


class HealthCheckServer:
    """The running server."""

    def __init__(self, server: grpc.aio.Server, path: Path) -> None:
        self._server, self._path = server, path

    async def stop(self) -> None:
        """Stop, and take the socket away: where there is none, a launcher asks nobody. Again is nothing."""
        await self._server.stop(GRACE_S)
        self._path.unlink(missing_ok=True)


async def serve_health_check(node: "Node") -> HealthCheckServer | None:
    """Return the server, answering; None: the configuration wants none. The caller stops it.

    Raises:
        ConfigError: the path cannot be bound, another service answers there, or others may write to its directory.
    """
    section = node.config.health_check
    if not section.socket:
        return None
    path = Path(section.socket)
    _make_way(path)
    server = grpc.aio.server(interceptors=[OpenCalls()], options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
    add_HealthCheckServiceServicer_to_server(
        HealthCheckService(Examiner(node, section), node.metrics.health_checks_total), server
    )
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
        os.chmod(path, section.socket_mode)  # noqa: PTH101 - of a socket in memory, before anybody is served
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"health_check.socket: cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)
    await server.start()
    logger.info("health_check_serving socket=%s refuse=%s", path, ",".join(section.refuse))
    return HealthCheckServer(server, path)


def _make_way(path: Path) -> None:
    """Remove what a dead daemon left at the path, if only this user and root can have put it there."""
    try:
        status = path.parent.stat()
    except OSError as error:
        raise ConfigError(
            f"health_check.socket: {path.parent}: {error.strerror}", hint="make the directory first"
        ) from error
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"health_check.socket: others may write to {path.parent}, and could answer in the daemon's place",
            hint="use a directory that only root or the daemon's user writes to",
        )
    if _answers(path):
        raise ConfigError(
            f"health_check.socket: another service answers on {path}", hint="stop it, or use another path"
        )
    if path.is_socket():
        path.unlink()
    elif path.exists():
        raise ConfigError(f"health_check.socket: {path} is no socket", hint="use another path")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ASK_DEADLINE_S)
        try:
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise ConfigError(f"health_check.socket: {path}: {error.strerror or error}") from error
        return True


class HealthCheckService(HealthCheckServiceServicer):
    """See nvhcd.proto."""

    def __init__(self, examiner: Examiner, asked: Counter) -> None:
        self._examiner, self._asked = examiner, asked
        self._failed_checks: tuple[str, ...] = ()

    async def RunHealthCheck(
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        """See nvhcd.proto."""
        verdict = await self._examiner.verdict()
        self._asked.labels("well" if verdict.may_start else "refused").inc()
        failed_checks = tuple(finding.check for finding in verdict.refused)
        if failed_checks != self._failed_checks:  # once for a change, however many jobs ask
            self._failed_checks = failed_checks
            told = logger.info if verdict.may_start else logger.warning
            told("health_check_changed may_start=%s reason=%s", verdict.may_start, verdict.error)
        return pb.HealthCheckResponse(
            success=verdict.may_start,
            exit_code=0 if verdict.may_start else 1,
            output=msgspec.json.encode(verdict.document()).decode(),
            error=verdict.error,
        )
