"""A node's daemon and a trainer that has only bytes: what the storage benchmarks measure.

The trainer speaks the data socket as the hook does; its state is random bytes that lie in the arena from the start,
so that nothing but the daemon's own work is in the measured time.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeArena, FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames

LEAF_BYTES = 64 * 2**20
KEEP_LAST = 2
"""Complete checkpoints that stay: as few as can be set, since drives of memory are small."""
DEADLINE_S = 600.0


class Node:
    """One run of one rank, with a state of `size_bytes`, over the given directories."""

    def __init__(
        self, trainer: FakeTrainer, arena: FakeArena, size_bytes: int, pid: int, socket: Path
    ) -> None:
        self.trainer, self.arena, self.size_bytes, self.pid, self.socket = (
            trainer,
            arena,
            size_bytes,
            pid,
            socket,
        )
        self._step = 0

    def persist(self) -> float:
        """Return bytes per second from sealed to acknowledged, every fsync and the manifest included."""
        self._step += 1
        checkpoint, slot = CheckpointId(1, self._step), self._step % self.arena.ready.slot_count
        self.arena.begin(checkpoint, slot)
        began_s = time.perf_counter()
        self.arena.seal(checkpoint, slot)
        self.trainer.send(frames.SealedEverywhere(attempt=checkpoint.attempt, step=checkpoint.step))
        while True:
            event = self.trainer.event(frames.Persisted)
            assert isinstance(event, frames.Persisted)
            if event.step == checkpoint.step:
                return self.size_bytes / (time.perf_counter() - began_s)

    def cpu_s(self) -> float:
        """Return the processor time that the daemon has used."""
        return cpu_s(self.pid)

    def memory_bytes(self) -> int:
        """Return the daemon's own memory: all but the arena's shared pages."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def node(
    directories: Sequence[Path],
    size_bytes: int,
    folder: Path,
    *,
    slot_count: int = 2,
    recycles: bool = True,
    serves_metrics: bool = False,
    io_process: bool = False,
) -> Generator[Node]:
    """A daemon over new stores in `directories`, its arena filled; without `recycles` every file is a new one.

    `serves_metrics`: on a free port. `io_process`: each device's engine in a process of its own.
    """
    stores = {f"drive{index}": directory / "everstep" for index, directory in enumerate(directories)}
    for store in stores.values():
        store.mkdir()
    socket = folder / "socket" / "data.sock"
    socket.parent.mkdir(mode=0o700)
    settings = _settings(recycles=recycles, serves_metrics=serves_metrics, io_process=io_process)
    with (
        _removed(stores.values()),
        node_daemon(_config(folder, socket, stores, settings), socket) as process,
        FakeTrainer(socket) as trainer,
    ):
        trainer.sock.settimeout(DEADLINE_S)
        reply = trainer.open_run([Path(name) for name in stores])
        assert isinstance(reply, frames.RunOpened), reply
        trainer.begin_attempt(1)
        count = max(1, size_bytes // LEAF_BYTES)
        leaves = tuple(whole_leaf(f"m.{index}", "float32", (LEAF_BYTES // 4,)) for index in range(count))
        arena = trainer.make_arena(trainer.layout(leaves), slot_count=slot_count)
        _fill(arena)
        try:
            yield Node(trainer, arena, count * LEAF_BYTES, process.pid, socket)
        finally:
            arena.close()


def _config(folder: Path, socket: Path, stores: Mapping[str, Path], settings: str) -> Path:
    path = folder / "node.toml"
    devices = "".join(f'{name} = "{store}"\n' for name, store in stores.items())
    path.write_text(f'[daemon]\nsocket = "{socket}"\n{settings}[devices]\n{devices}')
    return path


def _settings(*, recycles: bool, serves_metrics: bool, io_process: bool) -> str:
    # What is read in the background is not what is measured.
    background = '[verify]\nafter_s = 86400\n[scrub]\nevery = "never"\n'
    io = f"[io]\nrecycle = {_toml(recycles)}\nprocess = {_toml(io_process)}\n"
    return f"[metrics]\nenabled = {_toml(serves_metrics)}\n{background}{io}[retention]\nkeep_last = {KEEP_LAST}\n"


def _toml(value: bool) -> str:
    return str(value).lower()


@contextlib.contextmanager
def _removed(stores: Iterable[Path]) -> Generator[None]:
    """Delete the stores after the block, when their daemon has ended."""
    try:
        yield
    finally:
        for store in stores:
            shutil.rmtree(store)


def _fill(arena: FakeArena) -> None:
    whole = np.frombuffer(arena.map, dtype=np.uint64)
    random = np.random.default_rng(0).integers(0, 2**63, 8 * 2**20, dtype=np.uint64)
    for begin in range(0, len(whole), len(random)):
        part = whole[begin : begin + len(random)]
        part[:] = random[: len(part)] + np.uint64(begin)  # no block is the same as another
    del whole


@contextlib.contextmanager
def hook_daemon(folder: Path) -> Generator[None]:
    """A daemon that knows nothing from before, for the hook in this process."""
    socket = folder / "socket" / "data.sock"
    os.environ["EVERSTEP_SOCKET"] = str(socket)
    with daemon_process(socket):
        yield
