"""The control API: gRPC on a unix socket beside the data socket. Decode, call, encode; nothing is decided here.

Every call needs a token from the data socket and a deadline of at most an hour; the guard checks both before any
handler runs. A caller sees its own runs (root: all); what belongs to others answers as if it did not exist.
"""

# ruff: noqa: N802 - the methods are named by node.proto

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from ...checkpoint.run_store import RunStore
from ...checkpoint.tags import remove_tag
from ...core.errors import ConfigError, NotFoundError, RunBusyError, UsageError
from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from ..access.certificates import Certificates
from ..access.connection_bound import ConnectionBound
from ..access.guard import Guard
from ..access.section import ControlSection
from ..access.served_users import SHARED_SOCKET_MODE
from ..access.service import AccessService
from ..blocking import in_thread
from ..devices.stores import OpenStore
from . import health, node_views, reflection, store_views
from .caller import Context, operator, visible_uid
from .config_messages import reload_to_message
from .controller_service import ControllerService
from .device_messages import device_to_message, devices_to_message
from .drain_service import DrainService
from .event_service import EventService
from .keep_service import KeepService
from .messages import (
    cache_to_message,
    detail_to_message,
    finding_to_message,
    status_to_message,
    summary_to_message,
    verdict_to_message,
)
from .run_service import RunService
from .selecting import Selecting
from .views import CheckpointView, StatusView, StoreView
from .web_service import WebService

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 1024 * 1024
RESPONSE_BYTES_MAX = 16 * 1024 * 1024
"""Room for the leaves of a checkpoint: about 200 bytes each."""
LEAF_COUNT_MAX = 20_000
STREAMS_MAX = 64
CALLS_MAX = 128
CONNECTIONS_MAX = 1024
HANDSHAKE_MS, IDLE_MS = 10_000, 60_000
METADATA_BYTES_MAX = 8192
SOCKET_PATH_BYTES_MAX = 107
GRACE_S = 1.0

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", RESPONSE_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
]

_Context = Context


class ControlServer:
    """The running server."""

    def __init__(
        self, server: grpc.aio.Server, served_health: health.Health, bound: ConnectionBound | None
    ) -> None:
        self._server, self.health, self._bound = server, served_health, bound

    async def stop(self) -> None:
        """Let running calls end, then stop; again is nothing."""
        if self._bound is not None:
            self._bound.stop()
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
    sockets = [str(path), node.config.health_check.socket]
    bound = None if node.private else ConnectionBound(node, [each for each in sockets if each])
    control = ControlServer(server, await health.serve_health(server), bound)
    node_pb2_grpc.add_NodeServicer_to_server(NodeService(node, control.health), server)
    if node.config.daemon.reflection:
        reflection.serve_reflection(server)
    before = os.umask(0o077)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {path}: {error}", hint="is its directory writable?") from error
    finally:
        os.umask(before)
    if node.served.are_several:
        path.chmod(SHARED_SOCKET_MODE)  # noqa: ASYNC240 - of a socket, before the first client
    _listen_on_network(server, node.config.control)
    await server.start()
    if bound is not None:
        bound.start()
    return control


def _listen_on_network(server: grpc.aio.Server, section: ControlSection) -> None:
    if not section.listen:
        return
    credentials = Certificates(section).server_credentials()
    try:
        port = server.add_secure_port(section.listen, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"control.listen: cannot listen on {section.listen}: {error}", hint="is the port taken?"
        ) from error
    logger.info("control_serves_network port=%d clients=%d", port, len(section.clients))


class NodeService(
    EventService,
    ControllerService,
    RunService,
    KeepService,
    DrainService,
    AccessService,
    WebService,
    Selecting,
):
    """The methods of node.proto. Runs on the event loop; blocking work goes to threads."""

    def __init__(self, node: "Node", served_health: health.Health) -> None:
        KeepService.__init__(self)
        AccessService.__init__(self, node)
        self._node, self._health = node, served_health
        self._began_s = time.monotonic()
        self._verifying = asyncio.Semaphore(1)  # each takes 16 MiB per device

    async def GetStatus(self, request: pb.GetStatusRequest, context: _Context) -> pb.GetStatusResponse:
        """See node.proto."""
        node, names = self._node, self._node.config.device_names()
        stores = [await self._store_view(opened, names) for opened in node.stores.stores]
        uid = visible_uid()
        if uid not in (None, os.getuid()):
            stores = [node_views.for_others(view) for view in stores]
        daemon = node_views.daemon_view(node, began_s=self._began_s, is_draining=node.is_draining)
        runs = node_views.run_views(node, uid)
        view = StatusView(
            daemon=daemon,
            runs=runs,
            stores=tuple(stores),
            caches=node.caches.states(uid),
            groups=node.shares.views(uid),
            members=node.peers.states(),
        )
        return status_to_message(view)

    async def DropCache(self, request: pb.DropCacheRequest, context: _Context) -> pb.DropCacheResponse:
        """See node.proto."""
        dropped = await self._node.caches.drop(request.number, visible_uid())
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
        view = store_views.checkpoint_view(run, checkpoint, node_views.in_memory(self._node, run))
        removed = await in_thread(store_views.remove, run, checkpoint, force=request.force)
        self._node.metrics.persists.deleted_total.inc(removed.checkpoint_count)
        logger.info("removed_by_hand run=%s checkpoint=%s force=%s", run.run_id, checkpoint, request.force)
        self._node.reporter.removed(
            run, checkpoint, count=removed.checkpoint_count, freed_bytes=removed.freed_bytes
        )
        return pb.RemoveCheckpointResponse(removed=summary_to_message(view), freed_bytes=removed.freed_bytes)

    async def RemoveRun(self, request: pb.RemoveRunRequest, context: _Context) -> pb.RemoveRunResponse:
        """See node.proto."""
        run = self._run(request.run)
        busy = node_views.busy_reason(self._node, run)
        if busy:
            raise RunBusyError(busy, hint="stop the trainer first, or remove single checkpoints")
        store_views.check_removable(run, force=request.force)
        await self._forget_memory(run)
        removed = await in_thread(store_views.remove_all, run, force=request.force)
        self._node.metrics.persists.deleted_total.inc(removed.checkpoint_count)
        logger.info("run_removed_by_hand run=%s checkpoints=%d", run.run_id, removed.checkpoint_count)
        self._node.reporter.removed(
            run, None, count=removed.checkpoint_count, freed_bytes=removed.freed_bytes
        )
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
        await operator(context)
        reports = [await in_thread(store_views.inspect, opened.store) for opened in self._node.stores.stores]
        return pb.InspectStoresResponse(
            findings=[finding_to_message(each) for report in reports for each in report.findings],
            run_count=sum(report.run_count for report in reports),
            shard_count=sum(report.shard_count for report in reports),
        )

    async def ListDevices(self, request: pb.ListDevicesRequest, context: _Context) -> pb.ListDevicesResponse:
        """See node.proto."""
        return devices_to_message(await self._node.devices.devices(visible_uid()))

    async def DrainDevice(self, request: pb.DrainDeviceRequest, context: _Context) -> pb.DrainDeviceResponse:
        """See node.proto."""
        await operator(context)
        device = await self._node.devices.drain(request.device, cancel=request.cancel)
        return pb.DrainDeviceResponse(device=device_to_message(device))

    async def RetireDevice(
        self, request: pb.RetireDeviceRequest, context: _Context
    ) -> pb.RetireDeviceResponse:
        """See node.proto."""
        await operator(context)
        done = await self._node.devices.retire(request.device, force=request.force, dry_run=request.dry_run)
        return pb.RetireDeviceResponse(device=device_to_message(done.device), problems=done.problems)

    async def ReadmitDevice(
        self, request: pb.ReadmitDeviceRequest, context: _Context
    ) -> pb.ReadmitDeviceResponse:
        """See node.proto."""
        await operator(context)
        done = await self._node.devices.readmit(request.directory)
        return pb.ReadmitDeviceResponse(
            device=device_to_message(done.device), new_device=done.is_new, aside=done.aside
        )

    async def Shutdown(self, request: pb.ShutdownRequest, context: _Context) -> pb.ShutdownResponse:
        """See node.proto."""
        node, uid = self._node, await operator(context)
        if not request.drain_s >= 0:  # also not a number, which would confuse the loop's timers
            raise UsageError(f"drain_s is {request.drain_s:g}", hint="seconds; 0: as the configuration says")
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
        newly_failed = node_views.total(node, node_views.FAILED) - failed
        # What a trainer seals at this moment is written while the daemon ends.
        in_memory_count = sum(
            rank.unwritten is not None and not rank.persisting for rank in node.registry.ranks()
        )
        return pb.ShutdownResponse(
            persisted_count=node_views.total(node, node_views.PERSISTED) - persisted,
            lost_count=max(newly_failed + unsettled_count, in_memory_count),
            attached_count=attached_count,
        )

    # Reading the configuration again
    async def ReloadConfig(
        self, request: pb.ReloadConfigRequest, context: _Context
    ) -> pb.ReloadConfigResponse:
        """See node.proto."""
        await operator(context)
        reloader = self._node.reloader
        return reload_to_message(await (reloader.try_reload() if request.dry_run else reloader.reload()))

    # -- parts

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

    async def _forget_memory(self, run: RunStore) -> None:
        """Drop the snapshots that wait for a restart: the run is removed, they must not bring it back."""
        record = node_views.record_of(self._node, run)
        closing: list[asyncio.Task[None]] = []
        for rank in record.ranks.values() if record else ():
            rank.kept_until_s = None
            closing += self._node.arena_desk.drop_memory(rank)
        self._node.lifetime.changed()
        if closing:
            await asyncio.wait(closing)
