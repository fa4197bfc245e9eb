"""Calls that ask for no caller: bounded in time and number, so that strangers hold no room of those who are known.

gRPC's server counts a call from its headers on, and waits for its request, or for the end of a stream, without end.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ..control.caller import Context

if TYPE_CHECKING:
    MethodHandler = grpc.RpcMethodHandler[Any, Any]
else:
    MethodHandler = grpc.RpcMethodHandler

WAITING_MAX, STREAMS_MAX = 16, 16
"""Calls whose request has not come yet, and streams. When another comes the oldest one ends."""
REQUEST_S = 2.0
"""For a request to come after its headers."""


class OpenCalls(grpc.aio.ServerInterceptor):
    """Bounds the calls of one server; as an interceptor, all of them. Owned by the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, None] = {}
        self._streams: dict[asyncio.Timeout, None] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        """Return the method's handler, bounded."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.bounded(handler)

    def bounded(self, handler: MethodHandler) -> MethodHandler:
        """Return the handler of a call so that it is bounded; the same on the wire."""
        if handler.unary_unary is not None:
            inner = cast(Callable[[Any, Context], Awaitable[object]], handler.unary_unary)

            async def answered(requests: AsyncIterator[object], context: Context) -> object:
                return await inner(await self._request(requests, context), context)

            make, behaviour = grpc.stream_unary_rpc_method_handler, cast(Any, answered)
        else:

            async def streamed(requests: AsyncIterator[object], context: Context) -> None:
                await self._stream(handler, requests, context)

            make, behaviour = grpc.stream_stream_rpc_method_handler, cast(Any, streamed)
        return cast(Any, make)(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _request(self, requests: AsyncIterator[object], context: Context) -> object:
        try:
            async with _room(self._waiting, WAITING_MAX, REQUEST_S):
                async for request in requests:
                    return request
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this call")
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no request came within {REQUEST_S:.0f} s, or before many others asked",
            )
        raise asyncio.CancelledError  # there is nobody to tell: the caller has left

    async def _stream(
        self, handler: MethodHandler, requests: AsyncIterator[object], context: Context
    ) -> None:
        """Answer until the stream ends, or makes room for another."""
        behaviour: Any = handler.stream_stream or handler.unary_stream
        request = requests if handler.stream_stream else await self._request(requests, context)
        try:
            async with _room(self._streams, STREAMS_MAX, None):
                answers = behaviour(request, context)
                if not isinstance(answers, AsyncIterable):  # it writes for itself
                    await answers
                    return
                async for answer in cast("AsyncIterable[Any]", answers):
                    await context.write(answer)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others follow this, too: ask again")


@contextlib.asynccontextmanager
async def _room(
    taken: dict[asyncio.Timeout, None], count_max: int, limit_s: float | None
) -> AsyncGenerator[None]:
    """Run the block for `limit_s` at most, or until `count_max` others came after it; then TimeoutError."""
    if len(taken) >= count_max:
        oldest = next(iter(taken))
        del taken[oldest]
        oldest.reschedule(asyncio.get_running_loop().time())
    async with asyncio.timeout(limit_s) as timeout:
        taken[timeout] = None
        try:
            yield
        finally:
            taken.pop(timeout, None)
