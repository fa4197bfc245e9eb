"""The Python client of a node's daemon: `everstep.client.NodeClient`."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

from ...core.ids import CheckpointId
from ...core.paths import data_socket_path
from .client import NO_DAEMON, ControlClient
from .link import open_client

SHARD_SIZE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export has written."""

    run_name: str
    checkpoint: CheckpointId
    destination: Path
    files: dict[str, int]
    """Bytes of each file, by its name below the destination."""
    left_out: tuple[str, ...]
    """Tensors that other ranks have of their own: another `rank` exports theirs."""


class NodeClient(ControlClient):
    """A connection to the daemon of this user, or of the node: all that the command line can do, with typed results.

        with NodeClient() as node:
            for run in node.runs():
                print(run.status.name, run.state.value)

    Synchronous, for one thread. A checkpoint is a `CheckpointId(attempt, step)`; None stands for the newest complete
    one, else the newest intact one. Every call has a deadline, and raises a class of `everstep.errors` with a hint. It
    may be used in a process that trains, but not across a fork.

    Raises:
        DaemonUnavailableError: none answers, or it went away.
        VersionMismatchError: the daemon is of another version.
    """

    def __init__(self, socket: str | Path | None = None) -> None:
        """Connect to the daemon on `socket`; None: $EVERSTEP_SOCKET, or the usual place."""
        path = data_socket_path() if socket is None else Path(socket)
        self._stack = ExitStack()
        stub, hold, known_as = open_client(self._stack, path, hint=NO_DAEMON)
        super().__init__(stub, hold, known_as)

    def __enter__(self) -> "NodeClient":
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the connection; calls in other threads fail. Again is nothing."""
        self._stack.close()

    def export(
        self,
        run: str,
        destination: str | Path,
        checkpoint: CheckpointId | None = None,
        *,
        to: str = "safetensors",
        rank: int | None = None,
        shard_size_bytes: int = SHARD_SIZE_BYTES,
    ) -> Exported:
        """Write a checkpoint as files of another tool, by this process's rights; the daemon keeps it meanwhile.

        to: `safetensors`, `torch` or `dcp`; the program that writes needs torch.
        rank: whose own tensors and values; None: the lowest.
        destination: a folder that is absent or empty; it appears when it is whole.

        Raises:
            UsageError: something stands at the destination.
            NotFoundError, CorruptDataError, IncompleteError, StorageError: the checkpoint cannot be read whole.
        """
        from ..cli.tool_child import run_child  # noqa: PLC0415 - seldom needed

        with self.exporting(run, checkpoint) as held:
            found = held.summary
            request: dict[str, object] = {
                "directories": [str(path) for path in held.directories],
                "uid": held.store_uid,
                "owner_uid": found.owner_uid,
                "run_id": found.run_id,
                "checkpoint": str(found.checkpoint),
                "rank": min(found.ranks) if rank is None else rank,
                "format": to,
                "destination": str(Path(destination).absolute()),
                "shard_size_bytes": shard_size_bytes,
            }
            answer = run_child("hook.export", request)
        return Exported(
            run_name=found.run_name,
            checkpoint=found.checkpoint,
            destination=Path(str(answer["destination"])),
            files=cast("dict[str, int]", answer["files"]),
            left_out=tuple(cast("list[str]", answer["left_out"])),
        )
