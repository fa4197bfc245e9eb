"""The server over real sockets, with a handler of the test's."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from everstep.daemon.web.answer_format import Answer, said
from everstep.daemon.web.credentials import Credentials
from everstep.daemon.web.request_format import Request
from everstep.daemon.web.section import MetricsSection
from everstep.daemon.web.server import CONNECTIONS_MAX, Caller, WebServer

SECTION = MetricsSection()


class Slow:
    """A server that answers when the test says so."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Semaphore(0), threading.Event()
        self.server = WebServer(SECTION, Credentials(SECTION), self._answer)
        self.port = self.server.start()

    async def _answer(self, request: Request, caller: Caller) -> Answer:
        self.asked.release()
        await asyncio.to_thread(self.go.wait)
        return said(200, request.path)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, path: str) -> socket.socket:
        """Return a connection whose request is being answered."""
        sock = self.connect()
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert self.asked.acquire(timeout=20)
        return sock


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()
    made.server.close()


def test_who_is_being_answered_makes_no_room_for_those_who_say_nothing(slow: Slow) -> None:
    with contextlib.ExitStack() as held:
        answered = held.enter_context(slow.ask("/first"))
        silent = [held.enter_context(slow.connect()) for _ in range(3 * CONNECTIONS_MAX)]
        held.enter_context(slow.ask("/last"))  # so all before it were taken
        assert silent[0].recv(1) == b"", "the oldest one that said nothing has gone"
        slow.go.set()
        assert b"/first" in answered.makefile("rb").read()


def test_when_all_are_being_answered_the_oldest_goes(slow: Slow) -> None:
    with contextlib.ExitStack() as held:
        first, *_ = [held.enter_context(slow.ask(f"/{number}")) for number in range(CONNECTIONS_MAX)]
        last = held.enter_context(slow.ask("/last"))
        assert first.recv(1) == b""
        slow.go.set()
        assert b"/last" in last.makefile("rb").read()


def test_a_start_and_an_end_at_once() -> None:
    for _ in range(100):
        slow = Slow()
        closing = threading.Thread(target=slow.server.close)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        with pytest.raises(ConnectionRefusedError):
            slow.connect()
