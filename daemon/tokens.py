"""Tokens of the control API: random, bound to a uid, gone when the connection that got them ends."""

import hmac
import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHolder:
    """For whom a token speaks."""

    uid: int


class TokenBook:
    """All valid tokens. Owned by the event loop."""

    def __init__(self) -> None:
        self._holders: dict[str, TokenHolder] = {}

    def issue(self, uid: int) -> str:
        """Return a fresh 256-bit token for `uid`."""
        token = secrets.token_hex(32)
        self._holders[token] = TokenHolder(uid=uid)
        return token

    def revoke(self, token: str) -> None:
        """Forget a token; unknown ones are ignored."""
        self._holders.pop(token, None)

    def holder(self, token: str) -> TokenHolder | None:
        """Return for whom `token` speaks, or None; compared in constant time."""
        found: TokenHolder | None = None
        for known, holder in self._holders.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                found = holder
        return found
