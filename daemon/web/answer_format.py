"""Answers, and the headers that go with each of them. Pure."""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do with the page: its own script, style and questions; nothing of anybody else, nothing inline."""

SECURITY: tuple[tuple[str, str], ...] = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
COMPRESSED_FROM_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent back."""

    status: int = 200
    content_type: str = TEXT
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()

    def compressed(self) -> "Answer":
        """Return it with a body that is shorter on the way, where that is worth it."""
        if len(self.body) < COMPRESSED_FROM_BYTES or any(
            name == "Content-Encoding" for name, _ in self.headers
        ):
            return self
        body = gzip.compress(self.body, compresslevel=1, mtime=0)
        return replace(self, body=body, headers=(*self.headers, ("Content-Encoding", "gzip")))

    def all_headers(self) -> Sequence[tuple[str, str]]:
        """Return every header of the answer; the connection ends after it."""
        return (
            ("Content-Type", self.content_type),
            ("Content-Length", str(len(self.body))),
            ("Connection", "close"),
            *SECURITY,
            *self.headers,
        )


def said(status: int, text: str, *headers: tuple[str, str]) -> Answer:
    """Return an answer of one line of text."""
    return Answer(status=status, body=f"{text}\n".encode(), headers=headers)


LOGGED_IN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="refresh" content="0;url=/"><title>everstep</title>
<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/style.css"></head>
<body><main class="alone"><h1>everstep</h1><p>You are logged in: <a href="/">go on</a>.</p></main></body></html>
"""
"""A page, and no redirection: a browser that came from another site's link would keep the cookie back from that."""

LOGIN_REFUSED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>everstep: log in again</title><link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/style.css"></head>
<body><main class="alone"><h1>This link does not work any more</h1>
<p>It was used already, it is older than five minutes, or the daemon has been started again.</p>
<p>On the node, run <code>everstep web</code> and open the address that it prints.</p></main></body></html>
"""
