"""Fills one cache: one batch of samples after the other, copied in a thread, published on the event loop."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ...core.errors import UsageError
from ...core.sizes import size_text
from ...dataloader.cache.arena_format import record_bytes
from ...proto import frames
from ..admission_plan import ALLOCATION_STEP_BYTES
from ..nodes.peer_book import Sharing
from .arena import Item
from .space_plan import Refusal
from .staging import Bytes

if TYPE_CHECKING:
    from .book import CacheBook
    from .cache import Cache

logger = logging.getLogger(__name__)

STEP_BYTES = ALLOCATION_STEP_BYTES // 4
"""Pages are made ahead of need in such steps: a reader's samples do not wait for them."""
SHORT_PAUSE_S = 10.0
"""Where the node had no memory for more it is asked again after this."""
BATCHES_WAITING_MAX = 256
"""Of one client: an honest one (dataloader/cache/link.py) has fewer."""
ITEMS_WAITING_MAX = 32_768
"""In these: samples of 0 bytes take no room in a staging, but some here."""


class Filler(Protocol):
    """Who brings samples: a reader of this node, another node, or this daemon with what it fetched from one."""

    @property
    def pid(self) -> int:
        """Return the process, for people; 0: another node's."""
        ...

    def send(self, frame: frames.Reply) -> None:
        """Hear what became of them."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """One FillCache that waits, or what came from another node."""

    filler: Filler
    request_id: int
    items: tuple[Item, ...]
    staging: Bytes
    is_foreign: bool = False
    """It came from another node: nothing of it is sent on."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its samples."""
        return sum(item.length for item in self.items)


@dataclass(slots=True)
class _Outcome:
    published: int = 0
    known: int = 0
    forwarded: int = 0
    refused: list[tuple[Item, Refusal]] = field(default_factory=list[tuple[Item, Refusal]])


class Filling:
    """The queue of one cache, and whoever works on it. Owned by the event loop."""

    def __init__(self, book: "CacheBook", cache: "Cache") -> None:
        self._book, self._cache = book, cache
        self._batches: deque[Batch] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._grower: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_said_short = False

    @property
    def is_busy(self) -> bool:
        """Tell whether the arena is being written to."""
        return self._worker is not None or self._grower is not None

    @property
    def is_filling(self) -> bool:
        """Tell whether batches wait or are being copied."""
        return self._worker is not None

    def add(self, batch: Batch) -> None:
        """Queue a batch, whose answer goes to its session.

        Raises:
            UsageError: it names what is not in the staging or the dataset, or too much waits.
        """
        if sum(each.filler is batch.filler for each in self._batches) >= BATCHES_WAITING_MAX:
            raise UsageError(f"{BATCHES_WAITING_MAX} batches of this client wait already")
        for item in batch.items:
            if not 0 <= item.sample < self._cache.arena.space.sample_count:
                raise UsageError(f"sample {item.sample} is not one of {self._cache.arena.space.sample_count}")
            if not batch.staging.holds(item.offset_bytes, item.length):
                raise UsageError(
                    f"{item.length} bytes at {item.offset_bytes} do not lie in a staging of {batch.staging.size_bytes}"
                )
            if not 0 <= item.digest < 1 << 64:
                raise UsageError(f"{item.digest} is no XXH3-64")
        waiting = [each for each in (*self._batches, batch) if each.staging is batch.staging]
        waiting_bytes = sum(each.size_bytes for each in waiting)
        if (
            waiting_bytes > batch.staging.size_bytes
            or sum(len(each.items) for each in waiting) > ITEMS_WAITING_MAX
        ):
            raise UsageError(
                f"samples of {waiting_bytes} bytes wait in a staging of {batch.staging.size_bytes}",
                hint="a place may be used again when its sample was answered",
            )
        self._batches.append(batch)
        if self._worker is None:
            self._worker = self._book.spawn(self._work(), "filling a cache")

    async def _work(self) -> None:
        try:
            while self._batches:
                batch = self._batches.popleft()
                outcome = await self._fill(batch)
                batch.filler.send(self._answer(batch, outcome))
        finally:
            self._worker = None

    async def _fill(self, batch: Batch) -> _Outcome:
        arena, outcome = self._cache.arena, _Outcome()
        waiting = self._unknown(batch.items, outcome)
        sharing = self._book.peers.sharing(self._cache.dataset)
        if sharing is not None:
            if not batch.is_foreign:
                outcome.forwarded = await self._book.forward(self._cache, batch.staging, waiting, sharing)
            waiting = self._kept(waiting, sharing)
        while waiting:
            copied, refused = await self._cache.copy(batch.staging, waiting)
            arena.publish(copied)
            self._count(copied, sharing)
            outcome.published += len(copied)
            outcome.refused += refused
            waiting = waiting[len(copied) + len(refused) :]
            if waiting:  # there are no pages for it
                await self._grow(waiting[0].length)
        self._grow_ahead()
        arena.show()
        self._book.show()
        return outcome

    def _unknown(self, items: Sequence[Item], outcome: _Outcome) -> list[Item]:
        """Return the items that are not there, each sample once."""
        fresh: dict[int, Item] = {}
        for item in items:
            known = self._cache.arena.known(item)
            if known is None and item.sample in fresh:
                first = fresh[item.sample]
                known = (first.length, first.digest) == (item.length, item.digest)
            if known is None:
                fresh[item.sample] = item
            elif known:
                outcome.known += 1
            else:
                outcome.refused.append((item, Refusal.DIFFERS))
        return list(fresh.values())

    def _kept(self, items: Sequence[Item], sharing: Sharing) -> list[Item]:
        """Return the samples that this node owns, and copies of others as far as there is room beside those."""
        room_bytes = self._cache.copy_room_bytes(sharing.member_count if sharing.me else 0)
        kept: list[Item] = []
        for item in items:
            if sharing.owner(item.sample) is not None:
                size_bytes = record_bytes(item.length)
                if size_bytes > room_bytes:
                    continue
                room_bytes -= size_bytes
            kept.append(item)
        return kept

    def _count(self, copied: Sequence[tuple[Item, int]], sharing: Sharing | None) -> None:
        metrics, held = self._book.metrics, self._cache.held
        for item, _ in copied:
            is_owned = sharing is None or sharing.owner(item.sample) is None
            held.add(record_bytes(item.length), is_owned=is_owned)
        metrics.filled_total.inc(len(copied))
        metrics.filled_bytes.inc(sum(item.length for item, _ in copied))

    def _answer(self, batch: Batch, outcome: _Outcome) -> frames.CacheFilled:
        metrics = self._book.metrics
        metrics.known_total.inc(outcome.known)
        reasons: dict[Refusal, list[int]] = {}
        for item, refusal in outcome.refused:
            metrics.refused_total.labels(refusal.value).inc()
            reasons.setdefault(refusal, []).append(item.sample)
        for refusal in (Refusal.CORRUPT, Refusal.DIFFERS):
            if refusal in reasons:
                logger.warning(
                    "cache_sample_refused reason=%s pid=%d count=%d",
                    refusal.value,
                    batch.filler.pid,
                    len(reasons[refusal]),
                )
        others = sorted({each.value for each in reasons} - {Refusal.CORRUPT.value, Refusal.DIFFERS.value})
        return frames.CacheFilled(
            re=batch.request_id,
            published_count=outcome.published,
            known_count=outcome.known,
            corrupt=reasons.get(Refusal.CORRUPT, []),
            differing=reasons.get(Refusal.DIFFERS, []),
            reason=", ".join(others),
            forwarded_count=outcome.forwarded,
        )

    # -- pages

    def wake(self) -> None:
        """A reader came, or memory became free: have pages ahead of need."""
        if self._cache.client_count:
            self._stop_timer()
            self._grow_ahead(again=True)

    def stop(self) -> None:
        """The cache goes."""
        self._stop_timer()

    def _grow_ahead(self, *, again: bool = False) -> None:
        """Make the next pages beside the readers' work, before the ones that are there are used up.

        Where the node had no memory for them it is asked again only if that is wanted.
        """
        space = self._cache.arena.space
        if self._grower is None and (again or not space.is_short) and space.next_step_bytes(STEP_BYTES):
            self._grower = self._book.spawn(self._grow_beside(), "making room in a cache")

    async def _grow_beside(self) -> None:
        try:
            await self._cache.grow(STEP_BYTES)
        finally:
            self._grower = None
            self._note_shortage()

    async def _grow(self, length: int) -> None:
        """Return when there are pages for a sample of so many bytes, or the space is marked as short of memory."""
        if self._grower is not None:
            await asyncio.wait([self._grower])
        space = self._cache.arena.space
        while space.refusal(length) is None and not space.is_allocated_for(length):
            await self._cache.grow(STEP_BYTES, length)
        self._note_shortage()

    def _note_shortage(self) -> None:
        """Say once that memory is short, and ask again later: readers see that nothing is taken, and offer nothing."""
        space, cache = self._cache.arena.space, self._cache
        if space.is_short and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SHORT_PAUSE_S, self._ask_again)
        if cache.reason and not self._has_said_short:
            logger.warning(
                "cache_smaller number=%d budget=%s has=%s reason=%s",
                cache.number,
                size_text(space.limit_bytes),
                size_text(space.allocated_bytes),
                cache.reason,
            )
        self._has_said_short = bool(cache.reason)
        cache.arena.show()
        self._book.show()

    def _ask_again(self) -> None:
        self._timer = None
        self.wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
