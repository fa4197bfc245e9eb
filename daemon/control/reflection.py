"""grpc.reflection: tools such as grpcurl ask what the API looks like. Off unless `[daemon] reflection` is set.

It asks for no token: it tells what node.proto does, and nothing of this node.
"""

import grpc.aio

from .health import SERVICES

METHODS = "/grpc.reflection.v1alpha.ServerReflection/"


def serve_reflection(server: grpc.aio.Server) -> None:
    """Add the reflection service to a server that has not started."""
    from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 - seldom needed

    names = [*filter(None, SERVICES), "grpc.health.v1.Health", reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
