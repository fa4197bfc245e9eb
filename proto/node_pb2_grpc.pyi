"""Types of the generated service code: a blocking stub (the command line) and an asyncio servicer (the daemon)."""

from collections.abc import Awaitable

import grpc
import grpc.aio

from . import node_pb2

class NodeStub:
    GetStatus: grpc.UnaryUnaryMultiCallable[node_pb2.GetStatusRequest, node_pb2.GetStatusResponse]
    ListCheckpoints: grpc.UnaryUnaryMultiCallable[node_pb2.ListCheckpointsRequest, node_pb2.ListCheckpointsResponse]
    GetCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.GetCheckpointRequest, node_pb2.GetCheckpointResponse]
    VerifyCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.VerifyCheckpointRequest, node_pb2.VerifyCheckpointResponse]
    RemoveCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.RemoveCheckpointRequest, node_pb2.RemoveCheckpointResponse]
    RemoveRun: grpc.UnaryUnaryMultiCallable[node_pb2.RemoveRunRequest, node_pb2.RemoveRunResponse]
    TagCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.TagCheckpointRequest, node_pb2.TagCheckpointResponse]
    UntagCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.UntagCheckpointRequest, node_pb2.UntagCheckpointResponse]
    DropCache: grpc.UnaryUnaryMultiCallable[node_pb2.DropCacheRequest, node_pb2.DropCacheResponse]
    StartScrub: grpc.UnaryUnaryMultiCallable[node_pb2.StartScrubRequest, node_pb2.StartScrubResponse]
    InspectStores: grpc.UnaryUnaryMultiCallable[node_pb2.InspectStoresRequest, node_pb2.InspectStoresResponse]
    ListDevices: grpc.UnaryUnaryMultiCallable[node_pb2.ListDevicesRequest, node_pb2.ListDevicesResponse]
    DrainDevice: grpc.UnaryUnaryMultiCallable[node_pb2.DrainDeviceRequest, node_pb2.DrainDeviceResponse]
    RetireDevice: grpc.UnaryUnaryMultiCallable[node_pb2.RetireDeviceRequest, node_pb2.RetireDeviceResponse]
    ReadmitDevice: grpc.UnaryUnaryMultiCallable[node_pb2.ReadmitDeviceRequest, node_pb2.ReadmitDeviceResponse]
    Shutdown: grpc.UnaryUnaryMultiCallable[node_pb2.ShutdownRequest, node_pb2.ShutdownResponse]
    def __init__(self, channel: grpc.Channel) -> None: ...

class NodeServicer:
    def GetStatus(
        self,
        request: node_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[node_pb2.GetStatusRequest, node_pb2.GetStatusResponse],
    ) -> Awaitable[node_pb2.GetStatusResponse]: ...
    def ListCheckpoints(
        self,
        request: node_pb2.ListCheckpointsRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListCheckpointsRequest, node_pb2.ListCheckpointsResponse],
    ) -> Awaitable[node_pb2.ListCheckpointsResponse]: ...
    def GetCheckpoint(
        self,
        request: node_pb2.GetCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.GetCheckpointRequest, node_pb2.GetCheckpointResponse],
    ) -> Awaitable[node_pb2.GetCheckpointResponse]: ...
    def VerifyCheckpoint(
        self,
        request: node_pb2.VerifyCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.VerifyCheckpointRequest, node_pb2.VerifyCheckpointResponse],
    ) -> Awaitable[node_pb2.VerifyCheckpointResponse]: ...
    def RemoveCheckpoint(
        self,
        request: node_pb2.RemoveCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.RemoveCheckpointRequest, node_pb2.RemoveCheckpointResponse],
    ) -> Awaitable[node_pb2.RemoveCheckpointResponse]: ...
    def RemoveRun(
        self,
        request: node_pb2.RemoveRunRequest,
        context: grpc.aio.ServicerContext[node_pb2.RemoveRunRequest, node_pb2.RemoveRunResponse],
    ) -> Awaitable[node_pb2.RemoveRunResponse]: ...
    def TagCheckpoint(
        self,
        request: node_pb2.TagCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.TagCheckpointRequest, node_pb2.TagCheckpointResponse],
    ) -> Awaitable[node_pb2.TagCheckpointResponse]: ...
    def UntagCheckpoint(
        self,
        request: node_pb2.UntagCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.UntagCheckpointRequest, node_pb2.UntagCheckpointResponse],
    ) -> Awaitable[node_pb2.UntagCheckpointResponse]: ...
    def DropCache(
        self,
        request: node_pb2.DropCacheRequest,
        context: grpc.aio.ServicerContext[node_pb2.DropCacheRequest, node_pb2.DropCacheResponse],
    ) -> Awaitable[node_pb2.DropCacheResponse]: ...
    def StartScrub(
        self,
        request: node_pb2.StartScrubRequest,
        context: grpc.aio.ServicerContext[node_pb2.StartScrubRequest, node_pb2.StartScrubResponse],
    ) -> Awaitable[node_pb2.StartScrubResponse]: ...
    def InspectStores(
        self,
        request: node_pb2.InspectStoresRequest,
        context: grpc.aio.ServicerContext[node_pb2.InspectStoresRequest, node_pb2.InspectStoresResponse],
    ) -> Awaitable[node_pb2.InspectStoresResponse]: ...
    def ListDevices(
        self,
        request: node_pb2.ListDevicesRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListDevicesRequest, node_pb2.ListDevicesResponse],
    ) -> Awaitable[node_pb2.ListDevicesResponse]: ...
    def DrainDevice(
        self,
        request: node_pb2.DrainDeviceRequest,
        context: grpc.aio.ServicerContext[node_pb2.DrainDeviceRequest, node_pb2.DrainDeviceResponse],
    ) -> Awaitable[node_pb2.DrainDeviceResponse]: ...
    def RetireDevice(
        self,
        request: node_pb2.RetireDeviceRequest,
        context: grpc.aio.ServicerContext[node_pb2.RetireDeviceRequest, node_pb2.RetireDeviceResponse],
    ) -> Awaitable[node_pb2.RetireDeviceResponse]: ...
    def ReadmitDevice(
        self,
        request: node_pb2.ReadmitDeviceRequest,
        context: grpc.aio.ServicerContext[node_pb2.ReadmitDeviceRequest, node_pb2.ReadmitDeviceResponse],
    ) -> Awaitable[node_pb2.ReadmitDeviceResponse]: ...
    def Shutdown(
        self,
        request: node_pb2.ShutdownRequest,
        context: grpc.aio.ServicerContext[node_pb2.ShutdownRequest, node_pb2.ShutdownResponse],
    ) -> Awaitable[node_pb2.ShutdownResponse]: ...

def add_NodeServicer_to_server(servicer: NodeServicer, server: grpc.aio.Server) -> None: ...
