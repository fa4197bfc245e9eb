"""`[metrics]` of the configuration: where the metrics port listens, and what it asks of callers beyond the node."""

import ipaddress

import msgspec

from ...core.errors import ConfigError


class MetricsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[metrics]`: Prometheus, probes and the web page over HTTP; on loopback unless told otherwise."""

    enabled: bool = True
    port: int = 0
    """0: an ephemeral port, shown by `everstep status`."""
    address: str = "127.0.0.1"
    """An IP address to listen on. One beyond loopback needs `authority_file` or `token_file`."""
    names: list[str] = msgspec.field(default_factory=list[str])
    """Names under which browsers and Prometheus reach it, besides loopback's and `address`."""
    certificate_file: str = ""
    key_file: str = ""
    """TLS 1.3; read again when the files change."""
    authority_file: str = ""
    """Whose client certificates may scrape (mTLS)."""
    token_file: str = ""
    """Who sends `Authorization: Bearer` with its content may scrape."""

    @property
    def is_loopback(self) -> bool:
        """Tell whether only processes of this node reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def has_tls(self) -> bool:
        """Tell whether it speaks TLS."""
        return bool(self.certificate_file)

    def check(self) -> None:
        """Raise ConfigError for values that make no sense, or would let anybody in from outside."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"metrics.port is {self.port}", hint="0 to 65535; 0 takes any free port")
        try:
            is_loopback = self.is_loopback
        except ValueError as error:
            raise ConfigError(
                f"metrics.address is {self.address!r}", hint="an IP address, such as 127.0.0.1 or 0.0.0.0"
            ) from error
        if bool(self.certificate_file) != bool(self.key_file):
            raise ConfigError("metrics.certificate_file and metrics.key_file need each other")
        if self.authority_file and not self.has_tls:
            raise ConfigError(
                "metrics.authority_file needs TLS", hint="give metrics.certificate_file and metrics.key_file"
            )
        if not is_loopback and not (self.authority_file or self.token_file):
            raise ConfigError(
                f"metrics.address {self.address} is not loopback, and nothing says who may scrape",
                hint="give metrics.authority_file (mTLS) or metrics.token_file, or listen on 127.0.0.1",
            )
