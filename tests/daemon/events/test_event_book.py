"""Who sees which events, who waits for them, and what a slow one is told."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from everstep.core.errors import LimitError
from everstep.daemon.events.event_book import USERS_MAX, WATCHERS_USER_MAX, EventBook
from everstep.daemon.events.event_types import Event, EventKind, EventQuery

NOBODY = 65534


def event(text: str, uid: int | None = 1000) -> Event:
    return Event(kind=EventKind.RANK_LOST, unix_s=1.0, text=text, owner_uid=uid)


async def told(book: EventBook, uid: int | None, query: EventQuery = EventQuery()) -> list[Event]:  # noqa: B008
    return [each async for each in book.watch(uid, query)]


def texts(events: list[Event]) -> list[str]:
    return [each.text for each in events]


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_user_sees_their_own_and_the_nodes_with_numbers_without_gaps() -> None:
    async def test() -> None:
        book = EventBook()
        for text, uid in (("mine", 1000), ("theirs", NOBODY), ("node", None), ("mine too", 1000)):
            book.add(event(text, uid))
        mine = await told(book, 1000)
        assert texts(mine) == ["mine", "node", "mine too"]
        assert [each.sequence for each in mine] == [1, 2, 3]
        assert texts(await told(book, None)) == ["mine", "theirs", "node", "mine too"]
        assert texts(await told(book, 1000, EventQuery(since=2))) == ["mine too"]

    run(test)


def test_whoever_follows_gets_what_comes_and_ends_with_the_daemon() -> None:
    async def test() -> None:
        book = EventBook()
        book.add(event("before"))
        following = asyncio.ensure_future(told(book, 1000, EventQuery(follow=True)))
        since = asyncio.ensure_future(told(book, 1000, EventQuery(follow=True, since=0)))
        await asyncio.sleep(0)
        book.add(event("theirs", NOBODY))
        book.add(event("after"))
        book.close()
        assert texts(await following) == ["after"]
        assert texts(await since) == ["before", "after"]

    run(test)


def test_a_slow_reader_is_told_how_many_it_missed_and_holds_nobody() -> None:
    async def test() -> None:
        book = EventBook(size=4)
        slow = book.watch(1000, EventQuery(follow=True, since=0))
        book.add(event("first"))
        assert (await anext(slow)).text == "first"
        for number in range(2, 12):
            book.add(event(f"number {number}"))  # returns at once, whoever reads
        found = [await anext(slow) for _ in range(5)]
        assert found[0].kind is EventKind.MISSED
        assert (found[0].count, found[0].sequence) == (6, 7)
        assert texts(found[1:]) == [f"number {number}" for number in (8, 9, 10, 11)]
        await slow.aclose()

    run(test)


def test_a_number_of_another_daemon_is_said_to_be_one() -> None:
    async def test() -> None:
        book = EventBook()
        book.add(event("first"))
        log_id = (await told(book, 1000))[0].log_id
        assert texts(await told(book, 1000, EventQuery(since=0, log_id=log_id))) == ["first"]
        for query in (EventQuery(since=1, log_id="of another one"), EventQuery(since=500)):
            found = await told(book, 1000, query)
            assert [each.kind for each in found] == [EventKind.MISSED, EventKind.RANK_LOST]
            assert found[0].count == 0

    run(test)


def test_watchers_are_bounded_and_their_places_given_back() -> None:
    async def test() -> None:
        book = EventBook()
        mine = [book.watch(1000, EventQuery(follow=True, since=0)) for _ in range(WATCHERS_USER_MAX)]
        book.add(event("first"))
        for each in mine:
            await anext(each)
        with pytest.raises(LimitError) as caught:
            await told(book, 1000, EventQuery(follow=True))
        assert str(WATCHERS_USER_MAX) in caught.value.hint
        assert texts(await told(book, 1000)) == ["first"], "who does not wait takes no place"
        other = book.watch(NOBODY, EventQuery(follow=True, since=0))
        await mine[0].aclose()
        again = book.watch(1000, EventQuery(follow=True, since=0))
        assert (await anext(again)).text == "first"
        for each in (*mine, other, again):
            await each.aclose()

    run(test)


def test_logs_of_users_are_bounded_but_not_of_those_who_follow() -> None:
    async def test() -> None:
        book = EventBook()
        watching = book.watch(1, EventQuery(follow=True, since=0))
        book.add(event("first", 1))
        assert (await anext(watching)).text == "first"
        for uid in range(2, 2 * USERS_MAX):
            book.add(event("x", uid))
        book.add(event("still mine", 1))
        assert (await anext(watching)).text == "still mine"
        assert texts(await told(book, 2)) == [], "the one who was heard of longest ago"
        await watching.aclose()

    run(test)
