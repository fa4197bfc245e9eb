"""`[cache]` of the configuration: whether and how caches are shared with other nodes."""

import msgspec

from ...core.errors import ConfigError
from ...proto.peer_frames import MEMBERS_MAX
from .address_format import parse_address


class CacheSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Without `listen` a node keeps its caches for itself."""

    listen: str = ""
    """Host and port where other nodes' daemons are served: `0.0.0.0:7077`."""
    address: str = ""
    """Host and port under which the others know this node; empty: found out."""
    members: list[str] = msgspec.field(default_factory=list[str])
    """Host and port of every node, this one among them; the same list everywhere."""
    dns: str = ""
    """Instead: a name with an address for every node (a headless service), and the port: `cache.jobs.svc:7077`."""
    resolve_s: float = 10.0
    """How often the name is looked up."""
    deadline_s: float = 1.0
    """How long a peer may take to answer a reader."""
    token_file: str = ""
    """A secret that all members share; readable by nobody else."""
    certificate_file: str = ""
    key_file: str = ""
    authority_file: str = ""
    """TLS with certificates on both sides, all signed by this authority. PEM."""
    tls_name: str = ""
    """The name that every member's certificate has; empty: each has its own host's."""

    @property
    def has_tls(self) -> bool:
        """Tell whether connections are encrypted and members proved by certificates."""
        return bool(self.certificate_file)

    def check(self) -> None:
        """Raise ConfigError for values that make no sense together."""
        parts = (self.certificate_file, self.key_file, self.authority_file)
        if any(parts) and not all(parts):
            raise ConfigError(
                "cache: TLS needs certificate_file, key_file and authority_file",
                hint="give all three, or none",
            )
        if not self.listen:
            self._check_alone()
            return
        for key, text in (("listen", self.listen), ("address", self.address), ("dns", self.dns)):
            _check_address(f"cache.{key}", text)
        for each in self.members:
            _check_address("cache.members", each)
        if len(self.members) > MEMBERS_MAX:
            raise ConfigError(f"cache.members has {len(self.members)} entries", hint=f"at most {MEMBERS_MAX}")
        if self.members and self.dns:
            raise ConfigError("cache.members and cache.dns are both given", hint="give one of them")
        if not (self.token_file or self.has_tls):
            raise ConfigError(
                f"cache.listen is {self.listen!r}, and anybody who reaches it could read every user's samples",
                hint="give cache.token_file, or certificate_file, key_file and authority_file",
            )
        for key, seconds, most_s in (
            ("resolve_s", self.resolve_s, 3600),
            ("deadline_s", self.deadline_s, 60),
        ):
            if not 0.01 <= seconds <= most_s:
                raise ConfigError(f"cache.{key} is {seconds}", hint=f"0.01 to {most_s} seconds")

    def _check_alone(self) -> None:
        if self.members or self.dns:
            raise ConfigError(
                "cache.members or cache.dns is given without cache.listen",
                hint='say where this node serves the others: listen = "0.0.0.0:7077"',
            )


def _check_address(key: str, text: str) -> None:
    if text:
        try:
            parse_address(text)
        except ValueError as error:
            raise ConfigError(
                f"{key}: {error}", hint='host and port, like "node1:7077" or "[fd00::1]:7077"'
            ) from None
