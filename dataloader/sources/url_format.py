"""URLs without what nobody else may see: passwords, and the signatures and tokens of URLs that a store signed.

What is taken out is in no message, log or fingerprint: a URL signed anew names the same object.
"""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote, urlsplit, urlunsplit

_BEGINS = ("x-amz-", "x-goog-", "x-oss-", "x-cos-", "x-ms-")
_NAMES = frozenset(
    {
        "sig", "signature", "expires", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid", "key-pair-id", "policy",
        "token", "access_token", "auth", "key", "api_key", "apikey", "password", "secret",
    }
)  # fmt: skip
_OF_AZURE = frozenset(
    {"se", "st", "sp", "sv", "sr", "spr", "sip", "skoid", "sktid", "skt", "ske", "sks", "skv"}
)
"""Beside `sig` only: by themselves they may mean anything."""
_SECRET_OPTION = re.compile(r"secret|token|pass|key|sig|cred|sas|auth", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value than this is not looked for in other texts: it may be part of any word."""


def public_url(url: str) -> str:
    """Return a URL without password and without what signs it; other texts as they are."""
    if "@" not in url and "?" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    if not parts.scheme or not parts.netloc:
        return url
    user, at, host = parts.netloc.rpartition("@")
    pairs = [pair for pair in parts.query.split("&") if not _is_secret(pair, parts.query)]
    return urlunsplit(parts._replace(netloc=user.partition(":")[0] + at + host, query="&".join(pairs)))


def secrets_of(url: str, options: Mapping[str, object]) -> list[str]:
    """Return the texts in a URL, and in a file system's options, that no message may show; longest first."""
    found: set[str] = {
        value
        for name, value in options.items()
        if isinstance(value, str) and len(value) >= _SHORTEST and _SECRET_OPTION.search(name)
    }
    if public_url(url) != url:
        parts = urlsplit(url)
        values = [pair.partition("=")[2] for pair in parts.query.split("&") if _is_secret(pair, parts.query)]
        values.append(parts.netloc.rpartition("@")[0].partition(":")[2])
        for value in values:
            if len(value) >= _SHORTEST:
                found |= {value, unquote(value), quote(unquote(value), safe="", errors="surrogateescape")}
    return sorted(found, key=len, reverse=True)


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text with each of the secrets in it taken out."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return text


def _is_secret(pair: str, query: str) -> bool:
    name = unquote(pair.partition("=")[0]).lower()
    return name.startswith(_BEGINS) or name in _NAMES or (name in _OF_AZURE and "sig=" in query.lower())
