"""The calls of the control API about its callers: tokens for other tools, and quotas."""

# ruff: noqa: N802 - the methods are named by node.proto

import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc.aio

from ...proto import node_pb2 as pb
from ..control.tokens import TimedToken
from .roles_plan import Caller
from .usage import UserUse, uses

if TYPE_CHECKING:
    from ..node import Node

    _Context = grpc.aio.ServicerContext[Any, Any]
else:
    _Context = grpc.aio.ServicerContext

logger = logging.getLogger(__name__)

caller_of: ContextVar[Caller] = ContextVar("everstep_caller")
"""Who called the method that runs."""


class AccessService:
    """Part of the servicer of node.proto. Runs on the event loop."""

    def __init__(self, node: "Node") -> None:
        self._access_node = node

    async def IssueToken(self, request: pb.IssueTokenRequest, context: _Context) -> pb.IssueTokenResponse:
        """See node.proto."""
        token, timed = self._access_node.tokens.issue_timed(
            caller_of.get(), ttl_s=request.ttl_s, is_read_only=request.read_only, name=request.name
        )
        logger.info(
            "token_issued id=%s uid=%d role=%s ttl_s=%.0f",
            timed.token_id,
            timed.caller.uid,
            timed.caller.role.word,
            timed.left_s,
        )
        return pb.IssueTokenResponse(token=token, info=_token_to_message(timed))

    async def ListTokens(self, request: pb.ListTokensRequest, context: _Context) -> pb.ListTokensResponse:
        """See node.proto."""
        found = self._access_node.tokens.timed(caller_of.get().seen_uid)
        return pb.ListTokensResponse(tokens=[_token_to_message(each) for each in found])

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: _Context) -> pb.RevokeTokenResponse:
        """See node.proto."""
        self._access_node.tokens.revoke_timed(request.token_id, caller_of.get().seen_uid)
        logger.info("token_revoked id=%s by=%s", request.token_id, caller_of.get().name)
        return pb.RevokeTokenResponse()

    async def GetQuotas(self, request: pb.GetQuotasRequest, context: _Context) -> pb.GetQuotasResponse:
        """See node.proto."""
        found = uses(self._access_node, caller_of.get().seen_uid)
        return pb.GetQuotasResponse(users=[_use_to_message(each) for each in found])


def _token_to_message(timed: TimedToken) -> pb.TokenInfo:
    return pb.TokenInfo(
        token_id=timed.token_id,
        name=timed.name,
        role=timed.caller.role.word,
        owner_uid=timed.caller.uid,
        left_s=timed.left_s,
    )


def _use_to_message(use: UserUse) -> pb.UserQuotas:
    return pb.UserQuotas(
        uid=use.uid,
        quotas=[pb.Quota(name=each.name, used=each.used, bound=int(each.bound)) for each in use.bounded],
        refused_count=use.refused_count,
    )
