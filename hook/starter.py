"""Finds the user's daemon, or starts a private one."""

from collections.abc import Callable

from ..core.errors import DaemonUnavailableError
from ..core.paths import data_socket_path
from ..proto.frames import Reply, Role
from ..proto.starting import start_and_connect
from .client import DaemonClient


def connect_or_start(version: str, on_event: Callable[[Reply], None], *, node_only: str = "") -> DaemonClient:
    """Return a connection to the daemon that answers on the user's socket, started now if none does.

    Args:
        version: this package's.
        on_event: gets the frames that answer no request.
        node_only: why none is to be started: it would not know the devices, and stand in the way of the node's.

    Raises:
        DaemonUnavailableError: it could not be started; the message holds the end of its log.
    """
    path = data_socket_path()
    try:
        return DaemonClient(path, Role.TRAINER, version, on_event)
    except DaemonUnavailableError as error:
        if node_only:
            raise DaemonUnavailableError(
                f"{error.message}, and {node_only}",
                hint="start the node's: everstep daemon --config FILE",
            ) from error
    return start_and_connect(path, lambda: DaemonClient(path, Role.TRAINER, version, on_event))
