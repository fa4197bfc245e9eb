"""The rpcs of events. A mix-in of the service; see node.proto."""

# ruff: noqa: N802 - the methods are named by node.proto

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from .caller import Context, visible_uid
from .event_messages import event_to_message, query_from_message

if TYPE_CHECKING:
    from ..node import Node


class EventService(node_pb2_grpc.NodeServicer):
    """What happened."""

    _node: "Node"

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Context) -> AsyncGenerator[pb.Event]:
        """See node.proto."""
        query = query_from_message(request)
        async with contextlib.aclosing(self._node.events.watch(visible_uid(), query)) as events:
            async for event in events:
                yield event_to_message(event)
