"""One bound on all arenas, counted from the first allocated byte until the last is free."""

import asyncio
from collections.abc import Coroutine

import pytest

from everstep.core.errors import MemoryRefusedError
from everstep.daemon import arena_book
from everstep.daemon.admission_plan import Wish
from everstep.daemon.arena import Arena
from everstep.daemon.arena_book import ArenaBook
from everstep.daemon.config import MemorySection
from everstep.daemon.control.metrics import Metrics
from everstep.daemon.fd_store.fd_store import FdStore

MIB = 1024**2
ROOM_BYTES = 8 * MIB


class Book:
    """A book with room for two arenas of 4 MiB, and engines that let go when they are told."""

    def __init__(self) -> None:
        self.metrics = Metrics("test")
        self.may_forget = asyncio.Event()
        self.arenas = ArenaBook(
            MemorySection(arena_max_bytes=ROOM_BYTES, reserve_bytes=0),
            self.metrics,
            self.spawn,
            FdStore(enabled=False),
        )

    def spawn(self, work: Coroutine[None, None, None], doing: str) -> asyncio.Task[None]:
        return asyncio.create_task(work, name=doing)

    async def make(self, size_bytes: int = 4 * MIB) -> Arena:
        return await self.arenas.make(Wish(slot_size_bytes=size_bytes, slot_count=1), layout_digest="d")

    async def forget(self, fd: int) -> None:
        assert fd >= 0
        await self.may_forget.wait()

    def gauge(self) -> float:
        return self.sample("everstep_arena_bytes")

    def sample(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


def test_arenas_made_at_the_same_time_share_the_bound() -> None:
    async def run() -> None:
        book = Book()
        made = await asyncio.gather(*(book.make() for _ in range(3)), return_exceptions=True)
        refused = [each for each in made if isinstance(each, MemoryRefusedError)]
        arenas = [each for each in made if isinstance(each, Arena)]
        assert (len(arenas), len(refused)) == (2, 1)
        assert len({arena.number for arena in arenas}) == 2
        assert book.arenas.size_bytes == book.gauge() == ROOM_BYTES
        book.may_forget.set()
        await asyncio.gather(*(book.arenas.close(arena, book.forget) for arena in arenas))
        assert book.arenas.size_bytes == book.gauge() == 0

    asyncio.run(run())


def test_one_that_was_refused_does_not_count() -> None:
    async def run() -> None:
        book = Book()
        with pytest.raises(MemoryRefusedError):
            await book.make(ROOM_BYTES + 4096)
        assert book.arenas.size_bytes == 0
        assert book.sample("everstep_arena_allocation_duration_seconds_count") == 0

    asyncio.run(run())


def test_the_metrics_tell_the_bytes_and_the_time_of_every_allocation() -> None:
    async def run() -> None:
        book = Book()
        arenas = [await book.make(), await book.make(2 * MIB)]
        assert book.sample("everstep_arena_allocation_duration_seconds_count") == 2
        took_s = book.sample("everstep_arena_allocation_duration_seconds_sum")
        assert took_s == pytest.approx(sum(arena.allocation_s for arena in arenas))
        assert book.sample("everstep_arena_allocated_bytes_total") == 6 * MIB
        book.may_forget.set()
        await asyncio.gather(*(book.arenas.close(arena, book.forget) for arena in arenas))
        assert book.sample("everstep_arena_allocated_bytes_total") == 6 * MIB, "what was allocated only grows"

    asyncio.run(run())


def test_one_that_engines_still_hold_counts_and_a_new_one_waits_for_its_room() -> None:
    async def run() -> None:
        book = Book()
        first = await book.make(ROOM_BYTES)
        closing = book.arenas.close(first, book.forget)
        waiting = asyncio.create_task(book.make(ROOM_BYTES))
        done, _ = await asyncio.wait([closing, waiting], timeout=0.05)
        assert not done
        assert book.arenas.size_bytes == ROOM_BYTES
        assert first.view[0] == 0, "what an engine may still write to stays mapped"
        book.may_forget.set()
        second = await waiting
        await book.arenas.close(second, book.forget)

    asyncio.run(run())


def test_as_many_slots_are_made_as_fit_and_the_reason_is_kept() -> None:
    async def run() -> None:
        book = Book()
        wish = Wish(slot_size_bytes=3 * MIB, slot_count=4)
        assert not await book.arenas.has_room(wish)
        arena = await book.arenas.make(wish, layout_digest="d")
        assert len(arena.machine.slots) == 2
        assert "budget has 8 MiB left" in arena.reason
        assert book.arenas.size_bytes == 6 * MIB
        book.may_forget.set()
        await book.arenas.close(arena, book.forget)

    asyncio.run(run())


def test_who_comes_first_leaves_the_others_their_part() -> None:
    async def run() -> None:
        book = Book()
        wish = Wish(slot_size_bytes=2 * MIB, slot_count=3)
        first = await book.arenas.make(wish, layout_digest="d", sharers=2)
        second = await book.arenas.make(wish, layout_digest="d")
        assert [len(arena.machine.slots) for arena in (first, second)] == [2, 2]
        assert "2 ranks share it" in first.reason
        book.may_forget.set()
        await asyncio.gather(*(book.arenas.close(arena, book.forget) for arena in (first, second)))

    asyncio.run(run())


@pytest.mark.parametrize("hangs", [False, True])
def test_memory_that_a_device_does_not_let_go_is_not_on_its_way(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Who asks for memory is then refused at once, and a last boundary does not wait for what never comes."""
    monkeypatch.setattr(arena_book, "CLOSING_S", 0.0 if hangs else 600.0)
    monkeypatch.setattr(arena_book, "CLOSING_S_PER_GIB", 0.0)

    async def run() -> None:
        book = Book()
        arenas = [await book.make(), await book.make()]
        closing = book.arenas.close(arenas[0], book.forget)
        assert book.arenas.is_closing is not hangs
        asking = asyncio.create_task(book.make())
        if hangs:
            with pytest.raises(MemoryRefusedError):
                await asking
        book.may_forget.set()
        await closing
        arenas[0] = await book.make() if hangs else await asking
        for arena in arenas:
            await book.arenas.close(arena, book.forget)
        assert (book.arenas.size_bytes, book.arenas.is_closing) == (0, False)

    asyncio.run(run())
