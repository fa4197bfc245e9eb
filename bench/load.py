"""What a daemon does under load: many clients that do nothing, many that come and go, many that save at once.

    python bench/load.py DIR [--rounds 7] [--cycles 10000] [--clients 256] [--checkpoints 1000]

DIR is where the devices' directories are made, all on its file system. The clients are processes' worth of frames
without torch, from one process, on the daemon's data socket. Only an idle machine gives figures.
"""

import argparse
import itertools
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paired import Row, publish, row
from recovery_time import drop_caches, fill

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from held_by import held_by
from scraping import scrape

NAMES = [Path("nvme0"), Path("nvme1")]
GIB, MIB = 1 << 30, 1 << 20
ATTACHES = 500
RUNS = 16
IDLE_S = 10.0
REST_S = 1.0
"""After the last of many clients: the daemon lets go of its socket and its pidfd when it hears of its end."""
SAVERS, SAVE_BYTES, SAVE_S = 16, 8 * MIB, 5.0
ARENA_BYTES = 256 * MIB
SCRAPED_RUNS, SCRAPES = 100, 200
ATTACH_P99_S, SCRAPE_S, IDLE_CPU_PERCENT, IDLE_MEMORY_MIB, GROWTH_MIB, READY_S, FAIRNESS = (
    0.05,
    0.05,
    2.0,
    128.0,
    4.0,
    5.0,
    0.9,
)
"""The goals."""


class Node:
    """A daemon over two directories of a folder, started for each measure."""

    def __init__(self, folder: Path) -> None:
        self.directories = [folder / "d0", folder / "d1"]
        for path in self.directories:
            path.mkdir()
        self.socket = Path(tempfile.mkdtemp(prefix="es-load-")) / "data.sock"
        self._config = folder / "node.toml"
        devices = "".join(f'{name} = "{path}"\n' for name, path in zip(NAMES, self.directories, strict=True))
        self._config.write_text(f'[daemon]\nsocket = "{self.socket}"\n[devices]\n{devices}')

    @contextmanager
    def daemon(self) -> Generator[int]:
        """Give the pid of a daemon that is ready."""
        with node_daemon(self._config, self.socket) as process:
            yield process.pid

    def metric(self, name: str) -> float:
        """Return a sample of the running daemon's metrics."""
        with connected(self.socket) as client:
            port = client.status().daemon.metrics_port
        return scrape(port)[name]

    def attach(self, name: str, *, rank: int = 0, world_size: int = 1, begin: bool = True) -> FakeTrainer:
        """Return a client that holds a rank, in an attempt of its own."""
        trainer = FakeTrainer(self.socket)
        reply = trainer.open_run(NAMES, name=name, rank=rank, world_size=world_size)
        assert isinstance(reply, frames.RunOpened), reply
        if begin:
            begun = trainer.begin_attempt(reply.highest_attempt + 1)
            assert isinstance(begun, frames.Done), begun
        return trainer

    def close(self) -> None:
        """Remove the socket's folder."""
        shutil.rmtree(self.socket.parent)


def attach_p99_s(node: Node) -> float:
    """Return the time that 99 of 100 attaches stay below, from connecting to a durable attempt, one after another."""
    taken_s: list[float] = []
    for number in range(ATTACHES):
        began_s = time.perf_counter()
        trainer = node.attach(f"run-{number % RUNS}")
        taken_s.append(time.perf_counter() - began_s)
        trainer.ask(frames.Detach(request_id=trainer.number()))
        trainer.close()
    return sorted(taken_s)[math.ceil(0.99 * ATTACHES) - 1]


def allocation_s_per_gib(node: Node) -> float:
    """Return what allocating an arena takes, as the daemon's metrics say."""
    names = "everstep_arena_allocation_duration_seconds_sum", "everstep_arena_allocated_bytes_total"
    before = [node.metric(name) for name in names]
    layout = plan_layout([whole_leaf("weight", "uint8", (ARENA_BYTES >> 10, 1 << 10))], [], segment_count=2)
    with node.attach("arena") as trainer:
        trainer.make_arena(layout, slot_count=2).close()
        trainer.ask(frames.Detach(request_id=trainer.number()))
    took_s, size_bytes = (node.metric(name) - known for name, known in zip(names, before, strict=True))
    return took_s / size_bytes * GIB


def idle(node: Node, pid: int, count: int, rounds: int) -> tuple[list[float], float]:
    """Return per cent of a core that a daemon takes for idle attached clients, by round, and MiB that it has grown."""
    before = held_by(pid)
    layout = plan_layout([whole_leaf("weight", "uint8", (4096,))], [], segment_count=2)
    with ExitStack() as held:
        for number in range(count):
            each = node.attach(
                f"idle-{number % RUNS}", rank=number // RUNS, world_size=count // RUNS, begin=False
            )
            held.enter_context(each).begin_attempt(1)
            held.callback(each.make_arena(layout, slot_count=1).close)
        shares = [_cpu_percent(pid) for _ in range(rounds)]
        grown_bytes = held_by(pid).anonymous_bytes - before.anonymous_bytes
    return shares, grown_bytes / MIB


def _cpu_percent(pid: int) -> float:
    began_s, before = time.perf_counter(), held_by(pid).cpu_ticks
    time.sleep(IDLE_S)
    ticks = held_by(pid).cpu_ticks - before
    return 100 * ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began_s)


def growth(node: Node, pid: int, cycles: int) -> tuple[float, int]:
    """Return MiB and descriptors that a daemon has grown by when so many clients have attached and left."""
    _cycle(node, cycles // 10)
    before = held_by(pid)
    _cycle(node, cycles)
    after = held_by(pid)
    return (after.anonymous_bytes - before.anonymous_bytes) / MIB, after.descriptors - before.descriptors


def _cycle(node: Node, count: int) -> None:
    for number in range(count):
        with node.attach(f"run-{number % RUNS}", begin=False) as trainer:
            trainer.ask(frames.Detach(request_id=trainer.number()))
    time.sleep(REST_S)


def scrapes_s(node: Node, rounds: int) -> tuple[list[float], list[float]]:
    """Return median and 99th percentile, by round, of what a scrape takes with many runs known, one after another."""
    layout = plan_layout([whole_leaf("weight", "uint8", (4096,))], [], segment_count=2)
    with connected(node.socket) as client:
        port = client.status().daemon.metrics_port
    medians_s, p99s_s = list[float](), list[float]()
    with ExitStack() as held:
        for number in range(SCRAPED_RUNS):
            trainer = held.enter_context(node.attach(f"scraped-{number}"))
            arena = trainer.make_arena(layout, slot_count=1)
            held.callback(arena.close)
            arena.save(CheckpointId(1, 1), seed=number)
            trainer.event(frames.Persisted)
        for _ in range(rounds):
            taken_s = sorted(_scrape_s(port) for _ in range(SCRAPES))
            medians_s.append(taken_s[SCRAPES // 2])
            p99s_s.append(taken_s[math.ceil(0.99 * SCRAPES) - 1])
    return medians_s, p99s_s


def _scrape_s(port: int) -> float:
    began_s = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        answer.read()
    return time.perf_counter() - began_s


def fairness(node: Node) -> float:
    """Return Jain's index of how often each of 16 runs has saved that do nothing else."""
    layout = plan_layout([whole_leaf("weight", "uint8", (SAVE_BYTES >> 10, 1 << 10))], [], segment_count=2)
    begin = threading.Barrier(SAVERS)
    counts = [0] * SAVERS

    def save(number: int) -> None:
        with node.attach(f"saver-{number}", begin=False) as trainer:
            attempt = next(attempts[number])
            trainer.begin_attempt(attempt)
            arena = trainer.make_arena(layout, slot_count=3)
            for slot in range(3):
                arena.fill(seed=number, slot=slot)
            begin.wait()
            until_s = time.perf_counter() + SAVE_S
            for step in itertools.count(1):
                checkpoint = CheckpointId(attempt, step)
                arena.begin(checkpoint, step % 3)
                arena.seal(checkpoint, step % 3)
                trainer.send(frames.SealedEverywhere(attempt=attempt, step=step))
                trainer.event(frames.Persisted)
                if time.perf_counter() > until_s:
                    break
                counts[number] = step
            arena.close()
            trainer.ask(frames.Detach(request_id=trainer.number()))

    attempts = _saver_attempts(node)
    with ThreadPoolExecutor(SAVERS) as threads:
        list(threads.map(save, range(SAVERS)))  # raises what any of them met
    return sum(counts) ** 2 / (SAVERS * sum(count * count for count in counts))


def _saver_attempts(node: Node) -> list["itertools.count[int]"]:
    found: list[itertools.count[int]] = []
    for number in range(SAVERS):
        with FakeTrainer(node.socket) as trainer:
            reply = trainer.open_run(NAMES, name=f"saver-{number}")
            assert isinstance(reply, frames.RunOpened), reply
            found.append(itertools.count(reply.highest_attempt + 1))
            trainer.ask(frames.Detach(request_id=trainer.number()))
    return found


def ready_s(node: Node, *, is_cold: bool) -> float:
    """Return how long a daemon takes from its start until it is ready, over what its devices hold.

    Cold, its own program is read from the disk, too.
    """
    if is_cold:
        drop_caches()
    began_s = time.perf_counter()
    with node.daemon():
        return time.perf_counter() - began_s


def rows(node: Node, given: argparse.Namespace) -> list[Row]:
    """Return all measures."""
    found: list[Row] = []
    with node.daemon() as pid:
        attaches_s = [attach_p99_s(node) for _ in range(given.rounds)]
        found.append(row(f"attach, p99 of {ATTACHES}", attaches_s, goal=ATTACH_P99_S, at_most=True, unit="s"))
        per_gib_s = [allocation_s_per_gib(node) for _ in range(given.rounds)]
        found.append(row("arena allocation, per GiB", per_gib_s, goal=None, unit="s"))
        grown_mib, descriptors = growth(node, pid, given.cycles)
        what = f"of {given.cycles:,} attach and detach cycles"
        found.append(row(f"memory {what}", [grown_mib], goal=GROWTH_MIB, at_most=True, unit="MiB"))
        found.append(
            row(f"descriptors {what}", [float(descriptors)], goal=0, at_most=True, unit="descriptors")
        )
    with node.daemon() as pid:
        shares, idle_mib = idle(node, pid, given.clients, given.rounds)
        what = f"of {given.clients} attached idle clients"
        found.append(row(f"daemon CPU {what}", shares, goal=IDLE_CPU_PERCENT, at_most=True, unit="%"))
        found.append(
            row(f"memory {what}, arenas apart", [idle_mib], goal=IDLE_MEMORY_MIB, at_most=True, unit="MiB")
        )
    with node.daemon():
        medians_s, p99s_s = scrapes_s(node, given.rounds)
        what = f"of {SCRAPES} scrapes with {SCRAPED_RUNS} runs known"
        found.append(row(f"median {what}", medians_s, goal=SCRAPE_S, at_most=True, unit="s"))
        found.append(row(f"p99 {what}", p99s_s, goal=SCRAPE_S, at_most=True, unit="s"))
    with node.daemon():
        shares = [fairness(node) for _ in range(given.rounds)]
        found.append(
            row(f"Jain's index of {SAVERS} runs that save at once", shares, goal=FAIRNESS, unit="ratio")
        )
    fill(node.directories, range(1, given.checkpoints + 1), leaf_count=given.leaves)
    for caches, is_cold in (("warm", False), ("cold", True)):
        if is_cold and os.geteuid() != 0:
            continue
        starts_s = [ready_s(node, is_cold=is_cold) for _ in range(given.rounds)]
        what = (
            f"start to ready with {given.checkpoints:,} checkpoints of {given.leaves} leaves, caches {caches}"
        )
        found.append(row(what, starts_s, goal=READY_S, at_most=True, unit="s"))
    return found


def main() -> int:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--leaves", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("build/bench/load.json"))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="everstep-load-", dir=given.folder))
    node = Node(folder)
    try:
        found = rows(node, given)
    finally:
        node.close()
        shutil.rmtree(folder)
    return 0 if publish("a daemon under load", found, given.output) else 1


if __name__ == "__main__":
    raise SystemExit(main())
