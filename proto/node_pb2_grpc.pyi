"""Types of the generated service code: a blocking stub (clients) and an asyncio servicer (the daemon)."""

from collections.abc import AsyncGenerator, Awaitable

import grpc
import grpc.aio

from . import node_pb2

class NodeStub:
    GetStatus: grpc.UnaryUnaryMultiCallable[node_pb2.GetStatusRequest, node_pb2.GetStatusResponse]
    ListCheckpoints: grpc.UnaryUnaryMultiCallable[
        node_pb2.ListCheckpointsRequest, node_pb2.ListCheckpointsResponse
    ]
    GetCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.GetCheckpointRequest, node_pb2.GetCheckpointResponse]
    VerifyCheckpoint: grpc.UnaryUnaryMultiCallable[
        node_pb2.VerifyCheckpointRequest, node_pb2.VerifyCheckpointResponse
    ]
    RemoveCheckpoint: grpc.UnaryUnaryMultiCallable[
        node_pb2.RemoveCheckpointRequest, node_pb2.RemoveCheckpointResponse
    ]
    RemoveRun: grpc.UnaryUnaryMultiCallable[node_pb2.RemoveRunRequest, node_pb2.RemoveRunResponse]
    TagCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.TagCheckpointRequest, node_pb2.TagCheckpointResponse]
    UntagCheckpoint: grpc.UnaryUnaryMultiCallable[
        node_pb2.UntagCheckpointRequest, node_pb2.UntagCheckpointResponse
    ]
    DropCache: grpc.UnaryUnaryMultiCallable[node_pb2.DropCacheRequest, node_pb2.DropCacheResponse]
    StartScrub: grpc.UnaryUnaryMultiCallable[node_pb2.StartScrubRequest, node_pb2.StartScrubResponse]
    InspectStores: grpc.UnaryUnaryMultiCallable[node_pb2.InspectStoresRequest, node_pb2.InspectStoresResponse]
    ListDevices: grpc.UnaryUnaryMultiCallable[node_pb2.ListDevicesRequest, node_pb2.ListDevicesResponse]
    DrainDevice: grpc.UnaryUnaryMultiCallable[node_pb2.DrainDeviceRequest, node_pb2.DrainDeviceResponse]
    RetireDevice: grpc.UnaryUnaryMultiCallable[node_pb2.RetireDeviceRequest, node_pb2.RetireDeviceResponse]
    ReadmitDevice: grpc.UnaryUnaryMultiCallable[node_pb2.ReadmitDeviceRequest, node_pb2.ReadmitDeviceResponse]
    Shutdown: grpc.UnaryUnaryMultiCallable[node_pb2.ShutdownRequest, node_pb2.ShutdownResponse]
    WatchEvents: grpc.UnaryStreamMultiCallable[node_pb2.WatchEventsRequest, node_pb2.Event]
    OpenWebSession: grpc.UnaryUnaryMultiCallable[
        node_pb2.OpenWebSessionRequest, node_pb2.OpenWebSessionResponse
    ]
    GetController: grpc.UnaryUnaryMultiCallable[node_pb2.GetControllerRequest, node_pb2.GetControllerResponse]
    SetBudget: grpc.UnaryUnaryMultiCallable[node_pb2.SetBudgetRequest, node_pb2.SetBudgetResponse]
    ForceCheckpoint: grpc.UnaryUnaryMultiCallable[
        node_pb2.ForceCheckpointRequest, node_pb2.ForceCheckpointResponse
    ]
    PauseCheckpoints: grpc.UnaryUnaryMultiCallable[
        node_pb2.PauseCheckpointsRequest, node_pb2.PauseCheckpointsResponse
    ]
    ResumeCheckpoints: grpc.UnaryUnaryMultiCallable[
        node_pb2.ResumeCheckpointsRequest, node_pb2.ResumeCheckpointsResponse
    ]
    ListRuns: grpc.UnaryUnaryMultiCallable[node_pb2.ListRunsRequest, node_pb2.ListRunsResponse]
    GetRun: grpc.UnaryUnaryMultiCallable[node_pb2.GetRunRequest, node_pb2.GetRunResponse]
    ListSlots: grpc.UnaryUnaryMultiCallable[node_pb2.ListSlotsRequest, node_pb2.ListSlotsResponse]
    PinCheckpoint: grpc.UnaryUnaryMultiCallable[node_pb2.PinCheckpointRequest, node_pb2.PinCheckpointResponse]
    UnpinCheckpoint: grpc.UnaryUnaryMultiCallable[
        node_pb2.UnpinCheckpointRequest, node_pb2.UnpinCheckpointResponse
    ]
    ExportCheckpoint: grpc.UnaryStreamMultiCallable[
        node_pb2.ExportCheckpointRequest, node_pb2.ExportCheckpointResponse
    ]
    ListCaches: grpc.UnaryUnaryMultiCallable[node_pb2.ListCachesRequest, node_pb2.ListCachesResponse]
    ListMembers: grpc.UnaryUnaryMultiCallable[node_pb2.ListMembersRequest, node_pb2.ListMembersResponse]
    ListGroups: grpc.UnaryUnaryMultiCallable[node_pb2.ListGroupsRequest, node_pb2.ListGroupsResponse]
    Drain: grpc.UnaryUnaryMultiCallable[node_pb2.DrainRequest, node_pb2.DrainResponse]
    IssueToken: grpc.UnaryUnaryMultiCallable[node_pb2.IssueTokenRequest, node_pb2.IssueTokenResponse]
    ListTokens: grpc.UnaryUnaryMultiCallable[node_pb2.ListTokensRequest, node_pb2.ListTokensResponse]
    RevokeToken: grpc.UnaryUnaryMultiCallable[node_pb2.RevokeTokenRequest, node_pb2.RevokeTokenResponse]
    GetQuotas: grpc.UnaryUnaryMultiCallable[node_pb2.GetQuotasRequest, node_pb2.GetQuotasResponse]
    ReloadConfig: grpc.UnaryUnaryMultiCallable[node_pb2.ReloadConfigRequest, node_pb2.ReloadConfigResponse]
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
    def WatchEvents(
        self,
        request: node_pb2.WatchEventsRequest,
        context: grpc.aio.ServicerContext[node_pb2.WatchEventsRequest, node_pb2.Event],
    ) -> AsyncGenerator[node_pb2.Event]: ...
    def OpenWebSession(
        self,
        request: node_pb2.OpenWebSessionRequest,
        context: grpc.aio.ServicerContext[node_pb2.OpenWebSessionRequest, node_pb2.OpenWebSessionResponse],
    ) -> Awaitable[node_pb2.OpenWebSessionResponse]: ...
    def GetController(
        self,
        request: node_pb2.GetControllerRequest,
        context: grpc.aio.ServicerContext[node_pb2.GetControllerRequest, node_pb2.GetControllerResponse],
    ) -> Awaitable[node_pb2.GetControllerResponse]: ...
    def SetBudget(
        self,
        request: node_pb2.SetBudgetRequest,
        context: grpc.aio.ServicerContext[node_pb2.SetBudgetRequest, node_pb2.SetBudgetResponse],
    ) -> Awaitable[node_pb2.SetBudgetResponse]: ...
    def ForceCheckpoint(
        self,
        request: node_pb2.ForceCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.ForceCheckpointRequest, node_pb2.ForceCheckpointResponse],
    ) -> Awaitable[node_pb2.ForceCheckpointResponse]: ...
    def PauseCheckpoints(
        self,
        request: node_pb2.PauseCheckpointsRequest,
        context: grpc.aio.ServicerContext[node_pb2.PauseCheckpointsRequest, node_pb2.PauseCheckpointsResponse],
    ) -> Awaitable[node_pb2.PauseCheckpointsResponse]: ...
    def ResumeCheckpoints(
        self,
        request: node_pb2.ResumeCheckpointsRequest,
        context: grpc.aio.ServicerContext[node_pb2.ResumeCheckpointsRequest, node_pb2.ResumeCheckpointsResponse],
    ) -> Awaitable[node_pb2.ResumeCheckpointsResponse]: ...
    def ListRuns(
        self,
        request: node_pb2.ListRunsRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListRunsRequest, node_pb2.ListRunsResponse],
    ) -> Awaitable[node_pb2.ListRunsResponse]: ...
    def GetRun(
        self,
        request: node_pb2.GetRunRequest,
        context: grpc.aio.ServicerContext[node_pb2.GetRunRequest, node_pb2.GetRunResponse],
    ) -> Awaitable[node_pb2.GetRunResponse]: ...
    def ListSlots(
        self,
        request: node_pb2.ListSlotsRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListSlotsRequest, node_pb2.ListSlotsResponse],
    ) -> Awaitable[node_pb2.ListSlotsResponse]: ...
    def PinCheckpoint(
        self,
        request: node_pb2.PinCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.PinCheckpointRequest, node_pb2.PinCheckpointResponse],
    ) -> Awaitable[node_pb2.PinCheckpointResponse]: ...
    def UnpinCheckpoint(
        self,
        request: node_pb2.UnpinCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.UnpinCheckpointRequest, node_pb2.UnpinCheckpointResponse],
    ) -> Awaitable[node_pb2.UnpinCheckpointResponse]: ...
    def ExportCheckpoint(
        self,
        request: node_pb2.ExportCheckpointRequest,
        context: grpc.aio.ServicerContext[node_pb2.ExportCheckpointRequest, node_pb2.ExportCheckpointResponse],
    ) -> AsyncGenerator[node_pb2.ExportCheckpointResponse]: ...
    def ListCaches(
        self,
        request: node_pb2.ListCachesRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListCachesRequest, node_pb2.ListCachesResponse],
    ) -> Awaitable[node_pb2.ListCachesResponse]: ...
    def ListMembers(
        self,
        request: node_pb2.ListMembersRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListMembersRequest, node_pb2.ListMembersResponse],
    ) -> Awaitable[node_pb2.ListMembersResponse]: ...
    def ListGroups(
        self,
        request: node_pb2.ListGroupsRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListGroupsRequest, node_pb2.ListGroupsResponse],
    ) -> Awaitable[node_pb2.ListGroupsResponse]: ...
    def Drain(
        self,
        request: node_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[node_pb2.DrainRequest, node_pb2.DrainResponse],
    ) -> Awaitable[node_pb2.DrainResponse]: ...
    def IssueToken(
        self,
        request: node_pb2.IssueTokenRequest,
        context: grpc.aio.ServicerContext[node_pb2.IssueTokenRequest, node_pb2.IssueTokenResponse],
    ) -> Awaitable[node_pb2.IssueTokenResponse]: ...
    def ListTokens(
        self,
        request: node_pb2.ListTokensRequest,
        context: grpc.aio.ServicerContext[node_pb2.ListTokensRequest, node_pb2.ListTokensResponse],
    ) -> Awaitable[node_pb2.ListTokensResponse]: ...
    def RevokeToken(
        self,
        request: node_pb2.RevokeTokenRequest,
        context: grpc.aio.ServicerContext[node_pb2.RevokeTokenRequest, node_pb2.RevokeTokenResponse],
    ) -> Awaitable[node_pb2.RevokeTokenResponse]: ...
    def GetQuotas(
        self,
        request: node_pb2.GetQuotasRequest,
        context: grpc.aio.ServicerContext[node_pb2.GetQuotasRequest, node_pb2.GetQuotasResponse],
    ) -> Awaitable[node_pb2.GetQuotasResponse]: ...
    def ReloadConfig(
        self,
        request: node_pb2.ReloadConfigRequest,
        context: grpc.aio.ServicerContext[node_pb2.ReloadConfigRequest, node_pb2.ReloadConfigResponse],
    ) -> Awaitable[node_pb2.ReloadConfigResponse]: ...

def add_NodeServicer_to_server(servicer: NodeServicer, server: grpc.aio.Server) -> None: ...
