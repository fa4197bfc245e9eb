"""Bounds the connections of each user to sockets that gRPC listens on.

gRPC does not say whose a connection is, and has one bound for all. But its connections are descriptors of this process,
and the kernel knows who made each (SO_PEERCRED): every two seconds they are looked at, and what is too many is shut
down, which gRPC takes for the other end leaving. While somebody comes again and again, it is looked more often.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from .connection_plan import CONNECTIONS_PER_USER_MAX, too_many

if TYPE_CHECKING:
    from ..node import Node

logger = logging.getLogger(__name__)

LOOK_S, LOOK_AGAIN_S = 2.0, 0.05
REST = 9
"""Looking takes a tenth of the time at most."""
_CREDENTIALS = struct.Struct("3i")  # ucred of unix(7): pid, uid, gid
_DESCRIPTORS = "/proc/self/fd"


class ConnectionBound:
    """Looks from `start` to `stop`. Owned by the event loop."""

    def __init__(self, node: "Node", paths: Collection[str]) -> None:
        """`paths` are those of the sockets, as they were bound. Root and the daemon's own user are not bounded."""
        self._node, self._paths = node, frozenset(paths)
        self._connections: dict[int, int] = {}
        """Uids by inode, the oldest first."""
        self._others: set[int] = set()
        """Inodes of this process's other sockets."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self._look()

    def stop(self) -> None:
        """Look no more; again is nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        began_s, ended = time.monotonic(), False
        try:
            ended = self._end_too_many(_sockets())
        except OSError as error:  # no descriptor is left to look with
            logger.error("connections_not_seen reason=%s", error)
        rest_s = max(LOOK_AGAIN_S if ended else LOOK_S, REST * (time.monotonic() - began_s))
        self._timer = asyncio.get_running_loop().call_later(rest_s, self._look)

    def _end_too_many(self, descriptors: dict[int, int]) -> bool:
        """Return whether there were any; `descriptors` of this process's sockets are by inode."""
        for inode in self._connections.keys() - descriptors.keys():
            del self._connections[inode]
        self._others &= descriptors.keys()
        for inode in sorted(descriptors.keys() - self._connections.keys() - self._others):
            self._judge(descriptors[inode], inode)
        ending = too_many(self._connections, (0, os.getuid()))
        for inode in ending:
            self._end(descriptors[inode], inode)
        for uid in set(ending.values()):
            self._node.refusals.add(
                "control_refused", f"uid {uid}", "connections",
                f"message=it has more than {CONNECTIONS_PER_USER_MAX} connections: the newest end",
            )  # fmt: skip
        return bool(ending)

    def _judge(self, descriptor: int, inode: int) -> None:
        """Find out whose connection it is, if it is one that is bounded."""
        with contextlib.suppress(OSError), _duplicate(descriptor) as sock:
            if os.fstat(sock.fileno()).st_ino != inode:
                return  # another took the number since; the next look sees it
            self._others.add(inode)
            if sock.getsockname() not in self._paths:
                return
            sock.getpeername()  # raises for the socket that listens
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(credentials)
            self._others.discard(inode)
            self._connections[inode] = uid

    @staticmethod
    def _end(descriptor: int, inode: int) -> None:
        with contextlib.suppress(OSError), _duplicate(descriptor) as sock:
            if os.fstat(sock.fileno()).st_ino == inode:
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process that are sockets, by inode."""
    found: dict[int, int] = {}
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208  names, many times a minute
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")  # noqa: PTH115
        except FileNotFoundError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = int(name)
    return found


def _duplicate(descriptor: int) -> socket.socket:
    """Return a descriptor of its own: gRPC may close the given one, and another take its number, at any moment."""
    fd = os.dup(descriptor)
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
    except OSError:
        os.close(fd)
        raise
