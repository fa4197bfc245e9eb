"""Which nodes share a dataset, found through a Store of `torch.distributed`: each rank tells where its daemon is."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import DaemonUnavailableError, DeadlineError, UsageError
from ...core.paths import data_socket_path
from ...core.version import VERSION
from ...proto import frames, peer_frames
from ...proto.frames import FRAME_SIZE_BYTES_MAX, PROTOCOL, Reply, Role
from ...proto.starting import start_and_connect
from ...proto.wire import FrameReader, decode_reply, greet, pack
from .link import connected_socket, telling_loss
from .reader import ATTACH_DEADLINE_S, nobody_listens

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed's own, whose stub does not export it

PREFIX = "everstep/cache/members"


def members_from_store(
    store: "Store", *, rank: int, world_size: int, name: str = "", timeout_s: float = 60.0
) -> list[str]:
    """Return the addresses of the daemons of all ranks, for `CachedDataset(..., members=...)`: the same on every rank.

    Every rank calls it, before its first `CachedDataset`; a private daemon is started where there is none. A node
    whose daemon serves no others (`cache.listen`) is left out. `name` tells calls of one job apart.

    Raises:
        DeadlineError: not all ranks have called it in time.
        DaemonUnavailableError: this node has no daemon.
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not below world_size {world_size}")
    keys = [f"{PREFIX}/{name}/{each}" for each in range(world_size)]
    store.set(keys[rank], own_address())
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DeadlineError(
            f"not all of {world_size} ranks told their node's address within {timeout_s:.0f} s: {error}",
            hint="every rank has to call members_from_store",
        ) from error
    return sorted({address for key in keys if (address := store.get(key).decode())})


def own_address(path: Path | None = None) -> str:
    """Return where other nodes reach this node's daemon; empty: it serves no others.

    Raises:
        DaemonUnavailableError: there is no daemon, or it does not answer.
    """
    where = path or data_socket_path()

    def ask() -> str:
        return _ask(where)

    return start_and_connect(where, ask) if nobody_listens(where) else ask()


def _ask(path: Path) -> str:
    reader = FrameReader(size_bytes_max=FRAME_SIZE_BYTES_MAX)

    def next_reply() -> Reply:
        while (body := reader.next_body()) is None:
            if not reader.receive(sock):
                raise DaemonUnavailableError("the daemon closed the connection")
        return decode_reply(body)

    with connected_socket(path, ATTACH_DEADLINE_S) as sock, telling_loss():
        greet(sock, reader, frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.TRAINER))
        sock.sendall(pack(peer_frames.AskAddress(request_id=1)))
        reply = next_reply()
    if not isinstance(reply, peer_frames.PeerAddress):
        raise DaemonUnavailableError(f"the daemon answered AskAddress with {type(reply).__name__}")
    return reply.address
