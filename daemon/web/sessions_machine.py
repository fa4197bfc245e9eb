"""Who may look at the page: one-time logins, and the sessions that they become. Pure: the caller brings the clock."""

import hashlib
from dataclasses import dataclass

LOGIN_S = 300.0
"""From `everstep web` to the browser: minutes, for whoever copies the address to another machine."""
SESSION_S = 12 * 3600.0
"""A working day; then `everstep web` again."""
LOGINS_PER_USER_MAX = 8
SESSIONS_PER_USER_MAX = 16
"""The oldest one of the same user makes way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """For whom a secret speaks, and until when."""

    uid: int
    until_s: float


class Sessions:
    """Logins and sessions by the SHA-256 of their secrets: whoever reads this memory cannot use them.

    A lookup by digest tells nothing of the secrets in its time.
    """

    def __init__(self) -> None:
        self._logins: dict[bytes, Holder] = {}
        self._sessions: dict[bytes, Holder] = {}

    def issue(self, uid: int, login: str, now_s: float) -> float:
        """Let whoever shows `login`, once, become a session of `uid`; return until when."""
        return _add(self._logins, uid, login, now_s + LOGIN_S, LOGINS_PER_USER_MAX)

    def redeem(self, login: str, session: str, now_s: float) -> bool:
        """Turn a login into `session`; False for one that is unknown, used or too old. Used up in any case."""
        holder = self._logins.pop(_digest(login), None)
        if holder is None or holder.until_s <= now_s:
            return False
        _add(self._sessions, holder.uid, session, now_s + SESSION_S, SESSIONS_PER_USER_MAX)
        return True

    def uid(self, session: str, now_s: float) -> int | None:
        """Return whose session it is; None: nobody's, or over."""
        holder = self._sessions.get(_digest(session))
        return None if holder is None or holder.until_s <= now_s else holder.uid

    def forget_old(self, now_s: float) -> None:
        """Forget what nobody can use any more."""
        for book in (self._logins, self._sessions):
            for key in [key for key, holder in book.items() if holder.until_s <= now_s]:
                del book[key]


def _add(book: dict[bytes, Holder], uid: int, secret: str, until_s: float, count_max: int) -> float:
    mine = [key for key, holder in book.items() if holder.uid == uid]  # oldest first, as dicts are
    for key in mine[: max(0, len(mine) - count_max + 1)]:
        del book[key]
    book[_digest(secret)] = Holder(uid=uid, until_s=until_s)
    return until_s


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
