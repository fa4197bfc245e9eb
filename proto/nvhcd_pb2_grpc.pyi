"""Types of the generated service code: an asyncio servicer (the daemon)."""

from collections.abc import Awaitable

import grpc.aio

from . import nvhcd_pb2

class HealthCheckServiceServicer:
    def RunHealthCheck(
        self,
        request: nvhcd_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[nvhcd_pb2.HealthCheckRequest, nvhcd_pb2.HealthCheckResponse],
    ) -> Awaitable[nvhcd_pb2.HealthCheckResponse]: ...

def add_HealthCheckServiceServicer_to_server(
    servicer: HealthCheckServiceServicer, server: grpc.aio.Server
) -> None: ...
