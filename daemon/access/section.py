"""`[control]` and `[quota]` of the configuration: who may call over the network, and how much each user may take."""

import pwd

import msgspec

from ...core.errors import ConfigError
from ..nodes.address_format import parse_address
from .roles_plan import Role

UNBOUNDED = 1 << 60
"""Bytes; the bounds of `[memory]` and of the devices hold all the same."""


class ClientRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the holder of one certificate may do."""

    role: str
    """viewer, operator or admin."""
    user: str = "*"
    """Whose runs it sees, by name or uid; `*`: everybody's."""

    def rights(self) -> tuple[Role, int]:
        """Return the role, and the uid whose runs it sees (0: everybody's); ConfigError for what cannot be."""
        roles = {each.word: each for each in Role}
        if self.role not in roles:
            raise ConfigError(f"role is {self.role!r}", hint=f"one of {', '.join(roles)}")
        if self.user == "*":
            return roles[self.role], 0
        if roles[self.role] is Role.ADMIN:
            raise ConfigError(
                f"role admin is given for user {self.user!r} only",
                hint='devices and the daemon concern everybody: leave user out, or take role = "operator"',
            )
        uid = uid_of(self.user)
        if uid == 0:
            raise ConfigError("user is root, who sees everybody's runs", hint='say so: user = "*"')
        return roles[self.role], uid


class ControlSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Without `listen` the control API answers on its Unix socket only."""

    listen: str = ""
    """Host and port where it answers, too: `0.0.0.0:7078`. Only with TLS and certificates on both sides."""
    certificate_file: str = ""
    key_file: str = ""
    authority_file: str = ""
    """PEM; clients' certificates must be signed by this authority. Files that change are read again."""
    clients: dict[str, ClientRule] = msgspec.field(default_factory=dict[str, ClientRule])
    """Who may call, by a name in their certificate (subject alternative name, else common name)."""

    def check(self) -> None:
        """Raise ConfigError for values that make no sense together."""
        parts = {
            "certificate_file": self.certificate_file,
            "key_file": self.key_file,
            "authority_file": self.authority_file,
        }
        for name, rule in self.clients.items():
            try:
                rule.rights()
            except ConfigError as error:
                raise ConfigError(f"control.clients.{name!r}: {error.message}", hint=error.hint) from error
        if not self.listen:
            if any(parts.values()) or self.clients:
                raise ConfigError(
                    "control has certificates or clients, and no listen",
                    hint='say where the control API answers: listen = "0.0.0.0:7078"',
                )
            return
        try:
            parse_address(self.listen)
        except ValueError as error:
            raise ConfigError(
                f"control.listen: {error}", hint='host and port, like "0.0.0.0:7078" or "[::]:7078"'
            ) from None
        missing = [f"control.{key}" for key, value in parts.items() if not value]
        if missing:
            raise ConfigError(
                f"control.listen is {self.listen!r} without {', '.join(missing)}: whoever reaches it could"
                " pretend to be anybody",
                hint="give all three files (mutual TLS), or leave listen out: the Unix socket needs none",
            )
        if not self.clients:
            raise ConfigError(
                f"control.listen is {self.listen!r}, and control.clients names nobody who may call",
                hint='[control.clients]\n"grafana.example.org" = {role = "viewer"}',
            )


class QuotaSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of this daemon one user may take, each bound for itself."""

    memory_bytes: int = UNBOUNDED
    """Of arenas, caches and shared batches together."""
    disk_bytes: int = UNBOUNDED
    """Of committed checkpoints, on all stores together."""
    slots: int = 4096
    connections: int = 2048
    """Of the data socket, at the same time."""
    descriptors: int = 0
    """That the daemon holds for connections and arenas; 0: half of what it may open."""
    calls: int = 48
    """Of the control API, at the same time."""
    calls_per_s: float = 2000.0
    """Of the control API; twice as many may come at once after a rest."""
    frames_per_s: float = 4000.0
    """Of the data socket; who sends more is read more slowly, after a burst of twice as many."""
    connects_per_s: float = 500.0
    """Of the data socket; who comes more often is heard later, after a burst of twice as many."""

    def check(self) -> None:
        """Raise ConfigError for a bound with which nobody could do anything."""
        for field in msgspec.structs.fields(QuotaSection):
            value = getattr(self, field.name)
            least = 0 if field.name == "descriptors" else 1
            if not value >= least:  # also refuses what TOML calls nan
                raise ConfigError(f"quota.{field.name} is {value}", hint=f"{least} or more")


def uid_of(user: str) -> int:
    """Return the uid of a user's name or number; ConfigError for nobody."""
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise ConfigError(f"user {user!r} is not known here", hint="name one, or give a uid") from None
