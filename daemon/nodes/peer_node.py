"""One other node: fetches samples from it, offers it what it owns, and leaves it alone when it does not serve.

One connection serves all readers of this node. What is asked for a reader ends at the deadline, whatever the peer does;
after a failure the connection is closed, everything under way on it ends at once, and a probe opens a new one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from ...proto import peer_pb2 as pb
from ...proto.peer_pb2_grpc import PeerStub
from ..arena_book import Spawn
from .breaker_machine import Breaker
from .credentials import Credentials
from .dataset import DatasetKey
from .delivery import LyingPeerError
from .metrics import PeerMetrics
from .outbox_plan import Outbox, Parcel

if TYPE_CHECKING:
    _Call = grpc.aio.Call
else:
    _Call = Any

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 36 * 1024 * 1024
"""A reader's inbox is 32 MiB: no larger sample travels."""
CALLS_MAX = 16
"""Fetches of one peer under way; more wait, and their deadline runs."""
OFFER_DEADLINE_S = 10.0
"""Nobody waits for an offer."""
NO_CACHE_PAUSE_S = 0.5
NO_CACHE_GIVE_UP_S = 60.0
"""A peer whose job has not started yet has no cache of it: offers wait for so long."""
FULL_PAUSE_S = 30.0
"""A cache that is full stays so, unless its budget grows."""

_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.UNAUTHENTICATED: "refused",
    grpc.StatusCode.PERMISSION_DENIED: "refused",
}

Take = Callable[[pb.FetchResponse], Awaitable[None]]


class PeerNode:
    """Owned by the event loop."""

    def __init__(
        self, name: str, credentials: Credentials, metrics: PeerMetrics, spawn: Spawn, *, deadline_s: float
    ) -> None:
        self.name = name
        self.breaker = Breaker()
        self.problem = ""
        """Why it was left alone last; empty: it never was, or has answered since."""
        self.fetched_count = self.offered_count = 0
        self._credentials, self._metrics, self._spawn = credentials, metrics, spawn
        self._deadline_s = deadline_s
        self._channel: grpc.aio.Channel | None = None
        self._slots = asyncio.Semaphore(CALLS_MAX)
        self._calls: set[_Call] = set()
        self._outbox: Outbox[DatasetKey] = Outbox()
        self._full_until_s: dict[DatasetKey, float] = {}
        self._no_cache_since_s: dict[DatasetKey, float] = {}
        self._sender: asyncio.Task[None] | None = None
        self._is_idle = asyncio.Event()
        """Nothing is being sent, nor could be now."""
        self._is_idle.set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _stub(self) -> PeerStub:
        if self._channel is None:
            self._channel = self._credentials.channel(self.name, MESSAGE_BYTES_MAX)
        return PeerStub(self._channel)

    # -- fetching

    async def fetch(self, request: pb.FetchRequest, take: Take) -> None:
        """Hand what the peer has to `take`, message by message, until the deadline; nothing where it does not serve."""
        if not self.breaker.allows:
            self._metrics.passed_over.inc(len(request.samples))
            return
        begun_s = self._now_s()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._slots.acquire()
        except TimeoutError:
            return
        try:
            left_s = self._deadline_s - (self._now_s() - begun_s)
            if self.breaker.allows and left_s > 0:
                await self._fetch(request, take, left_s)
                self._metrics.fetch_seconds.observe(self._now_s() - begun_s)
        finally:
            self._slots.release()

    async def _fetch(self, request: pb.FetchRequest, take: Take, deadline_s: float) -> None:
        call = self._stub().Fetch(request, timeout=deadline_s, metadata=self._credentials.metadata)
        self._calls.add(call)
        try:
            async for message in call:
                await take(message)
                self.fetched_count += len(message.samples)
                self._metrics.count(
                    "fetched", len(message.samples), sum(len(each.data) for each in message.samples)
                )
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                self._failed(error)
        except LyingPeerError as error:
            self._leave_alone("lied", str(error))
        finally:
            self._calls.discard(call)
            call.cancel()

    # -- offering

    def takes(self, dataset: DatasetKey) -> bool:
        """Tell whether it is worth offering samples of this dataset now."""
        return self.breaker.allows and self._now_s() >= self._full_until_s.get(dataset, 0.0)

    def offer(self, dataset: DatasetKey, parcel: Parcel, digest: Callable[[], int]) -> bool:
        """Send a sample when its turn comes; False: too much waits already. `digest` is of the member list."""
        if not self._outbox.put(dataset, parcel):
            self._metrics.given_up.inc()
            return False
        self._is_idle.clear()
        if self._sender is None:
            self._sender = self._spawn(self._send_all(digest), "sending samples to their owner")
        return True

    async def sent(self) -> None:
        """Return when nothing waits any more to be sent, but for datasets whose job has not started there."""
        await self._is_idle.wait()

    async def _send_all(self, digest: Callable[[], int]) -> None:
        try:
            while self.breaker.allows and (due := self._outbox.next_due(self._now_s())) is not None:
                dataset, wait_s = due
                if wait_s:
                    self._is_idle.set()
                    await asyncio.sleep(min(wait_s, NO_CACHE_PAUSE_S))
                else:
                    await self._send(dataset, self._outbox.take(dataset), digest())
        finally:
            self._sender = None
            self._metrics.given_up.inc(self._outbox.drop())
            self._is_idle.set()

    async def _send(self, dataset: DatasetKey, parcels: list[Parcel], members_digest: int) -> None:
        request = pb.OfferRequest(
            dataset=dataset.to_message(),
            samples=[pb.Sample(number=each.sample, digest=each.digest, data=each.data) for each in parcels],
            members_digest=members_digest,
        )
        call = self._stub().Offer(request, timeout=OFFER_DEADLINE_S, metadata=self._credentials.metadata)
        self._calls.add(call)
        try:
            response = await call
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            self._metrics.given_up.inc(len(parcels))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                self._no_cache(dataset, parcels)
            else:
                self._metrics.given_up.inc(len(parcels))
                self._failed(error)
        else:
            self._took(dataset, parcels, response)
        finally:
            self._calls.discard(call)
            call.cancel()

    def _took(self, dataset: DatasetKey, parcels: list[Parcel], response: pb.OfferResponse) -> None:
        self._no_cache_since_s.pop(dataset, None)
        held_count = min(response.held_count, len(parcels))
        self.offered_count += held_count
        self._metrics.count("offered", held_count, sum(len(each.data) for each in parcels[:held_count]))
        self._metrics.given_up.inc(len(parcels) - held_count)
        if not (response.room_bytes and held_count):
            self._full_until_s[dataset] = self._now_s() + FULL_PAUSE_S
            self._metrics.given_up.inc(self._outbox.drop(dataset))

    def _no_cache(self, dataset: DatasetKey, parcels: list[Parcel]) -> None:
        """Its job has not started yet, or it has begun anew: what is offered waits a while."""
        now_s = self._now_s()
        since_s = self._no_cache_since_s.setdefault(dataset, now_s)
        if now_s - since_s < NO_CACHE_GIVE_UP_S:
            self._outbox.put_back(dataset, parcels, not_before_s=now_s + NO_CACHE_PAUSE_S)
            return
        self._metrics.given_up.inc(len(parcels) + self._outbox.drop(dataset))
        self._full_until_s[dataset] = now_s + FULL_PAUSE_S
        del self._no_cache_since_s[dataset]

    # -- failing

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        reason = _REASONS.get(error.code(), "other")
        self._leave_alone(reason, f"{error.code().name}: {error.details()}")

    def _leave_alone(self, reason: str, problem: str) -> None:
        """Ask nothing of it for a while; what is under way ends now, and its samples come from storage."""
        if self._is_stopped:
            return
        self._metrics.failures.labels(reason).inc()
        if self.breaker.failed(self._now_s()):
            self.problem = f"{reason}: {problem}"
            logger.warning(
                "cache_peer_left_alone peer=%s reason=%s pause_s=%.0f %s",
                self.name,
                reason,
                self.breaker.pause_s,
                problem,
            )
            for call in list(self._calls):
                call.cancel()
            channel, self._channel = self._channel, None
            if channel is not None:
                self._spawn(channel.close(), "closing a connection to a peer")
            self._probe_later()

    def _probe_later(self) -> None:
        if not self._is_stopped:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self.breaker.until_s, self._begin_probe)

    def _begin_probe(self) -> None:
        self._timer = None
        if self.breaker.probe(max(self._now_s(), self.breaker.until_s)):
            self._spawn(self._probe(), "looking whether a peer answers")

    async def _probe(self) -> None:
        call = self._stub().Probe(
            pb.ProbeRequest(), timeout=self._deadline_s, metadata=self._credentials.metadata
        )
        self._calls.add(call)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            self._failed(error)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
        else:
            self.breaker.answered(self._now_s())
            self.problem = ""
            self._full_until_s.clear()
            logger.info("cache_peer_answers peer=%s", self.name)
        finally:
            self._calls.discard(call)
            call.cancel()

    async def stop(self) -> None:
        """End everything that is under way."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._sender is not None:
            self._sender.cancel()
        for call in list(self._calls):
            call.cancel()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


def _is_cancelled() -> bool:
    """Tell whether this task is to end; a call that was cancelled raises the same error in it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
