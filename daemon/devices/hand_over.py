"""Asking another daemon for the devices it holds: an idle private one ends, any other keeps them."""

import contextlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from ...checkpoint.store_format import SMALL_FILE_BYTES_MAX, LockHolder, decode_lock
from ...core.errors import EverstepError
from ...core.version import VERSION
from ...proto import frames
from ...proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, Reply, Role
from ...proto.wire import FrameError, FrameReader, decode_reply, greet, pack
from ..blocking import in_thread

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 2.0


async def ask_to_hand_over(directories: Sequence[Path], own: LockHolder) -> bool:
    """Return whether a holder of these directories' locks agreed to end."""
    agreed = False
    for path in await in_thread(lambda: {_holder_socket(directory, own) for directory in directories}):
        if path:
            agreed |= await in_thread(ask_holder, path)
    return agreed


def _holder_socket(directory: Path, own: LockHolder) -> str:
    """Return where the holder of a device listens; empty when that is nobody, or this daemon itself."""
    try:
        content = (directory / "lock").read_bytes()[:SMALL_FILE_BYTES_MAX]
        holder = decode_lock(content)
    except OSError:
        return ""
    return holder.socket if holder is not None and holder.pid != own.pid else ""


def ask_holder(path: str) -> bool:
    """Return whether the daemon that listens on `path` agrees to end."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.settimeout(ANSWER_DEADLINE_S)
        try:
            sock.connect(path)
            reader = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)
            greet(sock, reader, frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.DAEMON))
            sock.sendall(pack(frames.HandOver(request_id=1)))
            answer = _next(sock, reader)
        except (OSError, FrameError, EverstepError) as error:
            logger.info("hand_over_unanswered socket=%s reason=%s", path, error)
            return False
    return isinstance(answer, frames.Done)


def _next(sock: socket.socket, reader: FrameReader) -> Reply | None:
    while (body := reader.next_body()) is None:
        if not reader.receive(sock):
            return None
    return decode_reply(body)
