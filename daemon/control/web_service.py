"""The rpc of the web page. A mix-in of the service; see node.proto."""

# ruff: noqa: N802 - the methods are named by node.proto

from typing import TYPE_CHECKING

from ...core.errors import ConfigError, UsageError
from ...proto import node_pb2 as pb
from ...proto import node_pb2_grpc
from ..access.roles_plan import Proof
from ..access.service import caller_of
from .caller import Context

if TYPE_CHECKING:
    from ..node import Node


class WebService(node_pb2_grpc.NodeServicer):
    """Logins of the page."""

    _node: "Node"

    async def OpenWebSession(
        self, request: pb.OpenWebSessionRequest, context: Context
    ) -> pb.OpenWebSessionResponse:
        """See node.proto. A user's own daemon begins to serve the page when it is asked for."""
        node, caller = self._node, caller_of.get()
        if caller.proof is Proof.TOKEN:  # the session would outlive it, and its revocation
            raise UsageError(
                "a caller known by its token opens no page",
                hint="ask on the node, as the user that looks: `everstep web`",
            )
        if not (node.private or node.config.metrics.enabled):
            raise ConfigError(
                "this daemon serves no page: metrics.enabled is false", hint="set it to true, and restart"
            )
        url, valid_s = node.open_site().log_in(caller.uid)
        return pb.OpenWebSessionResponse(url=url, valid_s=valid_s)
