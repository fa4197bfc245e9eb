"""Stands before every call of the control API: who calls, may it, has it a deadline, is it too much; and its errors.

The caller is known before anything of its request is read, so that who is nobody makes the daemon wait for nothing.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ...core.errors import EverstepError
from ..control import health
from ..control.caller import Context, caller_uid
from ..control.status_codes import MESSAGE_CHARS_MAX, status_code, trailing_metadata
from ..courtesy import Courtesy
from .access import NotAllowedError, UnknownCallerError
from .open_calls import OpenCalls
from .roles_plan import Caller, bare_name
from .service import caller_of

if TYPE_CHECKING:
    from ..node import Node

    _MethodHandler = grpc.RpcMethodHandler[Any, Any]
else:
    _MethodHandler = grpc.RpcMethodHandler

_Handler = Callable[[Any, Context], Awaitable[object]]
_StreamHandler = Callable[[Any, Context], AsyncGenerator[object]]

DEADLINE_S_MAX = 3600.0
MESSAGE_DEADLINE_S = 10.0
"""For a request to come after its headers: who sends none holds one of the calls for so long."""
OPEN = (health.METHODS, "/grpc.reflection.")
"""Services that ask for no caller: whether the daemon takes work, and what the API looks like where that is served."""
FOLLOWING = frozenset({"/everstep.node.v1.Node/WatchEvents"})
"""Calls that may go on without end: they need no deadline."""


class Guard(grpc.aio.ServerInterceptor):
    """Lets a call through whose caller is known and may, and turns EverstepError into a status."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._courtesy, self._open = Courtesy(), OpenCalls()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _MethodHandler | None:
        """Return the method's handler with the checks before it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        if method.startswith(OPEN):
            return self._open.bounded(handler)  # health.py says why it is open
        if handler.unary_unary is not None:
            inner = cast(_Handler, handler.unary_unary)

            async def guarded(requests: AsyncIterator[object], context: Context) -> object:
                return await self._call(inner, requests, context, method)

            # As a stream of one request, which is waited for inside. It is the same on the wire.
            make, behaviour = grpc.stream_unary_rpc_method_handler, cast(Any, guarded)
        elif handler.unary_stream is not None:
            following = cast(_StreamHandler, handler.unary_stream)

            async def streamed(requests: AsyncIterator[object], context: Context) -> AsyncIterator[object]:
                async for answer in self._stream(following, requests, context, method):
                    yield answer

            make, behaviour = grpc.stream_stream_rpc_method_handler, cast(Any, streamed)
        else:  # the API has none that takes a stream, and one that is added must not go by unguarded
            return None
        return cast(Any, make)(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _call(
        self, inner: _Handler, requests: AsyncIterator[object], context: Context, method: str
    ) -> object:
        caller = await self._admit(context, method)
        left_s = await self._time_left(context)
        try:
            with self._counted(caller.uid), self._node.stores.in_hand():
                request = await self._request(requests, context)
                async with self._courtesy.answering(self._node.is_writing, left_s):
                    return await inner(request, context)
        except grpc.aio.AbortError:  # a handler has refused with a status of its own
            raise
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            await self._fail(context, caller, method, error)

    async def _stream(
        self, inner: _StreamHandler, requests: AsyncIterator[object], context: Context, method: str
    ) -> AsyncIterator[object]:
        caller = await self._admit(context, method)
        in_hand = contextlib.nullcontext()
        if method not in FOLLOWING:
            await self._time_left(context)
            in_hand = self._node.stores.in_hand()
        try:
            with self._counted(caller.uid), in_hand:
                request = await self._request(requests, context)
                async with contextlib.aclosing(inner(request, context)) as answers:
                    async for answer in answers:
                        yield answer
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            await self._fail(context, caller, method, error)

    async def _admit(self, context: Context, method: str) -> Caller:
        """Return the caller, who may call the method; its handler sees it in `caller_uid` and `caller_of`."""
        if not context.peer():  # who has left by now is nobody, and no attack
            raise asyncio.CancelledError
        metadata = cast(Sequence[tuple[str, str | bytes]], tuple(context.invocation_metadata() or ()))
        try:
            caller = self._node.access.caller(metadata, context.auth_context(), context.peer())
        except UnknownCallerError as error:
            self._node.metrics.sockets.refused_total.labels("caller_unknown").inc()
            self._node.refusals.add("caller_unknown", "control", "", str(error))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        try:
            self._node.access.check(caller, method)
        except NotAllowedError as error:
            self._node.metrics.sockets.refused_total.labels("caller_not_allowed").inc()
            self._node.refusals.add("caller_not_allowed", caller.name, bare_name(method), str(error))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        caller_uid.set(caller.uid)
        caller_of.set(caller)
        return caller

    @contextlib.contextmanager
    def _counted(self, uid: int) -> Generator[None]:
        """Count a call of a user while the block runs; QuotaError where it has too many."""
        quotas = self._node.quotas
        is_operator = uid in (0, os.getuid())
        quotas.begin_call(uid, asyncio.get_running_loop().time(), is_operator=is_operator)
        try:
            yield
        finally:
            quotas.end_call(uid)

    async def _fail(self, context: Context, caller: Caller, method: str, error: Exception) -> NoReturn:
        """Abort a call with what its caller should know of an error."""
        if isinstance(error, EverstepError):
            self._node.refusals.add("control_refused", caller.name, error.code, error.message)
        else:
            error = self._node.bug(bare_name(method), error)
        await context.abort(
            status_code(error),
            error.message[:MESSAGE_CHARS_MAX],
            trailing_metadata=trailing_metadata(error),
        )

    @staticmethod
    async def _request(requests: AsyncIterator[object], context: Context) -> object:
        """Return the one request of a call."""
        try:
            async with asyncio.timeout(MESSAGE_DEADLINE_S):
                async for request in requests:
                    return request
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this call")
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {MESSAGE_DEADLINE_S:.0f} s"
            )
        try:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call brings no request")
        except (
            grpc.aio.InternalError
        ) as error:  # there is nobody to tell: the caller has left, or its time is over
            raise asyncio.CancelledError from error

    @staticmethod
    async def _time_left(context: Context) -> float:
        """Return the seconds to the call's deadline, which it must have."""
        left_s = cast("float | None", context.time_remaining())
        if left_s is None or left_s > DEADLINE_S_MAX + 1:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"every call needs a deadline of at most {DEADLINE_S_MAX:.0f} s"
                + ("" if left_s is None else f", this one has {left_s:.0f} s"),
            )
        return left_s
