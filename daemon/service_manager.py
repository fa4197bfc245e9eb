"""Telling the service manager how the daemon is doing: sd_notify(3), without its library."""

import logging
import os
import socket
from collections.abc import Sequence

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a descriptor waits for a service manager that reads slowly: its queue holds some hundred messages."""


def notify(state: str, *, fds: Sequence[int] = (), patient: bool = False) -> bool:
    """Send `READY=1` or the like to $NOTIFY_SOCKET, and tell whether it was; without one there is nobody to tell.

    `fds` go with it. `patient`: wait for room, so that it is a call for a thread.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(PATIENCE_S if patient else 0)
            sock.connect(address)  # Python's send_fds takes an address and does not use it
            socket.send_fds(sock, [state.encode()], fds)
    except OSError as error:
        logger.warning("service_manager_unreachable address=%r reason=%s", address, error)
        return False
    return True
