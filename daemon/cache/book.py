"""Which caches there are, who reads them, and which of them goes when another needs the room.

One cache for each (uid, content, fingerprint): who asks for another user's cache gets one of its own, as if there were
none. A cache outlives its readers, so that a second job, and one that starts again after a crash, finds it filled.
"""

import asyncio
import logging
import os
import resource
from typing import TYPE_CHECKING

from ...core.errors import MemoryRefusedError, NodeError, NotFoundError, RunBusyError, UsageError
from ...core.sizes import size_text
from ...dataloader.cache.arena_format import base_bytes
from ...proto import frames, peer_frames
from ..arena_book import ArenaBook, Spawn
from ..blocking import in_thread
from ..control.views import CacheView
from ..events.event_types import EventKind
from ..events.reporter import Reporter
from ..nodes.dataset import DatasetKey
from ..nodes.delivery import Received
from ..nodes.outbox_plan import Parcel
from ..nodes.peer_book import PeerBook, Sharing
from .arena import Item, make_cache_arena
from .cache import Cache, Key
from .filling import Batch, Filling
from .foreign import CopyFiller, OfferFiller, read_parcels
from .memory import CacheMemory
from .metrics import CacheMetrics
from .space_plan import IdleCache, caches_to_drop
from .staging import Bytes, Parcels, Staging

if TYPE_CHECKING:
    from ..session import Session

logger = logging.getLogger(__name__)

INBOX_BYTES_MAX = 32 * 1024 * 1024
"""Larger samples come from storage on every node but those that have them in memory."""
CACHES_MAX = 4096
"""Each is mapped as far as the node has memory: more would not fit into a process's addresses."""
CACHE_DESCRIPTORS, READER_DESCRIPTORS = 2, 4
"""What one cache takes (memfd, twice) and one reader (connection, pidfd, staging, inbox) of the daemon's open files."""


class CacheBook:
    """Owned by the event loop."""

    def __init__(
        self, arenas: ArenaBook, metrics: CacheMetrics, spawn: Spawn, peers: PeerBook, reporter: Reporter
    ) -> None:
        self.metrics, self.spawn, self.peers = metrics, spawn, peers
        self._reporter = reporter
        self._memory = CacheMemory(arenas)
        self._caches: dict[Key, Cache] = {}
        self._fillings: dict[Cache, Filling] = {}
        self._of_session: dict[Session, Cache] = {}
        self._stagings: dict[Session, Staging] = {}
        self._inboxes: dict[Session, Staging] = {}
        self._asking: set[Session] = set()
        self._opening = asyncio.Lock()
        self._made_count = 0
        self._memory.relieve = self.make_room
        arenas.relieve = self.make_room
        peers.changed = self._tell_members

    @staticmethod
    def now_s() -> float:
        """Return the time of the event loop."""
        return asyncio.get_running_loop().time()

    @property
    def has_clients(self) -> bool:
        """Tell whether anybody reads a cache, or is about to."""
        return bool(self._of_session) or self._opening.locked()

    @property
    def has_been_used(self) -> bool:
        """Tell whether anybody has ever read one."""
        return self._made_count > 0

    def left_s(self) -> float | None:
        """Return when the last reader of any cache left; None: there is no cache, or one is read."""
        if self.has_clients:
            return None
        return max((each.idle_since_s for each in self._caches.values()), default=None)

    def states(self, uid: int | None) -> tuple[CacheView, ...]:
        """Return the caches of this user (None: all), by number."""
        now_s = self.now_s()
        caches = [each for each in self._caches.values() if uid is None or each.key[0] == uid]
        return tuple(each.state(now_s) for each in sorted(caches, key=lambda each: each.number))

    # -- clients

    async def open(self, session: "Session", frame: frames.OpenCache) -> tuple[frames.Reply, int]:
        """Give a client the cache of a dataset, made if need be.

        Raises:
            UsageError: the dataset has another length than the cache's, or the connection has a cache already.
            MemoryRefusedError: there is no room for the index.
            NodeError: the kernel cannot make a cache, or too many are read.
        """
        if not (frame.fingerprint.isprintable() and frame.fingerprint.isascii()):
            raise UsageError(f"a fingerprint is printable ASCII, got {frame.fingerprint!r}")
        key = (session.peer.uid, frame.content, frame.fingerprint)
        async with self._opening:
            if session in self._of_session:
                raise UsageError("this connection has a cache already", hint="open another connection")
            await self._have_descriptors(is_new=key not in self._caches)
            cache = self._caches.get(key) or await self._make(key, frame)
            count = cache.arena.space.sample_count
            if count != frame.sample_count:
                raise UsageError(
                    f"the dataset with fingerprint {frame.fingerprint!r} had {count} samples when its cache was made, "
                    f"and has {frame.sample_count} now",
                    hint="a fingerprint must change when the dataset does: give it another one by fingerprint=",
                )
            if session.has_ended:
                raise UsageError("the client left while its cache was being opened")
            if frame.members:
                self._give_members(session, cache, frame.members)
            cache.add_client(session, frame.budget_bytes)
            self._of_session[session] = cache
        self._fillings[cache].wake()
        told = self.peers.members_frame(cache.dataset)
        opened = frames.CacheOpened(
            re=frame.request_id,
            size_bytes=cache.arena.file_bytes,
            budget_bytes=cache.arena.space.limit_bytes,
            reason=await cache.why_less(frame.budget_bytes),
            members=told.members,
            me=told.me,
            peer_deadline_s=self.peers.section.deadline_s,
        )
        self.show()
        return opened, cache.arena.read_fd

    async def _have_descriptors(self, *, is_new: bool) -> None:
        """Return when one more reader, and its cache if that is new, leave enough descriptors to everybody else."""

        def needed() -> int:
            caches, readers = len(self._caches) + is_new, len(self._of_session) + 1
            return CACHE_DESCRIPTORS * caches + READER_DESCRIPTORS * readers

        bound = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        while (needed() > bound or len(self._caches) + is_new > CACHES_MAX) and any(
            map(self._is_idle, self._caches.values())
        ):
            await self.make_room(1)
        if needed() > bound or len(self._caches) + is_new > CACHES_MAX:
            raise NodeError(
                f"{len(self._of_session)} processes read {len(self._caches)} caches, as many as the daemon's "
                f"{2 * bound} descriptors allow",
                hint="read fewer datasets at once, or raise the daemon's limit of open files",
            )

    async def _make(self, key: Key, frame: frames.OpenCache) -> Cache:
        """Return a new cache, with pages for its index."""
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        index_bytes = base_bytes(frame.sample_count)
        if index_bytes > min(frame.budget_bytes, memory_bytes):
            raise MemoryRefusedError(
                f"the index of {frame.sample_count} samples alone takes {size_text(index_bytes)} of a budget of "
                f"{size_text(min(frame.budget_bytes, memory_bytes))}",
                hint="raise budget=",
            )
        budget_bytes = min(frame.budget_bytes, memory_bytes)
        try:
            arena = make_cache_arena(frame.sample_count, budget_bytes, memory_bytes)
        except OSError as error:
            raise NodeError(
                f"the kernel cannot make a cache: {error.strerror or error}",
                hint="caches need Linux 5.1 or newer, and free descriptors",
            ) from error
        self._made_count += 1
        cache = Cache(self._made_count, key, arena, self._memory)
        cache.idle_since_s = self.now_s()
        try:
            await cache.take_index()
            if arena.space.is_short:
                raise MemoryRefusedError(
                    f"the index of {frame.sample_count} samples needs {size_text(index_bytes)}, but {cache.reason}"
                )
        except BaseException:
            await cache.close()
            raise
        self._caches[key] = cache
        self._fillings[cache] = Filling(self, cache)
        logger.info("cache_made number=%d samples=%d", cache.number, frame.sample_count)
        self._tell(EventKind.CACHE_MADE, cache, frame.sample_count)
        return cache

    def stage(self, session: "Session", frame: frames.StageCache) -> tuple[frames.Reply, int]:
        """Give a client memory to put missing samples into, in the place of what it had."""
        cache = self._cache_of(session)
        if frame.size_bytes > cache.arena.file_bytes:
            raise UsageError(
                f"a staging of {size_text(frame.size_bytes)} is larger than the cache may become"
            )
        staging = self._stagings[session] = Staging(frame.size_bytes)
        return frames.StagingReady(re=frame.request_id, size_bytes=staging.size_bytes), staging.fd

    def fill(self, session: "Session", frame: frames.FillCache) -> None:
        """Queue samples that a client has staged; it is answered when they were published or refused.

        Raises:
            UsageError: what it names is not in its staging or its dataset.
        """
        cache, staging = self._cache_of(session), self._stagings.get(session)
        if staging is None:
            raise UsageError("this connection has no staging", hint="send StageCache first")
        items = tuple(
            Item(sample=sample, offset_bytes=offset_bytes, length=length, digest=digest)
            for sample, offset_bytes, length, digest in frame.items
        )
        self._fillings[cache].add(Batch(session, frame.request_id, items, staging))

    def use_told(self, session: "Session", frame: frames.CacheUse) -> None:
        """A client says what it has read."""
        self._cache_of(session).add_use(frame)
        self.metrics.add_use(frame)

    def session_ended(self, session: "Session") -> None:
        """A client is gone. Its cache stays, and what it had queued is still put there."""
        self._stagings.pop(session, None)
        self._inboxes.pop(session, None)
        cache = self._of_session.pop(session, None)
        if cache is not None:
            cache.remove_client(session, self.now_s())
            self._wake_short()
            self.show()

    def _wake_short(self) -> None:
        """Let caches that are short of memory ask again: one that nobody reads any more would make room."""
        for cache, filling in self._fillings.items():
            if cache.arena.space.is_short:
                filling.wake()

    def _cache_of(self, session: "Session") -> Cache:
        cache = self._of_session.get(session)
        if cache is None:
            raise UsageError("this connection has no cache", hint="send OpenCache first")
        return cache

    # -- other nodes

    def _give_members(self, session: "Session", cache: Cache, members: list[str]) -> None:
        """Take members that a trainer found: only from whom this daemon belongs to, since it shows them its token."""
        if session.peer.uid not in (0, os.getuid()):
            raise UsageError(
                f"members= is for uid {os.getuid()}, whose daemon this is, not for {session.peer.uid}",
                hint="leave it out: the daemon's configuration names the members",
            )
        self.peers.give_members(cache.dataset, members)

    def _tell_members(self) -> None:
        """The members are others than before: let all readers know."""
        for session, cache in self._of_session.items():
            session.send(self.peers.members_frame(cache.dataset))

    def open_inbox(self, session: "Session", frame: peer_frames.OpenInbox) -> tuple[frames.Reply, int]:
        """Give a client memory that peers' samples are put into, in the place of what it had."""
        self._cache_of(session)
        if frame.size_bytes > INBOX_BYTES_MAX:
            raise UsageError(f"an inbox of {size_text(frame.size_bytes)}", hint=f"{INBOX_BYTES_MAX} at most")
        inbox = self._inboxes[session] = Staging(frame.size_bytes)
        return peer_frames.InboxReady(re=frame.request_id, size_bytes=inbox.size_bytes), inbox.fd

    async def ask_peers(self, session: "Session", frame: peer_frames.AskPeers) -> frames.Reply:
        """Fetch samples that other nodes own for a client; returns after one deadline at most."""
        cache, inbox = self._cache_of(session), self._inboxes.get(session)
        if inbox is None:
            raise UsageError("this connection has no inbox", hint="send OpenInbox first")
        if session in self._asking:
            raise UsageError("the request before is not answered yet")
        count = cache.arena.space.sample_count
        if any(each >= count for each in frame.samples):
            raise UsageError(f"a sample that is not one of {count}")
        self._asking.add(session)
        try:
            received, left_out = await self.peers.ask(cache.dataset, frame.samples, inbox)
        finally:
            self._asking.discard(session)
        self._keep_copies(cache, received)
        return peer_frames.PeersGave(
            re=frame.request_id,
            items=[(each.sample, each.offset_bytes, len(each.data)) for each in received],
            left_out=left_out,
        )

    def _keep_copies(self, cache: Cache, received: list[Received]) -> None:
        """Take in what was fetched, as far as there is room beside what this node owns; one request at a time."""
        sharing = self.peers.sharing(cache.dataset)
        filling = self._fillings.get(cache)
        if sharing is None or not sharing.me or filling is None or filling.is_filling or not received:
            return
        room_bytes = cache.copy_room_bytes(sharing.member_count)
        if room_bytes > min(len(each.data) for each in received):
            parcels = [Parcel(each.sample, each.digest, each.data) for each in received]
            filling.add(self._foreign_batch(CopyFiller(), parcels))

    @staticmethod
    def _foreign_batch(filler: CopyFiller | OfferFiller, parcels: list[Parcel]) -> Batch:
        staging = Parcels([each.data for each in parcels])
        items = tuple(
            Item(sample=each.sample, offset_bytes=offset_bytes, length=len(each.data), digest=each.digest)
            for each, offset_bytes in zip(parcels, staging.offsets_bytes, strict=True)
        )
        return Batch(filler, 0, items, staging, is_foreign=True)

    async def forward(self, cache: Cache, staging: Bytes, items: list[Item], sharing: Sharing) -> int:
        """Send on the samples that other nodes own; return how many are on their way. Their digests hold."""
        by_owner: dict[str, list[Item]] = {}
        for item in items:
            owner = sharing.owner(item.sample)
            if owner is not None:
                by_owner.setdefault(owner, []).append(item)
        count = 0
        for owner, theirs in by_owner.items():
            fitting = [each for each in theirs if each.length <= INBOX_BYTES_MAX]
            if self.peers.takes(owner, cache.dataset):
                count += self.peers.offer(
                    owner, cache.dataset, await in_thread(read_parcels, staging, fitting)
                )
        return count

    def find(self, dataset: DatasetKey) -> Cache | None:
        """Return the cache that another node means; None: there is none."""
        cache = self._caches.get((dataset.uid, dataset.content, dataset.fingerprint))
        return cache if cache is not None and cache.dataset == dataset else None

    async def take_offer(self, cache: Cache, parcels: list[Parcel]) -> int:
        """Take in what another node has read and this one owns; return how many of it are here then."""
        filling = self._fillings.get(cache)
        if filling is None or not parcels:
            return 0
        filler = OfferFiller()
        filling.add(self._foreign_batch(filler, parcels))
        return await filler.held_count()

    async def flush_peers(self, frame: peer_frames.FlushPeers) -> None:
        """Return when nothing waits any more to be sent to its owner."""
        await self.peers.flush(frame.request_id)

    # -- room

    async def make_room(self, needed_bytes: int, uid: int | None = None) -> None:
        """Drop caches that nobody reads, oldest first, until so many bytes are free or none is left.

        `uid`: of this user only.
        """
        idle = {
            cache.number: cache
            for cache in self._caches.values()
            if uid in (None, cache.key[0]) and self._is_idle(cache)
        }
        plan = caches_to_drop(
            (
                IdleCache(
                    number=number,
                    idle_since_s=cache.idle_since_s,
                    size_bytes=cache.arena.space.allocated_bytes,
                )
                for number, cache in idle.items()
            ),
            needed_bytes,
        )
        chosen = [idle[number] for number in plan]
        for cache in chosen:
            self._forget(cache)
        for cache in chosen:
            await cache.close()
        self.show()

    async def drop(self, number: int, uid: int | None) -> CacheView:
        """Drop one cache by hand (uid None: whoever's it is).

        Raises:
            NotFoundError: there is none of this number, or it is another user's.
            RunBusyError: somebody reads it.
        """
        for cache in self._caches.values():
            if cache.number == number and uid in (None, cache.key[0]):
                break
        else:
            raise NotFoundError(
                f"there is no cache {number}", hint="`everstep cache list` shows all of yours"
            )
        if not self._is_idle(cache):
            raise RunBusyError(f"cache {number} is in use: {cache.client_count} read it")
        state = cache.state(self.now_s())
        self._forget(cache)
        await cache.close()
        self._wake_short()
        self.show()
        return state

    def _is_idle(self, cache: Cache) -> bool:
        return not cache.client_count and not cache.is_pinned and not self._fillings[cache].is_busy

    def _forget(self, cache: Cache) -> None:
        del self._caches[cache.key]
        self.peers.forget(cache.dataset)
        self._fillings.pop(cache).stop()
        self.metrics.dropped_total.inc()
        logger.info("cache_dropped number=%d samples=%d", cache.number, cache.arena.published_count)
        self._tell(EventKind.CACHE_DROPPED, cache, cache.arena.published_count)

    def _tell(self, kind: EventKind, cache: Cache, count: int) -> None:
        uid, _, fingerprint = cache.key
        what = "is made for" if kind is EventKind.CACHE_MADE else "is dropped, which held"
        text = f"cache {cache.number} {what} {count} samples of dataset {fingerprint}"
        self._reporter.add(kind, text, owner_uid=uid, subject=fingerprint, count=count)

    def show(self) -> None:
        """Bring the metrics up to date."""
        metrics, spaces = self.metrics, [each.arena.space for each in self._caches.values()]
        metrics.bytes.set(sum(each.used_bytes for each in spaces))
        metrics.allocated_bytes.set(sum(each.allocated_bytes for each in spaces))
        metrics.budget_bytes.set(sum(each.limit_bytes for each in spaces))
        metrics.largest_user_bytes.set(self._memory.largest_user_bytes)
        metrics.short.set(sum(bool(each.reason) for each in self._caches.values()))
        metrics.samples.set(sum(each.arena.published_count for each in self._caches.values()))
        metrics.caches.set(len(spaces))
        metrics.clients.set(len(self._of_session))
