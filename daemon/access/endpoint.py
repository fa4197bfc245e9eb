"""Where and as whom a client of the control API calls, other than by a connection of the data socket.

Either over TCP with a certificate ($EVERSTEP_CONNECT), or on the Unix socket with a token from a file
($EVERSTEP_TOKEN_FILE), which `everstep token` has written.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from ...core.errors import ConfigError
from ...core.paths import control_socket_path
from ..nodes.address_format import parse_address
from .token_file import read_private

CONNECT, CERTIFICATE, KEY, AUTHORITY, SERVER_NAME = (
    "EVERSTEP_CONNECT",
    "EVERSTEP_TLS_CERTIFICATE",
    "EVERSTEP_TLS_KEY",
    "EVERSTEP_TLS_AUTHORITY",
    "EVERSTEP_TLS_SERVER_NAME",
)
TOKEN_FILE = "EVERSTEP_TOKEN_FILE"  # noqa: S105  a variable's name
TOKEN_BYTES_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One way to a daemon."""

    target: str
    """As gRPC has it."""
    label: str
    """For messages."""
    token: str = ""
    credentials: grpc.ChannelCredentials | None = None
    """None: not over TCP."""
    server_name: str = ""
    """Name that the daemon's certificate has, where it is not the host's."""

    def channel(self, options: list[tuple[str, int]]) -> grpc.Channel:
        """Return a channel, which connects when it is used."""
        if self.credentials is None:
            return grpc.insecure_channel(self.target, options=options)
        more: list[tuple[str, int | str]] = [*options]
        if self.server_name:
            more.append(("grpc.ssl_target_name_override", self.server_name))
        return grpc.secure_channel(self.target, self.credentials, options=more)


def endpoint_of_environment(data_socket: Path) -> Endpoint | None:
    """Return how the environment says that a daemon is called; None: as its user, by the data socket.

    Raises:
        ConfigError: something is missing, or cannot be read.
    """
    address = os.environ.get(CONNECT, "")
    if address:
        return _over_network(address)
    named = os.environ.get(TOKEN_FILE, "")
    if not named:
        return None
    path = control_socket_path(data_socket)
    return Endpoint(target=f"unix:{path}", label=str(path), token=read_token(Path(named)))


def _over_network(address: str) -> Endpoint:
    try:
        parse_address(address)
    except ValueError as error:
        raise ConfigError(f"{CONNECT}: {error}", hint='host and port, like "node1:7078"') from None
    missing = [name for name in (CERTIFICATE, KEY, AUTHORITY) if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{address} cannot be called without {', '.join(missing)}",
            hint="give --tls-cert, --tls-key and --tls-ca: over TCP a daemon knows its callers by certificates",
        )
    contents = {name: _read(name, Path(os.environ[name])) for name in (CERTIFICATE, KEY, AUTHORITY)}
    return Endpoint(
        target=address,
        label=address,
        credentials=grpc.ssl_channel_credentials(contents[AUTHORITY], contents[KEY], contents[CERTIFICATE]),
        server_name=os.environ.get(SERVER_NAME, ""),
    )


def read_token(path: Path) -> str:
    """Return the token of a file that nobody but this user and root may read.

    Raises:
        ConfigError: it is not such a file.
    """
    content = read_private(path, TOKEN_FILE, TOKEN_BYTES_MAX).strip()
    if not content.isalnum() or len(content) > TOKEN_BYTES_MAX:
        raise ConfigError(f"{path} holds no token", hint=f"everstep token --ttl 1h --file {path}")
    return content.decode("ascii")


def write_token(path: Path, token: str) -> None:
    """Put a token into a file that only this user can read; what stands at the path is replaced, never followed.

    Raises:
        ConfigError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                os.fchmod(fd, 0o600)
                file.write(f"{token}\n")
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="give --file another path"
        ) from error


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
