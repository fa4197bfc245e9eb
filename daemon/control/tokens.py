"""Tokens of the control API: random, bound to a uid, kept hashed, in memory only.

Those of a connection of the data socket go when its pidfd fires or it closes; those for other tools when their time is
over or somebody revokes them, and all of them with the daemon.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...core.errors import NotFoundError, QuotaError, UsageError
from ..access.roles_plan import Caller, Proof, Role, local_role

TTL_S_MIN, TTL_S_MAX = 1.0, 30 * 86400.0
NAME_CHARS_MAX = 100
TIMED_TOKENS_MAX = 64
"""Of one user; more are forgotten somewhere, and each can be revoked."""


def _now_s() -> float:
    """Return seconds by a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedToken:
    """A token for other tools, as its maker sees it; the token itself is shown once, to whom it is given."""

    token_id: str
    """8 hex digits; no secret."""
    name: str
    caller: Caller
    expires_s: float
    """By the book's clock."""
    left_s: float
    """From now on; for the view that it was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    caller: Caller
    timed: TimedToken | None = None


class TokenBook:
    """All valid tokens, by their SHA-256. Owned by the event loop."""

    def __init__(self, now_s: Callable[[], float] = _now_s) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._now_s = now_s

    def issue(self, uid: int) -> str:
        """Return a fresh 256-bit token for a connection of `uid`, whose end must revoke it."""
        caller = Caller(uid=uid, role=local_role(uid, os.getuid()), proof=Proof.CONNECTION, name=f"uid {uid}")
        return self._add(_Entry(caller=caller))

    def issue_timed(
        self, maker: Caller, *, ttl_s: float, is_read_only: bool, name: str = ""
    ) -> tuple[str, TimedToken]:
        """Return a token for another tool, which may do what its maker may, or only look, until its time is over.

        Raises:
            UsageError: the maker came with such a token itself or with a certificate, or a value is not possible.
            QuotaError: the user has as many as it may.
        """
        if maker.proof is not Proof.CONNECTION:
            raise UsageError(
                f"a caller known by its {maker.proof.value} makes no tokens",
                hint="ask on the node, as the user that it shall speak for: `everstep token --ttl 1h --file FILE`",
            )
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise UsageError(
                f"a token lives {TTL_S_MIN:.0f} s to {TTL_S_MAX / 86400:.0f} days, not {ttl_s:g} s",
                hint="--ttl 1h",
            )
        if len(name) > NAME_CHARS_MAX or not (name.isprintable() or not name):
            raise UsageError(f"a token's name is up to {NAME_CHARS_MAX} printable characters")
        now_s = self._now_s()
        if len(self.timed(maker.uid)) >= TIMED_TOKENS_MAX:
            raise QuotaError(
                f"uid {maker.uid} has {TIMED_TOKENS_MAX} tokens",
                hint="`everstep token list`, then revoke some",
            )
        role = Role.VIEWER if is_read_only else maker.role
        timed = TimedToken(
            token_id=secrets.token_hex(4),
            name=name,
            caller=Caller(uid=maker.uid, role=role, proof=Proof.TOKEN, name=maker.name),
            expires_s=now_s + ttl_s,
            left_s=ttl_s,
        )
        return self._add(_Entry(caller=timed.caller, timed=timed)), timed

    def revoke(self, token: str) -> None:
        """Forget a token; unknown ones are ignored."""
        self._entries.pop(_digest(token), None)

    def revoke_timed(self, token_id: str, uid: int | None) -> None:
        """Forget a token by its id.

        Raises:
            NotFoundError: this user (None: nobody) has none of that id.
        """
        for digest, entry in self._entries.items():
            if (
                entry.timed is not None
                and entry.timed.token_id == token_id
                and uid in (None, entry.caller.uid)
            ):
                del self._entries[digest]
                return
        raise NotFoundError(f"no token {token_id!r}", hint="`everstep token list` lists those that are valid")

    def timed(self, uid: int | None) -> list[TimedToken]:
        """Return the valid tokens for other tools of this user (None: of all), the one that ends first first."""
        now_s = self._now_s()
        self._forget_ended(now_s)
        found = [each.timed for each in self._entries.values() if each.timed is not None]
        return [
            TimedToken(
                token_id=each.token_id,
                name=each.name,
                caller=each.caller,
                expires_s=each.expires_s,
                left_s=each.expires_s - now_s,
            )
            for each in sorted(found, key=lambda each: each.expires_s)
            if uid in (None, each.caller.uid)
        ]

    def holder(self, token: str) -> Caller | None:
        """Return for whom `token` speaks, or None.

        Found by its SHA-256: how long that takes says something of hashes, from which no token can be made.
        """
        digest = _digest(token)
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if entry.timed is not None and entry.timed.expires_s <= self._now_s():
            del self._entries[digest]
            return None
        return entry.caller

    def _add(self, entry: _Entry) -> str:
        token = secrets.token_hex(32)
        self._entries[_digest(token)] = entry
        return token

    def _forget_ended(self, now_s: float) -> None:
        for digest, entry in list(self._entries.items()):
            if entry.timed is not None and entry.timed.expires_s <= now_s:
                del self._entries[digest]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
