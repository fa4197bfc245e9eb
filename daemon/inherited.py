"""Descriptors that a service manager started this process with: sd_listen_fds(3), without its library."""

import contextlib
import logging
import os
import socket

from ..core.errors import ConfigError
from .fd_store.inherited_plan import Inherited, names_of, sort_inherited

logger = logging.getLogger(__name__)

_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def take_inherited() -> Inherited:
    """Return what came with this process, and let no process that it starts have any of it. Again is nothing.

    To be called before anything else is opened.

    Raises:
        ConfigError: LISTEN_FDS is no number.
    """
    pid, count, names = (os.environ.pop(name, "") for name in _VARIABLES)
    if not count or pid != str(os.getpid()):
        return Inherited()
    try:
        found = sort_inherited(names_of(count, names))
    except ValueError as error:
        raise ConfigError(
            f"LISTEN_FDS={count!r}: {error}", hint="it is set by the service manager"
        ) from error
    for fd in (*found.sockets, *(fd for _, fd in found.unknown), *_of_arenas(found)):
        with contextlib.suppress(OSError):  # one that was announced and is not there is refused later
            os.set_inheritable(fd, False)
    return found


def listening_socket(inherited: Inherited) -> socket.socket | None:
    """Return the data socket that the service manager listens on; None where it has given none.

    Raises:
        ConfigError: what it has given is not one unix stream socket that listens, with a path.
    """
    if not inherited.sockets:
        return None
    fd = inherited.sockets.pop(0)
    hint = "the socket unit needs one ListenStream= with a path"
    if inherited.sockets:
        raise ConfigError("the service manager listens on more than one socket", hint=hint)
    try:
        sock = socket.socket(fileno=fd)
        listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        raise ConfigError(f"descriptor {fd} is no socket: {error.strerror}", hint=hint) from error
    address: object = sock.getsockname()
    is_unix_stream = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    if not (listens and is_unix_stream and isinstance(address, str) and address.startswith("/")):
        sock.close()
        raise ConfigError(f"descriptor {fd} does not listen on a unix stream socket with a path", hint=hint)
    return sock


def _of_arenas(inherited: Inherited) -> list[int]:
    pairs = inherited.arenas.values()
    return [fd for pair in pairs for fd in (pair.arena, pair.state) if fd is not None]
