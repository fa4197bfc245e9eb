"""grpc.health.v1 on the control socket: what probes of service managers and of Kubernetes ask for.

It asks for no token: a probe has none, and who can reach the socket is the daemon's user or root.
"""

from typing import Any, Protocol, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

METHODS = "/grpc.health.v1.Health/"
SERVICES = ("", "everstep.node.v1.Node")
"""The whole server, and the service by its name."""


class _Servicer(Protocol):
    async def set(self, service: str, status: int) -> None: ...


class Health:
    """What the daemon says of itself: NOT_SERVING until it is told otherwise."""

    def __init__(self, servicer: _Servicer) -> None:
        self._servicer = servicer

    async def set(self, *, serving: bool) -> None:
        """Say whether the daemon takes work."""
        states = cast(Any, health_pb2.HealthCheckResponse)
        for service in SERVICES:
            await self._servicer.set(service, states.SERVING if serving else states.NOT_SERVING)


async def serve_health(server: grpc.aio.Server) -> Health:
    """Add the health service to a server that has not started."""
    servicer = cast(Any, health).aio.HealthServicer()  # its types know only the form with threads
    cast(Any, health_pb2_grpc).add_HealthServicer_to_server(servicer, server)
    served = Health(servicer)
    await served.set(serving=False)
    return served
