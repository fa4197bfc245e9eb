"""A node's daemon and trainers that have only bytes: what the storage benchmarks measure.

A trainer speaks the data socket as the hook does; its state is random bytes that lie in the arena from the start,
so that nothing but the daemon's own work is in the measured time.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of the run, as the daemon knows it."""

    trainer: FakeTrainer
    arena: FakeArena


class Node:
    """One run whose ranks have a state of `size_bytes` together, over the given directories."""

    def __init__(self, ranks: Sequence[Rank], size_bytes: int, pid: int, socket: Path) -> None:
        self._ranks, self.size_bytes, self.pid, self.socket = ranks, size_bytes, pid, socket
        self._step = 0

    def persist(self) -> float:
        """Return bytes per second from sealed to acknowledged, every fsync and the manifests included.

        All ranks seal together; the last one's acknowledgement counts.
        """
        self._step += 1
        checkpoint = CheckpointId(1, self._step)
        for each in self._ranks:
            each.arena.begin(checkpoint, self._slot(each))
        began_s = time.perf_counter()
        for number, each in enumerate(self._ranks):
            each.arena.seal(checkpoint, self._slot(each), rank=number, world_size=len(self._ranks))
        for each in self._ranks:
            each.trainer.send(frames.SealedEverywhere(attempt=checkpoint.attempt, step=checkpoint.step))
        for each in self._ranks:
            _wait_for(each.trainer, checkpoint)
        return self.size_bytes / (time.perf_counter() - began_s)

    def _slot(self, rank: Rank) -> int:
        return self._step % rank.arena.ready.slot_count


def _wait_for(trainer: FakeTrainer, checkpoint: CheckpointId) -> None:
    while True:
        event = trainer.event(frames.Persisted)
        assert isinstance(event, frames.Persisted)
        if event.step == checkpoint.step:
            return


@contextlib.contextmanager
def node(
    directories: Sequence[Path],
    size_bytes: int,
    folder: Path,
    *,
    slot_count: int = 2,
    rank_count: int = 1,
    recycles: bool = True,
    serves_metrics: bool = False,
    io_process: bool = False,
) -> Generator[Node]:
    """A daemon over new stores in `directories`, its arenas filled; without `recycles` every file is a new one.

    `serves_metrics`: on a free port. `io_process`: each device's engine in a process of its own.
    """
    stores = {f"drive{index}": directory / "everstep" for index, directory in enumerate(directories)}
    for store in stores.values():
        store.mkdir()
    socket = folder / "socket" / "data.sock"
    socket.parent.mkdir(mode=0o700)
    settings = _settings(recycles=recycles, serves_metrics=serves_metrics, io_process=io_process)
    count = max(1, size_bytes // LEAF_BYTES // rank_count)
    leaves = tuple(whole_leaf(f"m.{index}", "float32", (LEAF_BYTES // 4,)) for index in range(count))
    with (
        _removed(stores.values()),
        node_daemon(_config(folder, socket, stores, settings), socket) as process,
        contextlib.ExitStack() as held,
    ):
        ranks: list[Rank] = []
        for rank in range(rank_count):
            trainer = held.enter_context(_trainer(socket, list(stores), rank, rank_count))
            arena = trainer.make_arena(trainer.layout(leaves), slot_count=slot_count)
            held.callback(arena.close)
            _fill(arena)
            ranks.append(Rank(trainer, arena))
        yield Node(ranks, rank_count * count * LEAF_BYTES, process.pid, socket)


@contextlib.contextmanager
def _trainer(socket: Path, drives: Sequence[str], rank: int, world_size: int) -> Generator[FakeTrainer]:
    with FakeTrainer(socket) as trainer:
        trainer.sock.settimeout(DEADLINE_S)
        reply = trainer.open_run([Path(name) for name in drives], rank=rank, world_size=world_size)
        assert isinstance(reply, frames.RunOpened), reply
        trainer.begin_attempt(1)
        yield trainer


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
def hook_daemon(folder: Path) -> Generator[int]:
    """A daemon that knows nothing from before, for the hook in this process; gives its pid."""
    socket = folder / "socket" / "data.sock"
    os.environ["EVERSTEP_SOCKET"] = str(socket)
    with daemon_process(socket) as process:
        yield process.pid
