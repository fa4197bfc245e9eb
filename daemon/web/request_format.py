"""A request as this server takes it: GET or HEAD of a path, asked of a host that is this one. Pure."""

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote_to_bytes

QUERY_FIELDS_MAX = 8
METHODS = (b"GET", b"HEAD")
_ONCE = ("host", "authorization", "cookie", "accept", "accept-encoding", "sec-fetch-site")


class RefusedError(Exception):
    """A request that is not answered: `status`, and a sentence for whoever sent it."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status, self.said = status, said


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; `headers` by lower-case name, each at most once."""

    is_head: bool
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    def cookie(self, called: str) -> str:
        """Return the cookie of that name; empty without one, or with more than one."""
        parts = [part.strip().partition("=") for part in self.headers.get("cookie", "").split(";")]
        found = [value for name, _, value in parts if name == called]
        return found[0] if len(found) == 1 else ""

    @property
    def is_of_another_page(self) -> bool:
        """Tell whether a browser says that a page of another origin asks, also one of this host on another port."""
        return self.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")

    @property
    def bearer(self) -> str:
        """The token of `Authorization: Bearer`; empty without one."""
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    @property
    def takes_gzip(self) -> bool:
        """Tell whether the answer may be compressed."""
        offers = [part.strip().lower() for part in self.headers.get("accept-encoding", "").split(",")]
        return any(offer == "gzip" or (offer.startswith("gzip;") and "q=0" not in offer) for offer in offers)


def request(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Request:
    """Return what was asked; `headers` have lower-case names, as h11 gives them.

    Raises:
        RefusedError: another method, something that is not a path, a header twice.
    """
    if method not in METHODS:
        raise RefusedError(405, "only GET and HEAD: nothing can be changed here")
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        raise RefusedError(400, "a path begins with a slash")
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("latin-1")
        if key in _ONCE:
            if key in found:
                raise RefusedError(400, f"the header {key} stands there twice")
            found[key] = value.decode("latin-1")
        elif key in ("content-length", "transfer-encoding") and value.strip() != b"0":
            raise RefusedError(400, "a request has no body here")
    try:
        fields = parse_qsl(query.decode("latin-1"), max_num_fields=QUERY_FIELDS_MAX)
    except ValueError as error:
        raise RefusedError(400, "too many fields in the query") from error
    return Request(
        is_head=method == b"HEAD",
        path=unquote_to_bytes(path).decode("latin-1"),
        query=dict(fields),
        headers=found,
    )


def check_host(asked: Request, names: Collection[str]) -> None:
    """Let a request through whose Host is an IP address, `localhost` or below it, or one of `names`.

    A page of somebody else whose name was pointed here (DNS rebinding) would send a name of its own. The port is
    whatever a tunnel made of it.

    Raises:
        RefusedError: it names another host, or none.
    """
    host = host_of(asked.headers.get("host", ""))
    if host == "localhost" or host.endswith(".localhost") or host in names or _is_address(host):
        return
    raise RefusedError(
        421, "this server has another name: use 127.0.0.1 or localhost, or add it to metrics.names"
    )


def host_of(text: str) -> str:
    """Return the host of a Host header in lower case, without port and brackets."""
    text = text.strip().lower()
    if text.startswith("["):
        host, end, port = text[1:].partition("]")
        return host if end and (not port or (port.startswith(":") and port[1:].isdigit())) else ""
    host, colon, port = text.rpartition(":")
    return (host if colon and port.isdigit() else text).rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
