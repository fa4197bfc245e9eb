"""The control API: gRPC on a unix socket beside the data socket. Decode, call, encode; nothing is decided here.

Every call needs a token from the data socket and a deadline of at most an hour; the guard checks both before any
handler runs. A caller sees its own runs (root: all); what belongs to others answers as if it did not exist.
"""

# ruff: noqa: N802 - the methods are named by node.proto

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import grpc.aio

from ..checkpoint.run_store import RunStore
from ..checkpoint.tags import remove_tag
from ..core.errors import ConfigError, EverstepError, NotFoundError, RunBusyError, UsageError
from ..core.ids import CheckpointId
from ..proto import node_pb2 as pb
from ..proto import node_pb2_grpc
from . import health, node_views, store_views
from .blocking import in_thread
from .control_messages import (
    cache_to_message,
    detail_to_message,
    finding_to_message,
    id_from_text,
    status_to_message,
    summary_to_message,
    verdict_to_message,
)
from .courtesy import Courtesy
from .device_messages import device_to_message, devices_to_message
from .status_codes import status_code
from .stores import OpenStore
from .views import CheckpointView, StatusView, StoreView

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

DEADLINE_S_MAX = 3600.0
REQUEST_BYTES_MAX = 1024 * 1024
RESPONSE_BYTES_MAX = 16 * 1024 * 1024
"""Room for the leaves of a checkpoint: about 200 bytes each."""
LEAF_COUNT_MAX = 20_000
STREAMS_MAX = 64
CALLS_MAX = 64
METADATA_BYTES_MAX = 8192
MESSAGE_CHARS_MAX, HINT_CHARS_MAX = 2000, 500
"""Errors travel in trailing metadata, which is bounded."""
CODE_KEY, HINT_KEY = "everstep-code", "everstep-hint-bin"
SOCKET_PATH_BYTES_MAX = 107
GRACE_S = 1.0

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", RESPONSE_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
]

# A handler's context carries no type of its own messages here: the guard wraps handlers of every type.
# (The classes are generic for the type checker only.)
if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
    _MethodHandler = grpc.RpcMethodHandler[Any, Any]
else:
    _Context, _MethodHandler = grpc.aio.ServicerContext, grpc.RpcMethodHandler
_Handler = Callable[[Any, _Context], Awaitable[object]]
_T = TypeVar("_T")

_caller_uid: ContextVar[int] = ContextVar("everstep_caller_uid")


class ControlServer:
    """The running server."""

    def __init__(self, server: grpc.aio.Server, served_health: health.Health) -> None:
        self._server, self.health = server, served_health

    async def stop(self) -> None:
        """Let running calls end, then stop; again is nothing."""
        await self._server.stop(GRACE_S)


async def serve_control(node: "Node", path: Path) -> ControlServer:
    """Return the server, answering on `path`, its health NOT_SERVING; the caller stops it.

    The directory of `path` must be private, and the caller must hold the daemon's lock file: gRPC removes whatever
    socket stands at the path before it binds.

    Raises:
        ConfigError: the path cannot be bound.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the control socket {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes",
            hint="choose a shorter path",
        )
    server = grpc.aio.server(interceptors=[Guard(node)], options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
    node_pb2_grpc.add_NodeServicer_to_server(NodeService(node), server)
    control = ControlServer(server, await health.serve_health(server))
    before = os.umask(0o077)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {path}: {error}", hint="is its directory writable?") from error
    finally:
        os.umask(before)
    await server.start()
    return control


class Guard(grpc.aio.ServerInterceptor):
    """Lets a call through that has a valid token and a deadline, and turns EverstepError into a status."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._courtesy = Courtesy(node.is_writing)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _MethodHandler | None:
        """Return the method's handler with the checks before it."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(health.METHODS):
            return handler  # health.py says why
        if handler is None or handler.unary_unary is None:
            return handler  # gRPC answers UNIMPLEMENTED
        inner = cast(_Handler, handler.unary_unary)

        async def guarded(request: object, context: _Context) -> object:
            return await self._call(inner, request, context)

        return grpc.unary_unary_rpc_method_handler(
            cast(Any, guarded),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _call(self, inner: _Handler, request: object, context: _Context) -> object:
        _caller_uid.set(await self._authenticate(context))
        left_s = await self._time_left(context)
        try:
            async with self._courtesy.answering(left_s):
                return await inner(request, context)
        except EverstepError as error:
            logger.info("control_refused code=%s message=%s", error.code, error.message)
            await self._refuse(context, error)
        except grpc.aio.AbortError:  # a handler has refused with a status of its own
            raise
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            await self._refuse(context, self._node.bug(type(request).__name__, error))

    @staticmethod
    async def _refuse(context: _Context, error: EverstepError) -> None:
        await context.abort(
            status_code(error),
            error.message[:MESSAGE_CHARS_MAX],
            trailing_metadata=(
                (CODE_KEY, error.code),
                (HINT_KEY, error.hint[:HINT_CHARS_MAX].encode()),
            ),
        )

    async def _authenticate(self, context: _Context) -> int:
        """Return the caller's uid."""
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        token = str(given).removeprefix("Bearer ")
        holder = self._node.tokens.holder(token) if token != given else None
        if holder is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the metadata `authorization: Bearer <token>` is missing or its token is not valid (any more):"
                " the data socket gives one, valid while that connection lasts",
            )
        return holder.uid

    @staticmethod
    async def _time_left(context: _Context) -> float:
        """Return the seconds to the call's deadline, which it must have."""
        left_s = cast("float | None", context.time_remaining())
        if left_s is None or left_s > DEADLINE_S_MAX + 1:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"every call needs a deadline of at most {DEADLINE_S_MAX:.0f} s"
                + ("" if left_s is None else f", this one has {left_s:.0f} s"),
            )
        return left_s


class NodeService(node_pb2_grpc.NodeServicer):
    """The methods of node.proto. Runs on the event loop; blocking work goes to threads."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._began_s = time.monotonic()
        self._verifying = asyncio.Semaphore(1)  # each takes 16 MiB per device

    async def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusResponse:
        """See node.proto."""
        node, names = self._node, self._node.config.device_names()
        stores = [await self._store_view(opened, names) for opened in node.stores.stores]
        daemon = node_views.daemon_view(node, began_s=self._began_s, is_draining=node.lifetime.is_ending)
        runs = node_views.run_views(node, _visible_uid())
        caches = node.caches.states(_visible_uid())
        return status_to_message(StatusView(daemon=daemon, runs=runs, stores=tuple(stores), caches=caches))

    async def DropCache(self, request: pb.DropCacheRequest, context: _Context) -> pb.DropCacheResponse:
        """See node.proto."""
        dropped = await self._node.caches.drop(request.number, _visible_uid())
        self._node.lifetime.changed()
        return pb.DropCacheResponse(dropped=cache_to_message(dropped))

    async def _store_view(self, opened: OpenStore, names: Mapping[str, str]) -> StoreView:
        found, scrubber = self._node.verifier.found(opened), self._node.scrubber
        lateness = scrubber.lateness(opened)
        view = await in_thread(node_views.store_view, opened, found, scrubber.view(opened), names)
        return replace(view, problems=(*view.problems, lateness)) if lateness else view

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: _Context
    ) -> pb.ListCheckpointsResponse:
        """See node.proto."""
        found: list[CheckpointView] = []
        for run in [self._run(request.run)] if request.run else self._runs():
            views = store_views.checkpoint_views(run, node_views.in_memory(self._node, run))
            found += views[: request.count_max or None]
        return pb.ListCheckpointsResponse(checkpoints=[summary_to_message(view) for view in found])

    async def GetCheckpoint(
        self, request: pb.GetCheckpointRequest, context: _Context
    ) -> pb.GetCheckpointResponse:
        """See node.proto."""
        run, checkpoint = self._selected(request.selector)
        detail = await in_thread(
            store_views.checkpoint_detail,
            run,
            checkpoint,
            leaf_count_max=min(request.leaf_count_max, LEAF_COUNT_MAX),
            in_memory=node_views.in_memory(self._node, run),
        )
        return await in_thread(detail_to_message, detail)

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: _Context
    ) -> pb.VerifyCheckpointResponse:
        """See node.proto."""
        run, checkpoint = self._selected(request.selector)
        async with self._verifying:
            return verdict_to_message(await self._node.verifier.verify(run, checkpoint))

    async def RemoveCheckpoint(
        self, request: pb.RemoveCheckpointRequest, context: _Context
    ) -> pb.RemoveCheckpointResponse:
        """See node.proto."""
        if not request.selector.checkpoint:
            raise UsageError("the checkpoint to remove is not named", hint="name it as <attempt>.<step>")
        run, checkpoint = self._selected(request.selector)
        views = store_views.checkpoint_views(run, node_views.in_memory(self._node, run))
        view = next(each for each in views if each.checkpoint == checkpoint)
        removed = await in_thread(store_views.remove, run, checkpoint, force=request.force)
        self._node.metrics.persists.deleted_total.inc(removed.checkpoint_count)
        logger.info("removed_by_hand run=%s checkpoint=%s force=%s", run.run_id, checkpoint, request.force)
        return pb.RemoveCheckpointResponse(removed=summary_to_message(view), freed_bytes=removed.freed_bytes)

    async def RemoveRun(self, request: pb.RemoveRunRequest, context: _Context) -> pb.RemoveRunResponse:
        """See node.proto."""
        run = self._run(request.run)
        busy = node_views.busy_reason(self._node, run)
        if busy:
            raise RunBusyError(busy, hint="stop the trainer first, or remove single checkpoints")
        store_views.check_no_tags(run, force=request.force)
        await self._forget_memory(run)
        removed = await in_thread(store_views.remove_all, run, force=request.force)
        self._node.metrics.persists.deleted_total.inc(removed.checkpoint_count)
        logger.info("run_removed_by_hand run=%s checkpoints=%d", run.run_id, removed.checkpoint_count)
        return pb.RemoveRunResponse(removed_count=removed.checkpoint_count, freed_bytes=removed.freed_bytes)

    async def TagCheckpoint(
        self, request: pb.TagCheckpointRequest, context: _Context
    ) -> pb.TagCheckpointResponse:
        """See node.proto."""
        run, checkpoint = self._selected(request.selector)
        memory = node_views.in_memory(self._node, run)
        view = await in_thread(store_views.tag, run, checkpoint, request.name, in_memory=memory)
        logger.info("tagged run=%s checkpoint=%s", run.run_id, checkpoint)
        return pb.TagCheckpointResponse(summary=summary_to_message(view))

    async def UntagCheckpoint(
        self, request: pb.UntagCheckpointRequest, context: _Context
    ) -> pb.UntagCheckpointResponse:
        """See node.proto."""
        run = self._run(request.run)
        checkpoint = await in_thread(remove_tag, run, request.name)
        logger.info("untagged run=%s checkpoint=%s", run.run_id, checkpoint)
        return pb.UntagCheckpointResponse(checkpoint=str(checkpoint))

    async def StartScrub(self, request: pb.StartScrubRequest, context: _Context) -> pb.StartScrubResponse:
        """See node.proto."""
        runs = [self._run(request.run)] if request.run else self._runs()
        started = self._node.scrubber.start(self._stores_in(request.directories), runs)
        return pb.StartScrubResponse(checkpoint_count=started.checkpoint_count, size_bytes=started.size_bytes)

    async def InspectStores(
        self, request: pb.InspectStoresRequest, context: _Context
    ) -> pb.InspectStoresResponse:
        """See node.proto."""
        await self._operator(context)
        reports = [await in_thread(store_views.inspect, opened.store) for opened in self._node.stores.stores]
        return pb.InspectStoresResponse(
            findings=[finding_to_message(each) for report in reports for each in report.findings],
            run_count=sum(report.run_count for report in reports),
            shard_count=sum(report.shard_count for report in reports),
        )

    async def ListDevices(self, request: pb.ListDevicesRequest, context: _Context) -> pb.ListDevicesResponse:
        """See node.proto."""
        return devices_to_message(await self._node.devices.devices(_visible_uid()))

    async def DrainDevice(self, request: pb.DrainDeviceRequest, context: _Context) -> pb.DrainDeviceResponse:
        """See node.proto."""
        await self._operator(context)
        device = await self._node.devices.drain(request.device, cancel=request.cancel)
        return pb.DrainDeviceResponse(device=device_to_message(device))

    async def RetireDevice(
        self, request: pb.RetireDeviceRequest, context: _Context
    ) -> pb.RetireDeviceResponse:
        """See node.proto."""
        await self._operator(context)
        done = await self._node.devices.retire(request.device, force=request.force, dry_run=request.dry_run)
        return pb.RetireDeviceResponse(device=device_to_message(done.device), problems=done.problems)

    async def ReadmitDevice(
        self, request: pb.ReadmitDeviceRequest, context: _Context
    ) -> pb.ReadmitDeviceResponse:
        """See node.proto."""
        await self._operator(context)
        done = await self._node.devices.readmit(request.directory)
        return pb.ReadmitDeviceResponse(
            device=device_to_message(done.device), new_device=done.is_new, aside=done.aside
        )

    async def Shutdown(self, request: pb.ShutdownRequest, context: _Context) -> pb.ShutdownResponse:
        """See node.proto."""
        node, uid = self._node, await self._operator(context)
        persisted, failed = (
            node_views.total(node, name) for name in (node_views.PERSISTED, node_views.FAILED)
        )
        attached_count = node_views.attached_count(node)
        node.lifetime.end(f"stopped by uid {uid}")
        unsettled_count = 0
        try:
            async with asyncio.timeout(request.drain_s or node.config.daemon.drain_s):
                await node.persister.idle()
        except TimeoutError:
            unsettled_count = sum(rank.writing for rank in node.registry.ranks())
        return pb.ShutdownResponse(
            persisted_count=node_views.total(node, node_views.PERSISTED) - persisted,
            lost_count=node_views.total(node, node_views.FAILED) - failed + unsettled_count,
            attached_count=attached_count,
        )

    # -- parts

    @staticmethod
    async def _operator(context: _Context) -> int:
        """Return the caller's uid, if it is the daemon's or root's: for what concerns every run."""
        uid = _caller_uid.get()
        if uid not in (0, os.getuid()):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"this daemon belongs to uid {os.getuid()}"
            )
        return uid

    def _runs(self) -> list[RunStore]:
        return store_views.visible_runs([opened.store for opened in self._node.stores.stores], _visible_uid())

    def _run(self, text: str) -> RunStore:
        if not text:
            raise UsageError("no run is named", hint="name it as given to attach(), or by its id")
        stores = [opened.store for opened in self._node.stores.stores]
        return store_views.find_run(stores, text, _visible_uid())

    def _stores_in(self, directories: Sequence[str]) -> list[OpenStore]:
        """Return the open stores that these directories belong to; all for none."""
        stores = self._node.stores.stores
        if not directories:
            return stores
        found: dict[OpenStore, None] = {}
        for directory in directories:
            opened = next((each for each in stores if directory in each.paths), None)
            if opened is None:
                raise NotFoundError(
                    f"{directory} is no device of an open store", hint="`everstep status` lists them"
                )
            found[opened] = None
        return list(found)

    def _selected(self, selector: pb.Selector) -> tuple[RunStore, CheckpointId]:
        run = self._run(selector.run)
        return run, store_views.select_checkpoint(run, id_from_text(selector.checkpoint))

    async def _forget_memory(self, run: RunStore) -> None:
        """Drop the snapshots that wait for a restart: the run is removed, they must not bring it back."""
        record = node_views.record_of(self._node, run)
        closing: list[asyncio.Task[None]] = []
        for rank in record.ranks.values() if record else ():
            rank.kept_until_s = None
            closing += self._node.drop_memory(rank)
        self._node.lifetime.changed()
        if closing:
            await asyncio.wait(closing)


def _visible_uid() -> int | None:
    """Return whose runs the caller may see; None: everybody's."""
    uid = _caller_uid.get()
    return uid or None
