"""How daemons prove to each other that they belong together: certificates on both sides, a token, or both."""

import hmac
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio

from ...core.errors import ConfigError
from ..access.token_file import read_shared_token
from .section import CacheSection

AUTHORIZATION_KEY = "authorization"
CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_metadata_size", 8192),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class Credentials:
    """What this node shows to the others, and what it asks of them."""

    def __init__(self, section: CacheSection) -> None:
        """Read the files that are named.

        Raises:
            ConfigError: one cannot be read, or the token is short or readable by others.
        """
        self.tls_name = section.tls_name
        self._token = (
            read_shared_token(Path(section.token_file), "cache.token_file") if section.token_file else ""
        )
        self._pem: tuple[bytes, bytes, bytes] | None = None
        if section.has_tls:
            self._pem = (
                _read("cache.key_file", section.key_file),
                _read("cache.certificate_file", section.certificate_file),
                _read("cache.authority_file", section.authority_file),
            )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return ((AUTHORIZATION_KEY, f"Bearer {self._token}"),) if self._token else ()

    def token_holds(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Tell whether a call brings the token, if there has to be one; compared in constant time."""
        if not self._token:
            return True
        wanted = f"Bearer {self._token}".encode()
        found = [value for key, value in metadata if key == AUTHORIZATION_KEY]
        given = found[0] if len(found) == 1 else b""
        return hmac.compare_digest(wanted, given.encode() if isinstance(given, str) else given)

    def name_holds(self, names: Sequence[bytes]) -> bool:
        """Tell whether a caller's certificate has the members' name, if there is one."""
        return not (self._pem and self.tls_name) or self.tls_name.encode() in names

    def channel(self, address: str, size_bytes_max: int) -> grpc.aio.Channel:
        """Return a channel to a member; it connects when it is used."""
        options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", size_bytes_max)]
        if self._pem is None:
            return grpc.aio.insecure_channel(address, options=options)
        key, certificate, authority = self._pem
        if self.tls_name:
            options.append(("grpc.ssl_target_name_override", self.tls_name))
        credentials = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen, and return the port.

        Raises:
            ConfigError: nobody can listen there.
        """
        try:
            if self._pem is None:
                return server.add_insecure_port(address)
            key, certificate, authority = self._pem
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], root_certificates=authority, require_client_auth=True
            )
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cache.listen: cannot listen on {address}: {error}", hint="is the port taken?"
            ) from error


def _read(key: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {name}: {error.strerror or error}") from error
