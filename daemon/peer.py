"""Who is at the other end of a unix socket: identity by the kernel, life by a pidfd.

Peers are keyed by pidfd and uid, never by pid: a pid is 0 across pid namespaces and is used again after a death.
"""

import os
import select
import socket
import struct
from dataclasses import dataclass

from ..core.errors import DaemonUnavailableError

_SO_PEERPIDFD = 77
"""Linux 6.5; Python 3.11 has no name for it."""

_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A connected process. The owner closes `pidfd`."""

    uid: int
    pid: int
    """For messages to people only."""
    pidfd: int

    @property
    def lives(self) -> bool:
        """Tell whether the process lives."""
        poll = select.poll()  # select() itself knows no descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


def identify(sock: socket.socket) -> Peer:
    """Return the peer of a connected unix socket.

    Raises:
        DaemonUnavailableError: it has died already.
    """
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = _open_pidfd(pid)
    os.set_inheritable(pidfd, False)
    return Peer(uid=uid, pid=pid, pidfd=pidfd)


def _open_pidfd(pid: int) -> int:
    """Before Linux 6.5: there is a moment in which the pid may have been used again, which only its own uid can do."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise DaemonUnavailableError(f"the peer (pid {pid}) cannot be watched: {error}") from error
