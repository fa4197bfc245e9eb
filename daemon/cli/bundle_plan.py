"""What a debug bundle holds and how large it may be; what is taken out of texts. Pure."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ITEM_BYTES_MAX = 4 * 1024 * 1024
TOTAL_BYTES_MAX = 32 * 1024 * 1024
SECRET_BYTES_MIN = 8
"""Shorter ones would take common words out of every text."""

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s\"']+@")
_BEARER = re.compile(r"(?i)(bearer\s+)[^\s\"',;]+")
_LONG_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{64,}(?![0-9A-Za-z])")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_NAMED = re.compile(
    r"(?i)([\w-]*(?:password|passwd|secret|token|api[_-]?key|credential|passphrase)[\w-]*[\"']?\s*[=:]\s*)"
    r"(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;&]+)"
)
_NAMES_NO_SECRET = re.compile(r"(?i)_(?:file|s|max|count|bytes)[\"']?\s*[=:]\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One file of the bundle."""

    name: str
    content: bytes
    took_s: float = 0.0
    cut_bytes: int = 0
    """So many bytes were left out at its beginning, or at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What could not be had."""

    name: str
    reason: str


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without passwords, tokens and private keys; `secrets`: known ones."""
    for secret in secrets:
        if len(secret) >= SECRET_BYTES_MIN:
            text = text.replace(secret, "***")
    text = _PRIVATE_KEY.sub("*** private key ***", text)
    text = _CREDENTIALS.sub("***@", text)
    text = _BEARER.sub(r"\1***", text)
    text = _NAMED.sub(_without_value, text)
    return _LONG_HEX.sub(lambda found: f"<{len(found[0])} hex digits>", text)


def _without_value(found: re.Match[str]) -> str:
    if _NAMES_NO_SECRET.search(found[1]):
        return found[0]
    quote = found[2][0] if found[2][0] in "\"'" else ""
    return f"{found[1]}{quote}***{quote}"


def cut(name: str, content: bytes, *, keep_end: bool, took_s: float = 0.0) -> Item:
    """Return a file that is not too large: a log keeps its end, anything else its beginning."""
    cut_bytes = max(0, len(content) - ITEM_BYTES_MAX)
    kept = content[cut_bytes:] if keep_end else content[: len(content) - cut_bytes]
    return Item(name=name, content=kept, took_s=took_s, cut_bytes=cut_bytes)


def fitting(items: Sequence[Item]) -> tuple[list[Item], list[Missing]]:
    """Return the items that fit into a bundle, in order, and those that do not."""
    kept: list[Item] = []
    missing: list[Missing] = []
    left_bytes = TOTAL_BYTES_MAX
    for item in items:
        if len(item.content) <= left_bytes:
            kept.append(item)
            left_bytes -= len(item.content)
        else:
            missing.append(
                Missing(name=item.name, reason=f"the bundle holds at most {TOTAL_BYTES_MAX} bytes")
            )
    return kept, missing
