"""The other nodes: who owns a sample, asking owners for readers, handing over what they own.

Without `[cache] listen` there is nothing here: every cache is this node's own.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import UsageError
from ...dataloader.cache.owner_plan import Owners, members_digest, members_of
from ...proto import peer_frames
from ...proto import peer_pb2 as pb
from ..arena_book import Spawn
from ..control.views import MemberView
from .address_format import parse_address
from .breaker_machine import State
from .credentials import Credentials
from .dataset import DatasetKey
from .delivery import Delivery, Received
from .members import Membership
from .metrics import PeerMetrics
from .outbox_plan import Parcel
from .peer_node import PeerNode
from .section import CacheSection

if TYPE_CHECKING:
    from ..cache.staging import Staging

logger = logging.getLogger(__name__)

PEER_THREADS = 2
"""Threads that copy and check what goes to peers and comes from them, however many there are: a checkpoint's work has
others, and never waits behind them."""

FLUSH_DEADLINE_S = 60.0
"""The reader that waits has a deadline of its own."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who shares one dataset."""

    owners: Owners
    me: str
    digest: int

    @property
    def member_count(self) -> int:
        """Return how many nodes own samples."""
        return len(self.owners.members)

    def owner(self, sample: int) -> str | None:
        """Return which other node owns a sample; None: this one."""
        name = self.owners.owner(sample)
        return None if name == self.me else name


class PeerBook:
    """Owned by the event loop."""

    def __init__(self, section: CacheSection, metrics: PeerMetrics, spawn: Spawn) -> None:
        self.section, self.metrics, self.spawn = section, metrics, spawn
        self.changed: Callable[[], None] = lambda: None
        """Called when the members are others than before."""
        self.credentials: Credentials | None = None
        self.threads = ThreadPoolExecutor(PEER_THREADS, thread_name_prefix="everstep-peer")
        self.membership = Membership(section, self._members_changed)
        self._peers: dict[str, PeerNode] = {}
        self._given: dict[DatasetKey, tuple[str, ...]] = {}
        """Members that trainers found, by the dataset that they are for."""
        self._sharings: dict[DatasetKey, Sharing | None] = {}

    @property
    def is_serving(self) -> bool:
        """Tell whether this node takes part at all."""
        return self.credentials is not None

    def begin(self, port: int) -> None:
        """Start to look for members; the service listens on `port`."""
        self.membership.begin(port)
        self._show()

    async def stop(self) -> None:
        """End everything that is under way."""
        self.membership.stop()
        await asyncio.gather(*(each.stop() for each in self._peers.values()))
        self.threads.shutdown(wait=False)

    def address(self) -> str:
        """Return where other nodes reach this one; empty: it serves none."""
        return self.membership.own_address() if self.is_serving else ""

    # -- who owns what

    def give_members(self, dataset: DatasetKey, members: Sequence[str]) -> None:
        """Take members that a trainer found, for its dataset; the newest list counts.

        Raises:
            UsageError: one is no address.
        """
        if not self.is_serving:
            logger.warning("cache_members_unused reason=cache.listen is not configured")
            return
        try:
            for each in members:
                parse_address(each)
        except ValueError as error:
            raise UsageError(f"members=: {error}", hint='host and port, like "node1:7077"') from error
        if self._given.get(dataset) != members_of(members):
            self._given[dataset] = members_of(members)
            self._members_changed()

    def sharing(self, dataset: DatasetKey) -> Sharing | None:
        """Return who shares a dataset; None: this node alone."""
        if not self.is_serving:
            return None
        if dataset not in self._sharings:
            self._sharings[dataset] = self._make_sharing(dataset)
        return self._sharings[dataset]

    def _make_sharing(self, dataset: DatasetKey) -> Sharing | None:
        members = self._given.get(dataset, self.membership.members)
        me = self.membership.me or (self.address() if dataset in self._given else "")
        if not members or members == (me,):
            return None
        if me not in members:
            logger.warning(
                "cache_owns_nothing reason=this node (%s) is none of %d members", me or "?", len(members)
            )
        return Sharing(
            Owners(dataset.fingerprint, members), me if me in members else "", members_digest(members)
        )

    def forget(self, dataset: DatasetKey) -> None:
        """The cache is dropped."""
        self._given.pop(dataset, None)
        self._sharings.pop(dataset, None)

    def _members_changed(self) -> None:
        self._sharings.clear()
        wanted = {*self.membership.members, *(name for names in self._given.values() for name in names)}
        for name in [name for name in self._peers if name not in wanted]:
            self.spawn(self._peers.pop(name).stop(), "leaving a peer")
        self._show()
        self.changed()

    def _peer(self, name: str) -> PeerNode:
        peer = self._peers.get(name)
        if peer is None:
            assert self.credentials is not None
            peer = self._peers[name] = PeerNode(
                name, self.credentials, self.metrics, self.spawn, deadline_s=self.section.deadline_s
            )
        return peer

    # -- asking

    async def ask(
        self, dataset: DatasetKey, samples: Sequence[int], inbox: "Staging"
    ) -> tuple[list[Received], list[int]]:
        """Fetch what the owners of these samples have, one call for each owner; return it, and what they left out.

        It is in the inbox, each sample within its own bounds. After one deadline this returns, with what came until
        then.
        """
        sharing = self.sharing(dataset)
        by_owner: dict[str, list[int]] = {}
        for sample in dict.fromkeys(samples):
            owner = sharing.owner(sample) if sharing else None
            if owner is not None:
                by_owner.setdefault(owner, []).append(sample)
        if sharing is None or not by_owner:
            return [], []
        share_bytes = inbox.size_bytes // len(by_owner)
        parts = [
            (
                self._peer(owner),
                Delivery(inbox, self.threads, place * share_bytes, share_bytes, wanted),
                wanted,
            )
            for place, (owner, wanted) in enumerate(by_owner.items())
        ]
        await asyncio.gather(
            *(
                peer.fetch(
                    pb.FetchRequest(
                        dataset=dataset.to_message(),
                        samples=wanted,
                        size_bytes_max=share_bytes,
                        members_digest=sharing.digest,
                    ),
                    delivery.take,
                )
                for peer, delivery, wanted in parts
            )
        )
        self._show()
        received = [each for _, delivery, _ in parts for each in delivery.received]
        return received, [each for _, delivery, _ in parts for each in delivery.left_out]

    # -- handing over

    def takes(self, owner: str, dataset: DatasetKey) -> bool:
        """Tell whether it is worth offering the owner samples of this dataset now."""
        return self._peer(owner).takes(dataset)

    def offer(self, owner: str, dataset: DatasetKey, parcels: Sequence[Parcel]) -> int:
        """Send samples to their owner when their turn comes; return how many there was room for."""
        peer = self._peer(owner)

        def digest() -> int:
            sharing = self.sharing(dataset)
            return sharing.digest if sharing else 0

        return sum(peer.offer(dataset, each, digest) for each in parcels)

    async def flush(self, request_id: int) -> None:
        """Return when nothing waits any more to be sent to any owner, or the deadline has passed."""
        try:
            async with asyncio.timeout(FLUSH_DEADLINE_S):
                await asyncio.gather(*(each.sent() for each in self._peers.values()))
        except TimeoutError:
            logger.warning("cache_flush_incomplete request=%d", request_id)

    # -- looking

    def members_frame(self, dataset: DatasetKey) -> peer_frames.CacheMembers:
        """Return what a reader is told."""
        sharing = self.sharing(dataset)
        if sharing is None:
            return peer_frames.CacheMembers(members=[], me="")
        return peer_frames.CacheMembers(members=list(sharing.owners.members), me=sharing.me)

    def states(self) -> tuple[MemberView, ...]:
        """Return the members and whoever else trainers named, by address."""
        if not self.is_serving:
            return ()
        names = {*self.membership.members, *self._peers}
        return tuple(self._state(name) for name in sorted(names))

    def _state(self, name: str) -> MemberView:
        peer = self._peers.get(name)
        return MemberView(
            address=name,
            is_me=name == self.membership.me,
            is_asked=peer is None or peer.breaker.allows,
            problem=peer.problem if peer else "",
            fetched_count=peer.fetched_count if peer else 0,
            offered_count=peer.offered_count if peer else 0,
        )

    def _show(self) -> None:
        self.metrics.members.set(len(self.membership.members))
        self.metrics.left_alone.set(
            sum(each.breaker.state is not State.CLOSED for each in self._peers.values())
        )
