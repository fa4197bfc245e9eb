"""Which caches there are, who reads them, and which of them goes when another needs the room.

One cache for each (uid, content, fingerprint): who asks for another user's cache gets one of its own, as if there were
none. A cache outlives its readers, so that a second job, and one that starts again after a crash, finds it filled.
"""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from ...core.errors import MemoryRefusedError, NodeError, NotFoundError, RunBusyError, UsageError
from ...core.sizes import size_text
from ...dataloader.cache.arena_format import base_bytes
from ...proto import frames
from ..arena_book import ArenaBook, Spawn
from ..blocking import in_thread
from ..views import CacheView
from .arena import CacheArena, Item
from .cache import Cache, Key
from .filling import Batch, Filling
from .metrics import CacheMetrics
from .space_plan import IdleCache, caches_to_drop
from .staging import Staging

if TYPE_CHECKING:
    from ..session import Session

logger = logging.getLogger(__name__)


class CacheBook:
    """Owned by the event loop."""

    def __init__(self, arenas: ArenaBook, metrics: CacheMetrics, spawn: Spawn) -> None:
        self.metrics, self.spawn = metrics, spawn
        self._arenas = arenas
        self._caches: dict[Key, Cache] = {}
        self._fillings: dict[Cache, Filling] = {}
        self._of_session: dict[Session, Cache] = {}
        self._stagings: dict[Session, Staging] = {}
        self._opening = asyncio.Lock()
        self._made_count = 0
        arenas.relieve = self.make_room

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
        """
        if session in self._of_session:
            raise UsageError("this connection has a cache already", hint="open another connection")
        key = (session.peer.uid, frame.content, frame.fingerprint)
        async with self._opening:
            cache = self._caches.get(key) or await self._make(key, frame)
            count = cache.arena.space.sample_count
            if count != frame.sample_count:
                raise UsageError(
                    f"the dataset with fingerprint {frame.fingerprint!r} had {count} samples when its cache was made, "
                    f"and has {frame.sample_count} now",
                    hint="a fingerprint must change when the dataset does",
                )
            if session.has_ended:
                raise UsageError("the client left while its cache was being opened")
            cache.add_client(session, frame.budget_bytes)
            self._of_session[session] = cache
        self._fillings[cache].wake()
        opened = frames.CacheOpened(
            re=frame.request_id,
            size_bytes=cache.arena.file_bytes,
            budget_bytes=cache.arena.space.limit_bytes,
            reason=await cache.why_less(frame.budget_bytes),
        )
        self.show()
        return opened, cache.arena.read_fd

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
        try:
            arena = CacheArena(frame.sample_count, frame.budget_bytes, memory_bytes)
        except OSError as error:
            raise NodeError(
                f"the kernel cannot make a cache: {error.strerror or error}",
                hint="caches need Linux 5.1 or newer, and free descriptors",
            ) from error
        self._made_count += 1
        cache = Cache(self._made_count, key, arena, self._arenas)
        cache.idle_since_s = self.now_s()
        try:
            await cache.take_index()
            if arena.space.is_short:
                raise MemoryRefusedError(
                    f"the index of {frame.sample_count} samples needs {size_text(index_bytes)}, but {cache.reason}"
                )
        except BaseException:
            await in_thread(cache.close)
            raise
        self._caches[key] = cache
        self._fillings[cache] = Filling(self, cache)
        logger.info("cache_made number=%d samples=%d", cache.number, frame.sample_count)
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
        self._cache_of(session)
        self.metrics.add_use(frame)

    def session_ended(self, session: "Session") -> None:
        """A client is gone. Its cache stays, and what it had queued is still put there."""
        self._stagings.pop(session, None)
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

    # -- room

    async def make_room(self, needed_bytes: int) -> None:
        """Drop caches that nobody reads, oldest first, until so many bytes are free or none is left."""
        idle = {cache.number: cache for cache in self._caches.values() if self._is_idle(cache)}
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
            await in_thread(cache.close)
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
            raise NotFoundError(f"there is no cache {number}", hint="everstep cache list shows all of yours")
        if not self._is_idle(cache):
            raise RunBusyError(f"cache {number} is in use: {cache.client_count} read it")
        state = cache.state(self.now_s())
        self._forget(cache)
        await in_thread(cache.close)
        self.show()
        return state

    def _is_idle(self, cache: Cache) -> bool:
        return not cache.client_count and not self._fillings[cache].is_busy

    def _forget(self, cache: Cache) -> None:
        del self._caches[cache.key]
        self._fillings.pop(cache).stop()
        self.metrics.dropped_total.inc()
        logger.info("cache_dropped number=%d samples=%d", cache.number, cache.arena.published_count)

    def show(self) -> None:
        """Bring the metrics up to date."""
        metrics, spaces = self.metrics, [each.arena.space for each in self._caches.values()]
        metrics.bytes.set(sum(each.used_bytes for each in spaces))
        metrics.allocated_bytes.set(sum(each.allocated_bytes for each in spaces))
        metrics.budget_bytes.set(sum(each.limit_bytes for each in spaces))
        metrics.samples.set(sum(each.arena.published_count for each in self._caches.values()))
        metrics.caches.set(len(spaces))
        metrics.clients.set(len(self._of_session))
