"""The rpc that drains the node. A mix-in of the service; see node.proto."""

# ruff: noqa: N802 - the methods are named by node.proto

import asyncio
import logging
from typing import TYPE_CHECKING

from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from ..events.event_types import EventKind
from . import node_views
from .caller import Context, operator

if TYPE_CHECKING:
    from ..node import Node
    from .health import Health

logger = logging.getLogger(__name__)

ROOM_S = 0.5


class DrainService(node_pb2_grpc.NodeServicer):
    """No new work, while what is there goes on."""

    _node: "Node"
    _health: "Health"

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """See node.proto."""
        uid, node = await operator(context), self._node
        if node.takes_runs and not request.cancel:
            node.reporter.add(EventKind.DRAINING, f"the node takes no new runs, as uid {uid} asked")
        logger.info("drain uid=%d cancel=%s", uid, request.cancel)
        node.takes_runs = request.cancel
        await self._health.set(serving=request.cancel and not node.lifetime.is_ending)
        unsettled_count = 0
        if not request.cancel:
            left_s = context.time_remaining()
            try:
                async with asyncio.timeout(max(left_s - ROOM_S, 0.0)):
                    await node.persister.idle()
            except TimeoutError:
                unsettled_count = sum(rank.writing for rank in node.registry.ranks())
            else:
                node.reporter.add(EventKind.DRAINED, "everything that is sealed is persisted")
        return pb.DrainResponse(
            draining=not node.takes_runs,
            unsettled_count=unsettled_count,
            attached_count=node_views.attached_count(node),
        )
