"""The rpcs that list runs, slots, caches, members and groups. A mix-in of the service; see node.proto."""

# ruff: noqa: N802 - the methods are named by node.proto

from ...proto import node_pb2 as pb
from . import run_views
from .caller import Context, visible_uid
from .messages import cache_to_message, group_to_message, member_to_message
from .run_messages import run_detail_to_message, slot_to_message
from .selecting import Selecting


class RunService(Selecting):
    """What is there. Reads memory only."""

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """See node.proto."""
        return pb.ListRunsResponse(runs=[run_detail_to_message(each) for each in self._details()])

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """See node.proto."""
        found = run_views.one_run(self._details(), request.run)
        return pb.GetRunResponse(run=run_detail_to_message(found))

    async def ListSlots(self, request: pb.ListSlotsRequest, context: Context) -> pb.ListSlotsResponse:
        """See node.proto."""
        found = run_views.slot_details(self._node, request.run, visible_uid())
        return pb.ListSlotsResponse(slots=[slot_to_message(each) for each in found])

    async def ListCaches(self, request: pb.ListCachesRequest, context: Context) -> pb.ListCachesResponse:
        """See node.proto."""
        found = self._node.caches.states(visible_uid())
        return pb.ListCachesResponse(caches=[cache_to_message(each) for each in found])

    async def ListMembers(self, request: pb.ListMembersRequest, context: Context) -> pb.ListMembersResponse:
        """See node.proto."""
        found = self._node.peers.states()
        return pb.ListMembersResponse(members=[member_to_message(each) for each in found])

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        """See node.proto."""
        found = self._node.shares.views(visible_uid())
        return pb.ListGroupsResponse(groups=[group_to_message(each) for each in found])

    def _details(self) -> list[run_views.RunDetail]:
        return run_views.run_details(self._node, self._runs(), visible_uid())
