"""The HTTP server: one thread with an event loop of its own, so that neither a scrape nor a stranger delays a trainer.

h11 reads requests; every connection brings one, has one deadline for all of it, and ends with the answer. There are
never more than CONNECTIONS_MAX of them: when another comes, the oldest one goes that has not sent its request, so that
whoever opens many and says nothing keeps nobody out, and nobody from the answer.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from threading import Thread

import h11

from ...core.errors import ConfigError
from ..watchdog_machine import Lane
from .answer_format import REASONS, Answer, said
from .credentials import Credentials
from .request_format import RefusedError, Request, request
from .section import MetricsSection

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 16 * 1024
REQUEST_S = 5.0
"""From the connection to the end of the request, however it is dripped."""
CONNECTION_S = 20.0
"""All of it: handshake, request, answer, end."""
LINGER_S = 1.0
"""A refusal is read by whoever still sends: what comes is thrown away for so long."""
BACKLOG = 128
PAUSE_S = 1.0
READ_BYTES = 4096


class Caller:
    """Who sent a request, as far as the connection tells."""

    def __init__(self, *, has_certificate: bool) -> None:
        self.has_certificate = has_certificate
        """It has shown one that the configured authority signed."""


Handler = Callable[[Request, Caller], Awaitable[Answer]]


class WebServer:
    """The server of one daemon. `start` and `close` belong to the daemon's own thread."""

    def __init__(self, section: MetricsSection, credentials: Credentials, handler: Handler) -> None:
        self._section, self._credentials, self._handler = section, credentials, handler
        self._loop = asyncio.new_event_loop()
        self._connections: dict[asyncio.Task[None], None] = {}
        """By age, the oldest first."""
        self._asked: set[asyncio.Task[None]] = set()
        """Those of them that are being answered."""
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._thread: Thread | None = None
        self._looks = self._looks_heard = 0
        """Of the watchdog: how many it has sent to the loop, and how many came."""

    def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the port cannot be had.
        """
        section = self._section
        family = socket.AF_INET6 if ":" in section.address else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (section.address, section.port), family=family, backlog=BACKLOG
            )
        except OSError as error:
            self._loop.close()
            raise ConfigError(
                f"metrics.port {section.port} cannot be listened on: {error.strerror or error}",
                hint="choose a free one; 0 takes any",
            ) from error
        self._listener.setblocking(False)
        self._accepting = self._loop.create_task(self._accept(self._listener))
        self._thread = Thread(target=self._run, name="everstep-web", daemon=True)
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Drop every connection and end the thread."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join()
            self._thread = None

    def lane(self) -> Lane:
        """Return whether the loop goes on, as far as was seen since it was asked here before; ask again."""
        lane = Lane(waiting=self._looks - self._looks_heard, ended=self._looks_heard)
        if not lane.waiting:
            self._looks += 1
            with contextlib.suppress(RuntimeError):  # it has ended, so nothing is heard of it
                self._loop.call_soon_threadsafe(self._hear)
        return lane

    def _hear(self) -> None:
        self._looks_heard += 1

    def _run(self) -> None:
        assert self._accepting is not None
        assert self._listener is not None
        try:
            with contextlib.suppress(asyncio.CancelledError):  # stopped before it began
                self._loop.run_until_complete(self._accepting)
        finally:
            self._listener.close()
            self._loop.close()

    def _stop(self) -> None:
        for task in (self._accepting, *self._connections):
            if task is not None:
                task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                try:
                    sock, _ = await self._loop.sock_accept(listener)
                except ConnectionAbortedError:
                    continue
                except OSError as error:  # no descriptor left: whoever waits is asked again in a while
                    logger.error("web_cannot_accept reason=%s", error)
                    await asyncio.sleep(PAUSE_S)
                    continue
                if len(self._connections) >= CONNECTIONS_MAX:
                    await self._make_room()
                task = self._loop.create_task(self._serve(sock))
                self._connections[task] = None
                task.add_done_callback(partial(self._ended, sock))
        if self._connections:
            await asyncio.wait(list(self._connections))

    async def _make_room(self) -> None:
        silent = (each for each in self._connections if each not in self._asked)
        going = next(silent, None) or next(iter(self._connections))
        del self._connections[going]
        going.cancel()
        await asyncio.wait([going])

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()  # here: one that had to make room at once has not even begun
        self._connections.pop(task, None)
        self._asked.discard(task)

    async def _serve(self, sock: socket.socket) -> None:
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(CONNECTION_S):
                reader = asyncio.StreamReader(limit=REQUEST_BYTES_MAX)
                protocol = asyncio.StreamReaderProtocol(reader)
                context = self._credentials.context()
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, sock, ssl=context,
                    ssl_handshake_timeout=None if context is None else REQUEST_S,
                    ssl_shutdown_timeout=None if context is None else LINGER_S,
                )  # fmt: skip
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                await self._answer(reader, writer)
        except (OSError, ssl.SSLError, TimeoutError, asyncio.CancelledError) as error:
            # Theirs: they left, spoke no TLS, were too slow, or another needed the room.
            logger.debug("web_connection_ended reason=%r", error)
        finally:
            if transport is not None:
                transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        is_head, refused = False, True
        try:
            async with asyncio.timeout(REQUEST_S):
                asked = await _read(protocol, reader)
            if asked is None:
                return
            is_head, refused = asked.is_head, False
            task = asyncio.current_task()
            assert task is not None
            self._asked.add(task)
            certificate = writer.get_extra_info("peercert")
            answer = await self._handler(asked, Caller(has_certificate=bool(certificate)))
            if asked.takes_gzip:
                answer = answer.compressed()
        except TimeoutError:
            answer = said(408, f"the request did not come within {REQUEST_S:.0f} s")
        except RefusedError as error:
            allow = (("Allow", "GET, HEAD"),) if error.status == 405 else ()
            answer = said(error.status, error.said, *allow)
        writer.write(_encode(protocol, answer, is_head=is_head))
        await writer.drain()
        if refused and writer.can_write_eof():
            await _linger(reader, writer)
        writer.close()
        await writer.wait_closed()


async def _read(protocol: h11.Connection, reader: asyncio.StreamReader) -> Request | None:
    """Return the request; None: they left before it was whole. RefusedError for what is none."""
    while True:
        try:
            event = protocol.next_event()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            raise RefusedError(
                status if status in REASONS else 400, "this is no request: " + str(error)
            ) from error
        if isinstance(event, h11.Request):
            if event.http_version not in (b"1.0", b"1.1"):
                raise RefusedError(400, "this server speaks HTTP/1.1")
            return request(event.method, event.target, list(event.headers))
        if event is not h11.NEED_DATA:
            return None
        data = await reader.read(READ_BYTES)
        protocol.receive_data(data)


def _encode(protocol: h11.Connection, answer: Answer, *, is_head: bool) -> bytes:
    """Return the answer's bytes. h11 frames them, but where it could not read the request it writes nothing more."""
    head = h11.Response(
        status_code=answer.status, reason=REASONS[answer.status], headers=list(answer.all_headers())
    )
    fresh = protocol if protocol.our_state is h11.SEND_RESPONSE else h11.Connection(h11.SERVER)
    parts = [fresh.send(head) or b""]
    if not is_head:
        parts.append(fresh.send(h11.Data(data=answer.body)) or b"")
    return b"".join(parts)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read on for a moment: a socket that is closed with bytes unread takes the answer back from the other side."""
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while await reader.read(READ_BYTES):
                pass
