"""Telling the service manager how the daemon is doing: sd_notify(3), without its library."""

import logging
import os
import socket

logger = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send `READY=1` or the like to $NOTIFY_SOCKET; without one there is nobody to tell."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("service_manager_unreachable address=%r reason=%s", address, error)
