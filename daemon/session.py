"""One client of the data socket, from Hello until its death: checks each frame and calls the node's services.

A lease ends when the client's pidfd fires or its socket closes, whichever is first: after kill -9 of a trainer
whose forked loader workers live on, the pidfd fires in milliseconds and the socket closes up to 32 s later.
"""

import asyncio
import logging
import os
import select
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ..core.errors import EverstepError, FencedError, UsageError, VersionMismatchError
from ..core.ids import CheckpointId
from ..proto import frames
from ..proto.frames import PROTOCOL, Failure, Reply, Request, Role
from .connection import Connection
from .peer import Peer
from .registry import RankRecord

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[Reply | tuple[Reply, int] | None]]
"""A request's work: its answer, with a descriptor perhaps, or None for Done."""

HELLO_DEADLINE_S = 5.0


class Session:
    """A connection with an identity. Owned by the event loop."""

    def __init__(self, node: "Node", sock: socket.socket, peer: Peer) -> None:
        self.peer = peer
        self.rank: RankRecord | None = None
        self._node = node
        self._role: Role | None = None
        self._token = ""
        self._ended = False
        self._allocation: asyncio.Task[None] | None = None
        self._connection = Connection(sock, self._on_frame, self.end)
        loop = asyncio.get_running_loop()
        loop.add_reader(peer.pidfd, self.end)
        self._hello_timer = loop.call_later(HELLO_DEADLINE_S, self.end)

    @property
    def is_trainer(self) -> bool:
        """Tell whether this client holds a lease on a rank."""
        return self.rank is not None

    @property
    def alive(self) -> bool:
        """Tell whether the client's process lives, even before the loop has heard of its death."""
        return not self._ended and not select.select([self.peer.pidfd], [], [], 0)[0]

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame."""
        self._connection.send(frame, fd)

    def fence(self, reason: str) -> None:
        """Tell the trainer that it lost its lease and end."""
        self.send(frames.Fenced(message=reason))
        self.rank = None
        self.end()

    def end(self) -> None:
        """The client died, left or is thrown out: give back what it held. Again is nothing."""
        if self._ended:
            return
        self._ended = True
        self._hello_timer.cancel()
        asyncio.get_running_loop().remove_reader(self.peer.pidfd)
        os.close(self.peer.pidfd)
        self._node.tokens.revoke(self._token)
        if self._allocation is not None:
            self._allocation.cancel()
        self._connection.close_when_sent()
        self._node.session_ended(self)

    # -- frames

    def _on_frame(self, frame: Request) -> None:
        try:
            self._dispatch(frame)
        except EverstepError as error:
            self._refuse(getattr(frame, "request_id", 0), error)

    def _dispatch(self, frame: Request) -> None:
        if isinstance(frame, frames.Hello):
            self._hello(frame)
            return
        if self._role is None:
            raise UsageError("the first frame must be Hello")
        match frame:
            case frames.OpenRun():
                self._answer(frame.request_id, lambda: self._open_run(frame))
            case frames.HandOver():
                self._node.hand_over()
                self.send(frames.Done(re=frame.request_id))
            case _:
                self._dispatch_leased(frame, self._lease())

    def _dispatch_leased(self, frame: Request, rank: RankRecord) -> None:  # noqa: C901, PLR0912 - a table
        node = self._node
        match frame:
            case frames.BeginAttempt():
                self._answer(
                    frame.request_id, lambda: node.begin_attempt(rank, frame.attempt, fresh=frame.fresh)
                )
            case frames.ListOffers():
                self._answer(frame.request_id, lambda: node.restorer.offers(rank, frame.request_id))
            case frames.Fetch():
                wanted = CheckpointId(frame.attempt, frame.step)
                self._answer(
                    frame.request_id, lambda: node.restorer.fetch(rank, wanted, frame.rank, frame.request_id)
                )
            case frames.GetManifest():
                self._answer(frame.request_id, lambda: node.restorer.manifest(rank, frame))
            case frames.MakeArena():
                self._allocation = self._answer(frame.request_id, lambda: node.make_arena(rank, frame))
            case frames.Detach():
                self._answer(frame.request_id, lambda: node.detach(rank))
            case frames.BeginSnapshot():
                rank.check_attempt(frame.attempt)
                rank.arena(frame.arena).machine.begin(frame.slot, CheckpointId(frame.attempt, frame.step))
            case frames.Abandon():
                node.abandon(rank, frame.arena, frame.slot)
            case frames.Release():
                node.release_arena(rank, frame.arena)
            case frames.Seal():
                node.persister.seal(rank, frame)
            case frames.SealedEverywhere():
                node.sealed_everywhere(rank, CheckpointId(frame.attempt, frame.step))
            case frames.GiveUp():
                node.give_up(rank, CheckpointId(frame.attempt, frame.step))
            case frames.Complete():
                node.persister.complete(rank.run, CheckpointId(frame.attempt, frame.step))
            case _:
                raise UsageError(f"{type(frame).__name__} is not expected here")

    def _hello(self, hello: frames.Hello) -> None:
        self._hello_timer.cancel()
        if hello.protocol != PROTOCOL:
            raise VersionMismatchError(
                f"the daemon (pid {os.getpid()}, version {self._node.version}) speaks protocol {PROTOCOL}, "
                f"the client (version {hello.version}) {hello.protocol}",
                hint="use one version of everstep; `everstep stop` ends an idle daemon of another version",
            )
        self._role = hello.role
        self._token = self._node.tokens.issue(self.peer.uid)
        self._connection.trust()
        self.send(self._node.welcome(self._token))

    async def _open_run(self, frame: frames.OpenRun) -> Reply:
        if self.rank is not None:
            raise UsageError(
                "this connection has a run already", hint="attach another run in another process"
            )
        opened, rank = await self._node.open_run(self, frame)
        if self._ended:
            raise UsageError("the client left while its run was being opened")
        self.rank = rank
        return opened

    def _lease(self) -> RankRecord:
        if self.rank is None:
            raise FencedError("this connection holds no run", hint="send OpenRun first")
        return self.rank

    def _answer(self, request_id: int, work: Work) -> asyncio.Task[None]:
        """Do `work` beside the loop's other work and send what it returns; an error becomes a Failure."""
        return self._node.spawn(self._carry_out(request_id, work))

    async def _carry_out(self, request_id: int, work: Work) -> None:
        try:
            answer = await work()
        except EverstepError as error:
            self._refuse(request_id, error)
            return
        frame, fd = answer if isinstance(answer, tuple) else (answer or frames.Done(re=request_id), None)
        self.send(frame, fd)

    def _refuse(self, request_id: int, error: EverstepError) -> None:
        self._node.metrics.refused_total.inc()
        logger.warning("request_refused pid=%d code=%s message=%s", self.peer.pid, error.code, error.message)
        self.send(Failure(re=request_id, code=error.code, message=error.message, hint=error.hint))
        if self._role is None:
            self.end()
