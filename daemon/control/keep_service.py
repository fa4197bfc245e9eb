"""The rpcs that keep checkpoints from being collected: pins, and exports. A mix-in of the service; see node.proto."""

# ruff: noqa: N802 - the methods are named by node.proto

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator

from ...checkpoint.pins import remove_pin
from ...core.errors import LimitError
from ...proto import node_pb2 as pb
from ..blocking import in_thread
from . import node_views, store_views
from .caller import Context, caller_uid
from .messages import summary_to_message
from .selecting import Selecting

logger = logging.getLogger(__name__)

EXPORTS_MAX, EXPORTS_USER_MAX = 16, 4
"""Each takes one of the calls that the daemon answers at once, for as long as it lasts."""
ROOM_S = 0.5


class KeepService(Selecting):
    """What stays for a while."""

    def __init__(self) -> None:
        self._exporting = Counter[int]()

    async def PinCheckpoint(
        self, request: pb.PinCheckpointRequest, context: Context
    ) -> pb.PinCheckpointResponse:
        """See node.proto."""
        run, checkpoint = self._selected(request.selector)
        memory = node_views.in_memory(self._node, run)
        view = await in_thread(
            store_views.pin, run, checkpoint, request.label, ttl_s=request.ttl_s, in_memory=memory
        )
        self._node.pins.changed()
        logger.info("pinned run=%s checkpoint=%s ttl_s=%.0f", run.run_id, checkpoint, request.ttl_s)
        return pb.PinCheckpointResponse(summary=summary_to_message(view))

    async def UnpinCheckpoint(
        self, request: pb.UnpinCheckpointRequest, context: Context
    ) -> pb.UnpinCheckpointResponse:
        """See node.proto."""
        run = self._run(request.run)
        checkpoint = await in_thread(remove_pin, run, request.label)
        logger.info("unpinned run=%s checkpoint=%s", run.run_id, checkpoint)
        return pb.UnpinCheckpointResponse(checkpoint=str(checkpoint))

    async def ExportCheckpoint(
        self, request: pb.ExportCheckpointRequest, context: Context
    ) -> AsyncGenerator[pb.ExportCheckpointResponse]:
        """See node.proto."""
        run, checkpoint = self._selected(request.selector)
        uid, left_s = caller_uid.get(), context.time_remaining()
        if self._exporting.total() >= EXPORTS_MAX or self._exporting[uid] >= EXPORTS_USER_MAX:
            raise LimitError(
                f"{self._exporting[uid]} of your exports and {self._exporting.total()} in all go on",
                hint=f"wait for one of them: at most {EXPORTS_USER_MAX} of a user and {EXPORTS_MAX} in all",
            )
        self._exporting[uid] += 1
        try:
            with run.reading(checkpoint):
                view = store_views.checkpoint_view(run, checkpoint, node_views.in_memory(self._node, run))
                yield pb.ExportCheckpointResponse(
                    summary=summary_to_message(view),
                    directories=sorted(str(device.path) for device in run.store.devices),
                    store_uid=os.getuid(),
                )
                await asyncio.sleep(max(left_s - ROOM_S, 0.0))
        finally:
            self._exporting[uid] -= 1
