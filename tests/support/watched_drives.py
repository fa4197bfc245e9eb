"""A node daemon whose drives a test holds to a speed, and which writes down what they move (scripts/watched_daemon.py).

Everything else is the product's: its engines, queues, deals and measurements.
"""

import os
import subprocess
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.daemon.testing import node_daemon

SUPPORT = Path(__file__).resolve().parent
SCRIPT = SUPPORT.parent / "scripts" / "watched_daemon.py"

AS_FAST_AS_IT_IS = 1e12
"""Bytes per second."""


@dataclass(frozen=True, slots=True)
class Line:
    """What happened to bytes of a snapshot."""

    what: str
    """`queued`: a write begins to wait for its drive. `moved`: the drive has written a piece of one."""
    drive: str
    arena: int
    """Of which rank: its descriptor in the daemon."""
    size_bytes: int
    thread: int


class Drives:
    """A folder with a file per drive, of the name of its directory, that holds its speed; and the log beside them."""

    def __init__(self, folder: Path, devices: Iterable[Path], bytes_per_s: float) -> None:
        self.folder = folder
        self.names = [path.name for path in devices]
        folder.mkdir()
        for name in self.names:
            self.hold(name, bytes_per_s)

    def hold(self, name: str, bytes_per_s: float) -> None:
        """Let a drive move so many bytes per second from its next transfer on; 0: none until this is called again."""
        (self.folder / name).write_text(str(bytes_per_s))

    def lines(self, what: str, drive: str) -> list[Line]:
        """Return what one drive did, in order."""
        words = [line.split() for line in (self.folder / "log").read_text().splitlines()]
        found = [
            Line(verb, name, int(arena), int(size), int(thread)) for verb, name, arena, size, thread in words
        ]
        return [line for line in found if (line.what, line.drive) == (what, drive)]


@contextmanager
def watched_daemon(
    drives: Drives, config: Path, socket_path: Path, *, piece_bytes: int | None = None
) -> Generator["subprocess.Popen[bytes]"]:
    """Run the daemon of a configuration on these drives; `piece_bytes` is what writes are cut into."""
    environment = {**os.environ, "DRIVES": str(drives.folder), "PYTHONPATH": str(SUPPORT)}
    if piece_bytes is not None:
        environment["PIECE_BYTES"] = str(piece_bytes)
    with node_daemon(config, socket_path, program=(str(SCRIPT),), environment=environment) as process:
        try:
            yield process
        finally:
            for name in drives.names:
                drives.hold(name, AS_FAST_AS_IT_IS)  # else the daemon could not end
