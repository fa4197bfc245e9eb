"""Questions to the metrics port of a running daemon."""

import http.client
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from everstep.daemon.control.client import ControlClient


@dataclass(frozen=True)
class Told:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Site:
    """The metrics port of a running daemon."""

    client: ControlClient
    port: int
    pid: int

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> Told:
        """Return what it answers."""
        made: Callable[[], http.client.HTTPConnection] = (
            (lambda: http.client.HTTPConnection("127.0.0.1", self.port, timeout=20))
            if context is None
            else (lambda: http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context))
        )
        connection = made()
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return Told(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def log_in(self, context: ssl.SSLContext | None = None) -> dict[str, str]:
        """Return the headers of somebody who has opened `everstep web`'s address."""
        url, _ = self.client.open_web_session()
        parts = urlsplit(url)
        told = self.ask(f"{parts.path}?{parts.query}", context=context)
        assert told.status == 200
        return {"Cookie": told.headers["Set-Cookie"].partition(";")[0]}
