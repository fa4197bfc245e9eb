"""What the metrics port answers, path by path. On the server's own thread; the daemon's loop is asked for its state."""

import asyncio
import importlib.resources
import secrets
import threading
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from prometheus_client.exposition import choose_encoder

from ..courtesy import Courtesy
from .answer_format import HTML, JSON, LOGGED_IN, LOGIN_REFUSED, Answer, said
from .credentials import Credentials
from .request_format import RefusedError, Request, check_host
from .section import MetricsSection
from .server import Caller, WebServer
from .sessions_machine import SESSION_S, Sessions
from .state import State

if TYPE_CHECKING:
    from ..node import Node
    from ..watchdog_machine import Lane

ANSWER_S = 5.0
"""Of a scrape's ten seconds, Prometheus' default; what is left when it has waited its longest is two."""
RESTING_MAX = 8
"""Scrapes: those that rest hold connections, of which there is a number, and must push nobody out."""
ASK_S = 5.0
"""How long the daemon's own loop is waited for."""
STATIC = {"/": ("index.html", HTML), "/app.js": ("app.js", "text/javascript; charset=utf-8")} | {
    f"/{name}": (name, kind)
    for name, kind in (
        ("timeline.js", "text/javascript; charset=utf-8"),
        ("style.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    )
}

_T = TypeVar("_T")


class Site:
    """The metrics port of one daemon. Made, started, used for logins and closed on the daemon's own thread."""

    def __init__(self, node: "Node", section: MetricsSection) -> None:
        """Read the credentials; ConfigError where they cannot be used."""
        self._node, self._section = node, section
        self._credentials = Credentials(section)
        self._server = WebServer(section, self._credentials, self._handle)
        self._state = State(node)
        self._sessions, self._lock = Sessions(), threading.Lock()
        self._courtesy, self._scrapes = Courtesy(), 0
        self._files = {path: _file(name, kind) for path, (name, kind) in STATIC.items()}
        self._loop = asyncio.get_running_loop()
        self._port = 0
        # Of this daemon: cookies belong to a host, whose other ports have others. The prefix keeps names below from it.
        self._cookie = ("__Host-" if section.has_tls else "") + f"everstep_session_{secrets.token_hex(4)}"

    def start(self) -> int:
        """Begin to answer; return the port. ConfigError where it cannot be had."""
        self._state.start()
        self._port = self._server.start()
        return self._port

    def lane(self) -> "Lane":
        """Return how far the loop of the port is; see WebServer.lane."""
        return self._server.lane()

    def close(self) -> None:
        """Answer nobody any more; all sessions end."""
        self._state.stop()
        self._server.close()

    def log_in(self, uid: int) -> tuple[str, float]:
        """Return an address that opens the page for this user, once, and for how many seconds it does."""
        login, now_s = secrets.token_urlsafe(32), time.monotonic()
        with self._lock:
            self._sessions.forget_old(now_s)
            until_s = self._sessions.issue(uid, login, now_s)
        return f"{self.origin}/login?token={login}", until_s - now_s

    @property
    def origin(self) -> str:
        """Return what every address here begins with, as this node reaches it: `https://node7:9464`."""
        scheme = "https" if self._section.has_tls else "http"
        return f"{scheme}://{self._host()}:{self._port}"

    def _host(self) -> str:
        """Return the name that the page is opened by."""
        if self._section.names:
            return self._section.names[0]
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._section.address, self._section.address)
        return f"[{address}]" if ":" in address else address

    async def _handle(self, request: Request, caller: Caller) -> Answer:
        try:
            return await self._route(request, caller)
        except RefusedError:
            raise
        except TimeoutError:
            return said(503, f"the daemon did not answer within {ASK_S:.0f} s: it is busy, or hangs")
        except Exception as error:  # noqa: BLE001 - logged, counted and reported
            self._node.bug(f"answering {request.path}", error)
            return said(500, "a bug of everstep: the daemon's log has the traceback")

    async def _route(self, request: Request, caller: Caller) -> Answer:
        if request.path == "/healthz":
            await self._ask(_nothing())
            return said(200, "ok")
        if request.path == "/metrics":
            self._check_scraper(request, caller)
            return await self._scraped(request)
        check_host(request, self._section.names)
        if not (self._section.is_loopback or self._section.has_tls):
            return said(
                403, "the page is served over TLS or on loopback only: a session must not travel readable"
            )
        if request.path == "/login":
            return self._login(request)
        if request.path == "/api/state":
            return await self._api_state(request)
        found = self._files.get(request.path)
        return found or said(404, "there is nothing here: / is the page, /metrics is for Prometheus")

    def _check_scraper(self, request: Request, caller: Caller) -> None:
        if self._section.is_loopback:
            check_host(request, self._section.names)
        elif not (caller.has_certificate or self._credentials.token_holds(request.bearer)):
            raise RefusedError(
                401, "beyond loopback a scrape needs a client certificate or the token of metrics.token_file"
            )

    async def _scraped(self, request: Request) -> Answer:
        """Return the metrics; while shards are written after a rest, unless many wait for theirs."""
        left_s = ANSWER_S if self._scrapes < RESTING_MAX else 0.0
        self._scrapes += 1
        try:
            async with self._courtesy.answering(self._node.is_storing, left_s):
                return self._metrics(request)
        finally:
            self._scrapes -= 1

    def _metrics(self, request: Request) -> Answer:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Answer(content_type=content_type, body=encode(self._node.metrics.registry))

    def _login(self, request: Request) -> Answer:
        if request.is_head:  # whoever looks whether a link works must not use it up
            return Answer(content_type=HTML)
        session = secrets.token_urlsafe(32)
        with self._lock:
            is_known = self._sessions.redeem(request.query.get("token", ""), session, time.monotonic())
        if not is_known:
            return Answer(status=403, content_type=HTML, body=LOGIN_REFUSED.encode())
        cookie = f"{self._cookie}={session}; Path=/; Max-Age={SESSION_S:.0f}; HttpOnly; SameSite=Strict"
        secure = "; Secure" if self._section.has_tls else ""
        return Answer(content_type=HTML, body=LOGGED_IN.encode(), headers=(("Set-Cookie", cookie + secure),))

    async def _api_state(self, request: Request) -> Answer:
        if request.is_of_another_page:
            raise RefusedError(403, "only the page itself may ask")
        with self._lock:
            uid = self._sessions.uid(request.cookie(self._cookie), time.monotonic())
        if uid is None:
            return said(401, "log in: run `everstep web` on the node and open the address that it prints")
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 18):
            raise RefusedError(400, "after is a sequence number")
        document = await self._ask(self._state.document(uid, after=int(after)))
        return Answer(content_type=JSON, body=msgspec.json.encode(document))

    async def _ask(self, question: Coroutine[Any, Any, _T]) -> _T:
        """Return what the daemon's own event loop says; TimeoutError where it does not."""
        future = asyncio.run_coroutine_threadsafe(question, self._loop)
        return await asyncio.wait_for(asyncio.wrap_future(future), ASK_S)


async def _nothing() -> None:
    """What a loop that lives can always do."""


def _file(name: str, content_type: str) -> Answer:
    body = importlib.resources.files(__name__.rpartition(".")[0]).joinpath("static", name).read_bytes()
    return Answer(content_type=content_type, body=body)
