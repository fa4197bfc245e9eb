"""One client of the data socket, from Hello until its death: checks each frame and calls the node's services.

A lease ends when the client's pidfd fires or its socket closes, whichever is first: after kill -9 of a trainer
whose forked loader workers live on, the pidfd fires in milliseconds and the socket closes up to 32 s later.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ..core.errors import EverstepError, FencedError, UsageError, VersionMismatchError
from ..core.ids import CheckpointId
from ..proto import frames, peer_frames, share_frames
from ..proto.frames import PROTOCOL, Failure, Reply, Request, Role
from .connection import Connection, Manners
from .devices import lending
from .peer import Peer
from .registry import Lease
from .slot_machine import Drop

if TYPE_CHECKING:
    from .node import Node

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[Reply | tuple[Reply, int] | None]]
"""A request's work: its answer, with a descriptor perhaps, or None for Done."""

HELLO_DEADLINE_S = 5.0
HELD_BYTES_MAX = 64 * 1024 * 1024
"""Of what came and was not served, of all connections of one user."""


class Session:
    """A connection with an identity. Owned by the event loop."""

    def __init__(self, node: "Node", sock: socket.socket, peer: Peer, wait_s: float = 0.0) -> None:
        """`wait_s`: for so long it is not read."""
        self.peer = peer
        self.lease: Lease | None = None
        """What it was granted, which may be over: see Lease.is_valid."""
        self._node = node
        self._role: Role | None = None
        self._token = ""
        self._ended = False
        self._allocation: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._connection = Connection(
            sock,
            self._on_frame,
            self.end,
            Manners(
                report=self._report,
                turn=self._turn,
                pace=self._pace,
                rest=partial(node.rests.add, peer.uid),
                rest_no_more=partial(node.rests.discard, peer.uid),
                hold=self._hold,
            ),
            wait_s,
        )
        loop.add_reader(peer.pidfd, self.died)
        self._hello_timer = loop.call_later(wait_s + HELLO_DEADLINE_S, self.end)

    @property
    def has_ended(self) -> bool:
        """Tell whether it has given back what it held: from then on it gets nothing any more."""
        return self._ended

    @property
    def alive(self) -> bool:
        """Tell whether the client's process lives, even before the loop has heard of its death."""
        return not self._ended and self.peer.lives

    @property
    def pid(self) -> int:
        """Process id of the client, for messages to people."""
        return self.peer.pid

    @property
    def is_unread(self) -> bool:
        """Tell whether nothing of it was looked at yet."""
        return self._connection.is_unread

    def check_may_attach(self) -> None:
        """Raise unless this client may be given a lease now."""
        if self._ended:
            raise FencedError("the client left while its run was being opened")
        if self.lease is not None and self.lease.is_valid:
            raise UsageError(
                "this connection has a run already", hint="attach another run in another process"
            )

    def send(self, frame: Reply, fd: int | None = None) -> None:
        """Queue a frame."""
        self._connection.send(frame, fd)

    def fence(self, reason: str) -> None:
        """Tell the trainer that it lost its lease and end."""
        self.send(frames.Fenced(message=reason))
        self.end()

    def died(self) -> None:
        """The client's process is gone: end when all it had sent is served, a Seal that others count on, say."""
        asyncio.get_running_loop().remove_reader(self.peer.pidfd)
        self._connection.close_when_served()

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
        try:
            self._connection.close_when_sent()
        finally:  # whatever becomes of the socket
            self._node.session_ended(self)
            self.lease = None  # which holds this session: so both go at once, without a look for garbage

    # -- manners

    def _report(self, event: str, text: str) -> None:
        self._node.metrics.sockets.refused_total.labels(event).inc()
        self._node.refusals.add(event, f"uid:{self.peer.uid}", "", f"pid={self.peer.pid} {text}")

    def _turn(self) -> int:
        return self._node.turns.left(self.peer.uid)

    def _pace(self, count: int) -> float:
        if count:
            self._node.turns.take(self.peer.uid, count)
        return self._node.quotas.frames_delay_s(self.peer.uid, count, asyncio.get_running_loop().time())

    def _hold(self, grown_bytes: int) -> bool:
        held_bytes, uid = self._node.rests.held_bytes, self.peer.uid
        held_bytes[uid] += grown_bytes
        if held_bytes[uid]:
            return held_bytes[uid] <= HELD_BYTES_MAX
        del held_bytes[uid]
        return True

    # -- frames

    def _on_frame(self, frame: Request) -> None:
        self._node.metrics.sockets.asked(_name(frame))
        with self._refusing(frame):
            self._dispatch(frame)

    def _dispatch(self, frame: Request) -> None:
        if isinstance(frame, frames.Hello):
            self._hello(frame)
            return
        if self._role is None:
            raise UsageError("the first frame must be Hello")
        _check_checkpoint(frame)
        match frame:
            case frames.OpenRun():
                self._answer(frame, lambda: self._node.open_run(self, frame))
            case frames.ReadManifest():
                self._answer(frame, lambda: lending.read_manifest(self._node, self.peer.uid, frame))
            case frames.OpenSegment():
                self._node.spawn(self._lend(frame), _name(frame))
            case frames.HandOver():
                self._node.hand_over()
                self.send(frames.Done(re=frame.request_id))
            case frames.OpenCache() | frames.StageCache() | frames.FillCache() | frames.CacheUse():
                self._dispatch_cache(frame)
            case (
                peer_frames.AskAddress()
                | peer_frames.OpenInbox()
                | peer_frames.AskPeers()
                | peer_frames.FlushPeers()
            ):
                self._dispatch_peers(frame)
            case (
                share_frames.JoinShare()
                | share_frames.LeaveShare()
                | share_frames.OfferShare()
                | share_frames.FailShare()
                | share_frames.WantShare()
                | share_frames.TookShare()
                | share_frames.LocateShare()
                | share_frames.StageShare()
                | share_frames.PublishShare()
            ):
                self._dispatch_share(frame)
            case _:
                self._dispatch_leased(frame, self._valid_lease())

    def _dispatch_cache(
        self, frame: frames.OpenCache | frames.StageCache | frames.FillCache | frames.CacheUse
    ) -> None:
        match frame:
            case frames.OpenCache():
                self._answer(frame, lambda: self._node.open_cache(self, frame))
            case frames.StageCache():
                self.send(*self._node.caches.stage(self, frame))
            case frames.FillCache():
                self._node.caches.fill(self, frame)
            case frames.CacheUse():
                self._node.caches.use_told(self, frame)

    def _dispatch_peers(self, frame: peer_frames.PeerRequest) -> None:
        match frame:
            case peer_frames.AskAddress():
                if address := self._node.peers.address():
                    self._node.lifetime.expect_reader()
                self.send(peer_frames.PeerAddress(re=frame.request_id, address=address))
            case peer_frames.OpenInbox():
                self.send(*self._node.caches.open_inbox(self, frame))
            case peer_frames.AskPeers():
                self._answer(frame, lambda: self._node.caches.ask_peers(self, frame))
            case peer_frames.FlushPeers():
                self._answer(frame, lambda: self._node.caches.flush_peers(frame))

    def _dispatch_share(self, frame: share_frames.ShareRequest) -> None:
        match frame:
            case share_frames.PublishShare():
                self._answer(frame, lambda: self._node.shares.publish(self, frame))
            case share_frames.StageShare():
                self._answer(frame, lambda: self._node.shares.stage(self, frame))
            case share_frames.JoinShare():
                self._node.join_share(self, frame)
            case _:
                self._node.shares.on_frame(self, frame)

    def _dispatch_leased(self, frame: Request, lease: Lease) -> None:  # noqa: C901, PLR0912, PLR0915 - a table
        node, rank = self._node, lease.rank
        match frame:
            case frames.BeginAttempt():
                self._answer(frame, lambda: node.begin_attempt(lease, frame))
            case frames.ListOffers():
                self._answer(frame, lambda: node.restorer.offers(rank, frame.request_id))
            case frames.Fetch():
                self._answer(frame, lambda: node.restorer.fetch(lease, frame))
            case frames.GetManifest():
                self._answer(frame, lambda: node.restorer.manifest(rank, frame))
            case frames.MakeArena():
                self._allocation = self._answer(frame, lambda: node.arena_desk.make_arena(lease, frame))
            case frames.Detach():
                self._answer(frame, lambda: node.detach(lease))
            case frames.Leave():
                rank.leave = frame
                self.send(frames.Done(re=frame.request_id))
            case frames.BeginSnapshot():
                node.arena_desk.begin_snapshot(rank, frame)
            case frames.Announce():
                node.persister.announce(rank, frame)
            case frames.Copied():
                node.persister.copied(rank, frame)
            case frames.Abandon():
                node.arena_desk.abandon(rank, frame.arena, frame.slot, Drop.GIVEN_UP)
            case frames.Stream():
                rank.stream(frame.arena).begin(frame.ranges)
            case frames.ChunkTaken():
                rank.stream(frame.arena).taken(frame.slot)
            case frames.Release():
                rank.stream(frame.arena).end()
            case frames.Restored():
                node.metrics.restores.restored_total.labels("memory" if frame.in_memory else "disk").inc()
                node.reporter.restored(rank, in_memory=frame.in_memory)
                node.traces.restored(rank, in_memory=frame.in_memory)
                if frame.checkpoint is not None:
                    checkpoint = CheckpointId(*frame.checkpoint)
                    node.arena_desk.restored(
                        rank, checkpoint, in_memory=frame.in_memory, goes_back=frame.goes_back
                    )
                    rank.run.store.goes_on_from(checkpoint)
            case frames.Seal():
                node.persister.seal(rank, frame)
            case frames.SealedEverywhere():
                node.arena_desk.sealed_everywhere(rank, CheckpointId(frame.attempt, frame.step))
            case frames.GiveUp():
                node.give_up(rank, CheckpointId(frame.attempt, frame.step), in_memory=frame.in_memory)
            case frames.Costs():
                node.costs_told(rank, frame)
            case frames.Skipped():
                node.reporter.skipped(
                    rank, CheckpointId(frame.attempt, frame.step), frame.reason.value, frame.text
                )
            case frames.ForceHeard():
                node.controller.force_heard(frame)
            case frames.Complete():
                node.persister.complete(rank.run, CheckpointId(frame.attempt, frame.step))
            case _:
                raise UsageError(f"{type(frame).__name__} is not expected here")

    def _hello(self, hello: frames.Hello) -> None:
        if self._role is not None:  # another token would be revoked by nobody
            raise UsageError("this connection has said Hello already")
        self._node.served.check_hello(self.peer.uid)
        self._hello_timer.cancel()
        # Operators say hello for a token only: what they call, the control API, is one for all versions.
        if hello.protocol != PROTOCOL and hello.role is not Role.CONTROL:
            raise VersionMismatchError(
                f"the daemon (pid {os.getpid()}, version {self._node.version}) speaks protocol {PROTOCOL}, "
                f"the client (version {hello.version}) {hello.protocol}",
                hint=f"use one version of everstep; `kill {os.getpid()}` ends that daemon once everything sealed is "
                "written",
            )
        self._role = hello.role
        self._token = self._node.tokens.issue(self.peer.uid)
        self._connection.trust()
        self.send(self._node.welcome(self._token))

    def _valid_lease(self) -> Lease:
        if self.lease is None:
            raise FencedError("this connection holds no run", hint="send OpenRun first")
        self.lease.check()
        return self.lease

    def _answer(self, frame: Request, work: Work) -> asyncio.Task[None]:
        """Do `work` beside the loop's other work and send what it returns; an error becomes a Failure."""
        return self._node.spawn(self._carry_out(frame, work), _name(frame))

    async def _carry_out(self, frame: Request, work: Work) -> None:
        with self._node.metrics.sockets.answering(_name(frame)), self._refusing(frame):
            answer = await work()
            reply, fd = answer if isinstance(answer, tuple) else (answer, None)
            self.send(reply or frames.Done(re=_number(frame)), fd)

    async def _lend(self, frame: frames.OpenSegment) -> None:
        """Send a descriptor that is not kept here."""
        with self._node.metrics.sockets.answering(_name(frame)), self._refusing(frame):
            async with lending.opened_segment(self._node, self.peer.uid, frame) as fd:
                self.send(frames.SegmentOpened(re=frame.request_id), fd)

    @contextmanager
    def _refusing(self, frame: Request) -> Generator[None]:
        """Answer with a Failure what goes wrong in the block: a bug, too, which must not hurt other clients."""
        try:
            yield
        except EverstepError as error:
            self._refuse(_number(frame), error)
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            self._refuse(_number(frame), self._node.bug(_name(frame), error))

    def _refuse(self, request_id: int, error: EverstepError) -> None:
        self._node.metrics.sockets.refused_total.labels(error.code).inc()
        self._node.refusals.add(
            "request_refused",
            f"uid:{self.peer.uid}",
            error.code,
            f"pid={self.peer.pid} message={error.message}",
        )
        self.send(Failure(re=request_id, code=error.code, message=error.message, hint=error.hint))
        if self._role is None:
            self.end()


def _check_checkpoint(frame: Request) -> None:
    """Raise UsageError where a frame names a checkpoint that cannot be."""
    attempt, step = getattr(frame, "attempt", 1), getattr(frame, "step", 0)
    if isinstance(frame, frames.Restored) and frame.checkpoint is not None:
        attempt, step = frame.checkpoint
    if attempt < 1 or step < 0:
        raise UsageError(f"no checkpoint is of attempt {attempt} and step {step}")


def _name(frame: Request) -> str:
    return type(frame).__name__


def _number(frame: Request) -> int:
    """Return what an answer refers to; 0 for an event."""
    return getattr(frame, "request_id", 0)
