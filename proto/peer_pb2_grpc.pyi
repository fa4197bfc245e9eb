"""Types of the generated service code: an asyncio stub and an asyncio servicer, both of them the daemon's."""

from collections.abc import AsyncIterator, Awaitable

import grpc.aio

from . import peer_pb2

class PeerStub:
    Fetch: grpc.aio.UnaryStreamMultiCallable[peer_pb2.FetchRequest, peer_pb2.FetchResponse]
    Offer: grpc.aio.UnaryUnaryMultiCallable[peer_pb2.OfferRequest, peer_pb2.OfferResponse]
    Probe: grpc.aio.UnaryUnaryMultiCallable[peer_pb2.ProbeRequest, peer_pb2.ProbeResponse]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class PeerServicer:
    def Fetch(
        self,
        request: peer_pb2.FetchRequest,
        context: grpc.aio.ServicerContext[peer_pb2.FetchRequest, peer_pb2.FetchResponse],
    ) -> AsyncIterator[peer_pb2.FetchResponse]: ...
    def Offer(
        self,
        request: peer_pb2.OfferRequest,
        context: grpc.aio.ServicerContext[peer_pb2.OfferRequest, peer_pb2.OfferResponse],
    ) -> Awaitable[peer_pb2.OfferResponse]: ...
    def Probe(
        self,
        request: peer_pb2.ProbeRequest,
        context: grpc.aio.ServicerContext[peer_pb2.ProbeRequest, peer_pb2.ProbeResponse],
    ) -> Awaitable[peer_pb2.ProbeResponse]: ...

def add_PeerServicer_to_server(servicer: PeerServicer, server: grpc.aio.Server) -> None: ...
