"""`[health_check]` of the configuration: whether job launchers are answered, and what refuses a job."""

import os

import msgspec

from ...core.errors import ConfigError
from .verdict_plan import Ailment

SOCKET_PATH_BYTES_MAX = 107
_AILMENTS = tuple(each.value for each in Ailment)
_REFUSED = tuple(each.value for each in Ailment if each is not Ailment.SLOW)


class HealthCheckSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Without `socket` nobody is answered."""

    socket: str = ""
    """Where job launchers ask: `/run/nvhcd/nvhcd.sock`, in a directory that only this user or root writes to."""
    socket_mode: int = 0o666
    """Who may ask. A launcher that may not takes the node for well, and all it learns is devices and how they are."""
    refuse: list[str] = msgspec.field(default_factory=lambda: list(_REFUSED))
    """Which ailments of a device refuse a job: missing, suspect, hanging, full, slow."""

    @property
    def ailments(self) -> frozenset[Ailment]:
        """Return what refuses a job."""
        return frozenset(map(Ailment, self.refuse))

    def check(self) -> None:
        """Raise ConfigError for values that make no sense."""
        if self.socket and not self.socket.startswith("/"):
            raise ConfigError(f"health_check.socket is {self.socket!r}", hint="name an absolute path")
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"health_check.socket {self.socket} is longer than {SOCKET_PATH_BYTES_MAX} bytes",
                hint="choose a shorter path",
            )
        if not 0 <= self.socket_mode <= 0o777:
            raise ConfigError(
                f"health_check.socket_mode is {self.socket_mode:#o}", hint="0o600, 0o660 or 0o666"
            )
        unknown = [each for each in self.refuse if each not in _AILMENTS]
        if unknown:
            raise ConfigError(
                f"health_check.refuse names {unknown[0]!r}", hint=f"any of {', '.join(_AILMENTS)}"
            )
