"""One connection of the data socket: who sends much is served in turns, in order, whole, and never after its end."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from everstep.daemon.connection import FRAME_DEADLINE_S, Connection, Manners
from everstep.daemon.turns import FRAMES_AT_ONCE, REST_S_MAX, Rests, Turns
from everstep.proto import frames
from everstep.proto.frames import Reply, Request
from everstep.proto.wire import FrameReader, decode_reply, pack

MANY = 100_000
WAIT_S = 60.0
ME, OTHER = 1000, 2000


def numbered(number: int) -> frames.ListOffers:
    return frames.ListOffers(request_id=number)


@dataclass
class Served:
    """What the daemon's side did, in order, over all connections of a test."""

    turns: Turns = field(default_factory=Turns)
    frames: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Uid and number of each request."""
    closed: list[int] = field(default_factory=list[int])
    reports: list[str] = field(default_factory=list[str])
    owed_s: float = 0.0
    on_frame: "Callable[[Connection, int], None] | None" = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    held_bytes: int = 0
    counted: int = 0
    """Frames that were told to be served."""
    asked: int = 0
    """How often it was asked how long a user is not read."""
    pairs: list[tuple[Connection, socket.socket]] = field(
        default_factory=list[tuple[Connection, socket.socket]]
    )

    def __post_init__(self) -> None:
        self.rests = Rests(self.turns, self.delay_s)

    def hold(self, grown_bytes: int) -> bool:
        self.held_bytes += grown_bytes
        return True

    def delay_s(self, uid: int) -> float:
        del uid
        self.asked += 1
        self.changed.set()
        return self.owed_s

    def connect(self, uid: int, wait_s: float = 0.0) -> tuple[Connection, socket.socket]:
        """Return the daemon's end, which has heard Hello, and the client's."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def serve(frame: Request) -> None:
            assert isinstance(frame, frames.ListOffers)
            self.frames.append((uid, frame.request_id))
            if self.on_frame is not None:
                self.on_frame(made, frame.request_id)
            self.changed.set()

        def close() -> None:
            self.closed.append(uid)
            self.changed.set()

        def report(event: str, text: str) -> None:
            self.reports.append(f"{event} {text}")

        def pace(count: int) -> float:
            if count:
                self.turns.take(uid, count)
                self.counted += count
            return self.delay_s(uid)

        manners = Manners(
            report=report,
            turn=lambda: self.turns.left(uid),
            pace=pace,
            rest=partial(self.rests.add, uid),
            rest_no_more=partial(self.rests.discard, uid),
            hold=self.hold,
        )
        made = Connection(ours, serve, close, manners, wait_s)
        made.trust()
        self.pairs.append((made, theirs))
        return made, theirs

    def end(self) -> None:
        """Close both ends of all connections; nothing of them waits any more, and each frame was counted."""
        for made, theirs in self.pairs:
            made.close()
            theirs.close()
        assert self.held_bytes == 0
        assert self.counted == len(self.frames)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def longest_without(self, uid: int) -> int:
        """Return the most frames of others that were served between two of this user's."""
        longest = count = 0
        for each, _ in self.frames[: self.frames.index(self.last_of(uid)) + 1]:
            count = 0 if each == uid else count + 1
            longest = max(longest, count)
        return longest

    def last_of(self, uid: int) -> tuple[int, int]:
        return [each for each in self.frames if each[0] == uid][-1]


async def send_all(sock: socket.socket, content: bytes) -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.get_running_loop().sock_sendall(sock, content)


def many(count: int) -> bytes:
    return b"".join(pack(numbered(number)) for number in range(count))


def test_who_sends_100_000_frames_at_once_is_served_in_turns_with_others() -> None:
    """The other asks again as soon as it was answered: it is served once in each round."""

    async def run() -> None:
        served = Served()
        _, theirs = served.connect(ME)
        _, others = served.connect(OTHER)

        def answered(_: Connection, number: int) -> None:
            if served.frames[-1][0] == OTHER:
                others.send(pack(numbered(number + 1)))

        served.on_frame = answered
        others.send(pack(numbered(0)))
        await send_all(theirs, many(MANY))
        await served.until(lambda: sum(uid == ME for uid, _ in served.frames) == MANY)
        assert [number for uid, number in served.frames if uid == ME] == list(range(MANY))
        assert len(served.frames) - MANY > MANY / FRAMES_AT_ONCE / 2
        assert served.longest_without(OTHER) <= 2 * FRAMES_AT_ONCE
        assert (served.reports, served.closed) == ([], [])
        served.end()

    asyncio.run(run())


def test_hundreds_of_connections_that_rest_cost_what_one_costs() -> None:
    """What is owed is a user's: all of them would be looked at whenever it is paid, for one to be read on."""

    async def run() -> None:
        clock, served = Clock(), Served()
        pairs = [served.connect(ME) for _ in range(500)]
        served.owed_s = Clock.STEP_S
        for number, (_, theirs) in enumerate(pairs):
            theirs.send(pack(numbered(number)))
        await clock.passes(Clock.STEP_S)
        assert served.asked >= len(pairs), "each was found readable once"
        before = served.asked
        await clock.passes(50 * Clock.STEP_S)
        # The one timer asks twice whenever it fires: 100 times. One for each connection would ask 25,000 times.
        assert 1 <= served.asked - before <= 300
        assert served.frames == []
        served.owed_s = 0.0
        await clock.passes(20 * Clock.STEP_S)
        assert [number for _, number in served.frames] == list(range(len(pairs)))
        served.end()

    asyncio.run(run())


def test_hundreds_of_connections_of_one_user_have_one_turn_together() -> None:
    async def run() -> None:
        served = Served()
        made, mine = zip(*(served.connect(ME) for _ in range(200)), strict=True)
        _, others = served.connect(OTHER)

        def answered(_: Connection, number: int) -> None:
            if served.frames[-1][0] == OTHER:
                if number == 0:
                    read_count = sum(each.held_bytes > 0 for each in made)
                    assert read_count <= 2, "what has no turn waits in the kernel"
                others.send(pack(numbered(number + 1)))

        served.on_frame = answered
        for sock in mine:  # all of it is there before the first round
            sock.send(many(2 * FRAMES_AT_ONCE))
        others.send(pack(numbered(0)))
        total = len(mine) * 2 * FRAMES_AT_ONCE
        await served.until(lambda: sum(uid == ME for uid, _ in served.frames) == total)
        assert served.longest_without(OTHER) <= 2 * FRAMES_AT_ONCE
        served.end()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["a bad frame", "the end of the session"])
def test_frames_before_an_early_end_are_counted_and_have_a_turn(how: str) -> None:
    """Who sends 63 good frames and a bad one over each of hundreds of connections gets no more than over one."""

    async def run() -> None:
        served, size = Served(), FRAMES_AT_ONCE - 1
        by_round, this_round = Counter[int](), 0

        def count_rounds() -> None:  # it is the first of each round: it was the first of the round before
            nonlocal this_round
            this_round += 1
            if len(served.closed) < len(served.pairs):
                asyncio.get_running_loop().call_soon(count_rounds)

        def counted(made: Connection, number: int) -> None:
            by_round[this_round] += 1
            if how == "the end of the session" and number == size - 1:
                made.close()

        served.on_frame = counted
        for _ in range(300):
            _, theirs = served.connect(ME)
            theirs.send(many(size) + b"\xff" * 4)
        asyncio.get_running_loop().call_soon(count_rounds)
        await served.until(lambda: len(served.closed) == len(served.pairs))
        assert len(served.frames) == len(served.pairs) * size
        assert max(by_round.values()) <= FRAMES_AT_ONCE
        assert len(served.reports) == (len(served.pairs) if how == "a bad frame" else 0)
        served.end()

    asyncio.run(run())


@pytest.mark.parametrize("answers", [False, True])
def test_what_was_sent_before_leaving_is_served_whole_and_in_order(answers: bool) -> None:
    """Also where every answer to it finds nobody any more."""

    async def run() -> None:
        served = Served()
        ours, theirs = served.connect(ME)
        if answers:
            served.on_frame = lambda made, number: made.send(frames.Done(re=number))
        theirs.setblocking(True)
        theirs.send(many(1000))
        theirs.close()
        await served.until(lambda: bool(served.closed))
        assert [number for _, number in served.frames] == list(range(1000))
        assert (served.reports, served.closed) == ([], [ME])
        ours.send(frames.Done(re=1))  # nothing, and no error
        assert served.closed == [ME]
        served.end()

    asyncio.run(run())


@pytest.mark.parametrize("count", [0, 1, 1000, 5000])
@pytest.mark.parametrize("of_frame", [b"", b"\x01"])
def test_what_the_dead_had_sent_is_served_also_where_its_child_holds_the_socket(
    count: int, of_frame: bytes
) -> None:
    """Others count on a Seal that was sent; what a child sends from then on is nobody's."""

    async def run() -> None:
        served = Served()
        ours, theirs = served.connect(ME)
        theirs.setblocking(True)
        theirs.send(many(count) + of_frame)
        ours.close_when_served()
        with contextlib.suppress(BrokenPipeError):  # closed already where there was little to serve
            theirs.send(many(1))
        ours.close_when_served()  # nothing more
        await served.until(lambda: bool(served.closed))
        assert [number for _, number in served.frames] == list(range(count))
        assert (served.reports, served.closed) == ([], [ME])
        served.end()

    asyncio.run(run())


@pytest.mark.parametrize("last", [5, FRAMES_AT_ONCE - 1, 3 * FRAMES_AT_ONCE])
def test_nothing_is_served_after_close(last: int) -> None:
    async def run() -> None:
        served = Served()
        _, theirs = served.connect(ME)

        def end(made: Connection, number: int) -> None:
            if number == last:
                made.close()

        served.on_frame = end
        theirs.send(many(1000))
        await served.until(lambda: bool(served.closed))
        for _ in range(10):
            await asyncio.sleep(0)
        assert [number for _, number in served.frames] == list(range(last + 1))
        assert served.closed == [ME]
        served.end()

    asyncio.run(run())


def test_closed_while_it_rests_it_is_not_read_again() -> None:
    async def run() -> None:
        served = Served()
        made, theirs = served.connect(ME)
        theirs.send(many(1000))
        await served.until(lambda: len(served.frames) == FRAMES_AT_ONCE)
        made.close()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(served.frames) == FRAMES_AT_ONCE
        served.end()

    asyncio.run(run())


class Clock:
    """The loop's time, which passes only when a test says so."""

    STEP_S = 0.5
    """Shorter than any rest."""

    def __init__(self) -> None:
        self.now_s = 0.0
        asyncio.get_running_loop().time = lambda: self.now_s  # type: ignore[method-assign]

    async def passes(self, seconds: float) -> None:
        """Let what is due by then happen."""
        for _ in range(round(seconds / self.STEP_S)):
            self.now_s += self.STEP_S
            for _ in range(5):
                await asyncio.sleep(0)


def test_who_owes_is_not_read_and_what_it_sent_meanwhile_is_served_later() -> None:
    async def run() -> None:
        clock, served = Clock(), Served(owed_s=5.0)
        made, theirs = served.connect(ME)
        theirs.send(many(10))
        await clock.passes(5)
        assert served.frames == []
        assert made.held_bytes == 0, "what nobody reads waits in the kernel"
        served.owed_s = 0.0
        await clock.passes(REST_S_MAX)
        assert len(served.frames) == 10
        served.end()

    asyncio.run(run())


def test_who_came_too_often_is_heard_later() -> None:
    async def run() -> None:
        clock, served = Clock(), Served()
        made, theirs = served.connect(ME, wait_s=3.0)
        theirs.send(many(10))
        await clock.passes(2.5)
        assert (served.frames, made.is_unread) == ([], True)
        await clock.passes(0.5)
        assert made.is_unread is False
        await clock.passes(0.5)
        assert len(served.frames) == 10
        unheard, _ = served.connect(ME, wait_s=3.0)
        unheard.close()
        assert unheard.is_unread
        await clock.passes(4)
        assert served.closed == [ME]
        served.end()

    asyncio.run(run())


def test_half_a_frame_has_its_deadline_and_time_in_which_nobody_read_does_not_count() -> None:
    async def run() -> None:
        clock, served, frame = Clock(), Served(), pack(numbered(1))
        _, theirs = served.connect(ME)
        theirs.send(frame + frame[:5])
        await clock.passes(FRAME_DEADLINE_S - 2)
        assert len(served.frames) == 1
        served.owed_s = 5.0
        theirs.send(frame[5:])
        await clock.passes(FRAME_DEADLINE_S)  # its rest has come, and is not read
        assert (len(served.frames), served.closed) == (1, [])
        served.owed_s = 0.0
        await clock.passes(REST_S_MAX)
        assert len(served.frames) == 2
        theirs.send(frame[:5])
        await clock.passes(FRAME_DEADLINE_S - 1)
        assert served.closed == []
        await clock.passes(2)
        assert served.closed == [ME]
        assert served.reports == [f"bad_frame reason=not whole after {FRAME_DEADLINE_S:.0f} s"]
        served.end()

    asyncio.run(run())


def test_answers_come_in_order_however_slowly_they_are_read() -> None:
    async def run() -> None:
        served = Served(on_frame=lambda made, number: made.send(frames.Done(re=number)))
        _, theirs = served.connect(ME)
        theirs.send(many(3000))
        await served.until(lambda: len(served.frames) == 3000)
        reader, replies = FrameReader(size_bytes_max=1 << 20), list[Reply]()
        while len(replies) < 3000:
            try:
                assert reader.receive(theirs)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            while (body := reader.next_body()) is not None:
                replies.append(decode_reply(body))
        assert replies == [frames.Done(re=number) for number in range(3000)]
        served.end()

    asyncio.run(run())
