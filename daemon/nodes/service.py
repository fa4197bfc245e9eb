"""Serves other nodes' daemons: gRPC on TCP. Decode, check, call, encode; nothing is decided here.

Who calls has to be a member's daemon (credentials.py); what it says of users is believed. Bounds: messages, calls,
calls that read at the same time, and the time that a caller gives.
"""

# ruff: noqa: N802 - the methods are named by peer.proto

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio

from ...core.errors import ConfigError
from ...proto import peer_pb2 as pb
from ...proto.peer_frames import ASK_SAMPLES_MAX
from ...proto.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server
from ..blocking import in_executor
from ..cache.arena import Found
from .credentials import Credentials
from .dataset import DatasetKey
from .outbox_plan import Parcel
from .peer_node import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from ..cache.book import CacheBook
    from ..cache.cache import Cache
    from .peer_book import PeerBook

    _Context = grpc.aio.ServicerContext[Any, Any]
    _MethodHandler = grpc.RpcMethodHandler[Any, Any]
else:
    _Context, _MethodHandler = grpc.aio.ServicerContext, grpc.RpcMethodHandler

logger = logging.getLogger(__name__)

CALLS_MAX = 256
READING_MAX = 8
"""Calls that hold samples in memory at the same time: 8 messages of 4 MiB, or one large sample each."""
CHUNK_BYTES = 4 * 1024 * 1024
DEADLINE_S_MAX = 60.0
GRACE_S = 0.5
HANDSHAKE_MS = 10_000
"""Whoever has said nothing for so long is let go."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", CALLS_MAX),
    ("grpc.max_metadata_size", 8192),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
]


class PeerServer:
    """The running server."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server, self.port = server, port

    async def stop(self) -> None:
        """Stop; again is nothing."""
        await self._server.stop(GRACE_S)


async def serve_peers(peers: "PeerBook", caches: "CacheBook") -> PeerServer | None:
    """Return the server, answering; None: the configuration wants none. The caller stops it.

    Raises:
        ConfigError: nobody can listen there, or a file of the credentials is not right.
    """
    section = peers.section
    if not section.listen:
        return None
    credentials = Credentials(section)
    server = grpc.aio.server(
        interceptors=[TokenGuard(credentials)], options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX
    )
    add_PeerServicer_to_server(PeerService(peers, caches, credentials), server)
    port = credentials.listen(server, section.listen)
    if not port:
        raise ConfigError(f"cache.listen: cannot listen on {section.listen}", hint="is the port taken?")
    await server.start()
    peers.credentials = credentials
    logger.info("cache_serves_peers port=%d tls=%s", port, section.has_tls)
    return PeerServer(server, port)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses a call without the members' token before its message is read."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _MethodHandler | None:
        """Return the method's handler, or one that refuses."""
        metadata = cast(
            Sequence[tuple[str, str | bytes]], tuple(handler_call_details.invocation_metadata or ())
        )
        if self._credentials.token_holds(metadata):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(cast(Any, _refuse_token))


async def _refuse_token(_: object, context: _Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not the members'")


class PeerService(PeerServicer):
    """See peer.proto."""

    def __init__(self, peers: "PeerBook", caches: "CacheBook", credentials: Credentials) -> None:
        self._peers, self._caches, self._credentials = peers, caches, credentials
        self._reading = asyncio.Semaphore(READING_MAX)
        self._taking = asyncio.Semaphore(READING_MAX)

    async def Fetch(self, request: pb.FetchRequest, context: _Context) -> AsyncIterator[pb.FetchResponse]:
        """See peer.proto."""
        cache = await self._cache(request.dataset, request.members_digest, context)
        numbers = list(request.samples)
        count = cache.arena.space.sample_count
        if len(numbers) > ASK_SAMPLES_MAX or any(each >= count for each in numbers):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many samples, or one that cannot be")
        with cache.pinned():
            found = [each for number in numbers if (each := cache.arena.find(number)) is not None]
            chosen, left_out = _within(found, min(request.size_bytes_max, MESSAGE_BYTES_MAX - CHUNK_BYTES))
            for chunk in _chunks(chosen):
                async with self._reading:
                    contents = await in_executor(self._peers.threads, partial(cache.arena.read, chunk))
                    response = pb.FetchResponse(
                        samples=[
                            pb.Sample(number=each.sample, digest=each.digest, data=data)
                            for each, data in zip(chunk, contents, strict=True)
                        ]
                    )
                    self._peers.metrics.count("served", len(chunk), sum(map(len, contents)))
                    yield response
        if left_out:
            yield pb.FetchResponse(left_out=left_out)

    async def Offer(self, request: pb.OfferRequest, context: _Context) -> pb.OfferResponse:
        """See peer.proto."""
        cache = await self._cache(request.dataset, request.members_digest, context)
        count = cache.arena.space.sample_count
        if len(request.samples) > ASK_SAMPLES_MAX or any(each.number >= count for each in request.samples):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many samples, or one that cannot be")
        async with self._taking:
            parcels = [Parcel(each.number, each.digest, each.data) for each in request.samples]
            with cache.pinned():
                held_count = await self._caches.take_offer(cache, parcels)
        self._peers.metrics.count("taken", held_count, sum(len(each.data) for each in parcels[:held_count]))
        return pb.OfferResponse(held_count=held_count, room_bytes=cache.arena.space.free_bytes)

    async def Probe(self, request: pb.ProbeRequest, context: _Context) -> pb.ProbeResponse:
        """See peer.proto."""
        await self._check(context)
        return pb.ProbeResponse()

    async def _cache(self, message: pb.Dataset, digest: int, context: _Context) -> "Cache":
        """Return the cache that a call is about, once its caller may know of it."""
        await self._check(context)
        try:
            dataset = DatasetKey.from_message(message)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        cache = self._caches.find(dataset)
        if cache is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this node has no cache of that dataset")
        sharing = self._peers.sharing(dataset)
        if sharing is None or sharing.digest != digest:
            self._peers.metrics.disagreements.inc()
        return cache

    async def _check(self, context: _Context) -> None:
        left_s = cast("float | None", context.time_remaining())  # the stub does not know of None
        if left_s is None or left_s > DEADLINE_S_MAX:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call needs a deadline")
        names = context.auth_context().get("x509_subject_alternative_name", [])
        if not self._credentials.name_holds([bytes(each) for each in names]):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate is no member's")


def _within(found: Sequence[Found], size_bytes_max: int) -> tuple[list[Found], list[int]]:
    """Return the samples that fit in so many bytes together, and those left out that would fit alone."""
    chosen: list[Found] = []
    left_out: list[int] = []
    left_bytes = size_bytes_max
    for each in found:
        if each.length <= left_bytes:
            chosen.append(each)
            left_bytes -= each.length
        elif each.length <= size_bytes_max:
            left_out.append(each.sample)
    return chosen, left_out


def _chunks(found: Sequence[Found]) -> list[list[Found]]:
    """Return them in messages: each of some MiB at most, or one larger sample."""
    chunks: list[list[Found]] = []
    size_bytes = 0
    for each in found:
        if not chunks or size_bytes + each.length > CHUNK_BYTES:
            chunks.append([])
            size_bytes = 0
        chunks[-1].append(each)
        size_bytes += each.length
    return chunks
