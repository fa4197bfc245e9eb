"""Whom a daemon serves: its own user, and on a node those that `daemon.users` names (ADR 0077)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import ConfigError, UsageError
from .section import uid_of

EVERYBODY = "*"
ROOT_UID = 0
SHARED_SOCKET_MODE = 0o666
"""Of the sockets where several users are served: the kernel says who comes, the directory's mode who can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedUsers:
    """Whose runs are saved. What they save belongs to the daemon's user, who alone may read its files."""

    own_uid: int
    others: frozenset[int] = frozenset()
    is_open: bool = False
    """Whoever reaches the socket is served."""

    @classmethod
    def of(cls, users: Sequence[str]) -> "ServedUsers":
        """Return whom this process serves where the configuration names these; ConfigError for somebody unknown."""
        return cls(own_uid=os.getuid(), others=uids_of(users), is_open=EVERYBODY in users)

    @property
    def are_several(self) -> bool:
        """Tell whether others than the daemon's user are served: then its sockets are open to them."""
        return self.is_open or bool(self.others - {self.own_uid})

    def has(self, uid: int) -> bool:
        """Tell whether this user's runs are saved."""
        return self.is_open or uid == self.own_uid or uid in self.others

    def check_run(self, uid: int) -> None:
        """Raise UsageError unless this user's runs are saved."""
        if not self.has(uid):
            raise UsageError(
                f"this daemon saves no runs of uid {uid}: its own user is uid {self.own_uid}, and daemon.users does not"
                f" name {uid}",
                hint=f'daemon.users = ["{uid}"] in its configuration lets them in; or let the hook start a private'
                " daemon: unset EVERSTEP_SOCKET",
            )

    def check_hello(self, uid: int) -> None:
        """Raise UsageError for somebody who is not named, where the sockets are open to those who are.

        Otherwise whoever opened them has said who comes, for caches and groups. Root may always ask.
        """
        if self.are_several and uid != ROOT_UID:
            self.check_run(uid)


def uids_of(users: Sequence[str]) -> frozenset[int]:
    """Return the uids of names and numbers; ConfigError for somebody whom this machine does not know."""
    try:
        return frozenset(uid_of(user) for user in users if user != EVERYBODY)
    except ConfigError as error:
        raise ConfigError(f"daemon.users: {error.message}", hint=error.hint) from error
