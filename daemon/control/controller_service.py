"""The rpcs of controllers. A mix-in of the service; see node.proto."""

# ruff: noqa: N802 - the methods are named by node.proto

from typing import TYPE_CHECKING, cast

from ...core.errors import UsageError
from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from .caller import Context, visible_uid
from .controller_messages import controller_to_message, forced_to_message

if TYPE_CHECKING:
    from ..node import Node
    from ..registry import RunRecord

ROOM_S = 0.5
"""Kept of a call's time for its answer, so that a caller hears why it has waited in vain."""


class ControllerService(node_pb2_grpc.NodeServicer):
    """How often runs take checkpoints."""

    _node: "Node"

    async def GetController(
        self, request: pb.GetControllerRequest, context: Context
    ) -> pb.GetControllerResponse:
        """See node.proto."""
        views = self._node.controller.views(request.run, visible_uid())
        return pb.GetControllerResponse(controllers=[controller_to_message(each) for each in views])

    async def SetBudget(self, request: pb.SetBudgetRequest, context: Context) -> pb.SetBudgetResponse:
        """See node.proto."""
        run = self._attached_run(request.run)
        view = await self._node.controller.set_budget(run, request.budget, _left_s(context))
        return pb.SetBudgetResponse(controller=controller_to_message(view))

    async def ForceCheckpoint(
        self, request: pb.ForceCheckpointRequest, context: Context
    ) -> pb.ForceCheckpointResponse:
        """See node.proto."""
        run = self._attached_run(request.run)
        return forced_to_message(await self._node.controller.force(run, _left_s(context)))

    async def PauseCheckpoints(
        self, request: pb.PauseCheckpointsRequest, context: Context
    ) -> pb.PauseCheckpointsResponse:
        """See node.proto."""
        run = self._attached_run(request.run)
        view = await self._node.controller.pause(run, request.ttl_s, _left_s(context))
        return pb.PauseCheckpointsResponse(controller=controller_to_message(view))

    async def ResumeCheckpoints(
        self, request: pb.ResumeCheckpointsRequest, context: Context
    ) -> pb.ResumeCheckpointsResponse:
        """See node.proto."""
        run = self._attached_run(request.run)
        view = await self._node.controller.resume(run, _left_s(context))
        return pb.ResumeCheckpointsResponse(controller=controller_to_message(view))

    def _attached_run(self, text: str) -> "RunRecord":
        if not text:
            raise UsageError("no run is named", hint="name it as given to attach(), or by its id")
        return self._node.controller.find(text, visible_uid())


def _left_s(context: Context) -> float:
    """Return the seconds that a call may still take."""
    left_s = cast("float | None", context.time_remaining())
    assert left_s is not None, "the guard has refused calls without a deadline"
    return max(left_s - ROOM_S, 0.0)
