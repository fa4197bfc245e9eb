"""What a scrape costs with many runs: the same as with one."""

import os
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from scraping import scrape

from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames

RUNS = int(os.environ.get("EVERSTEP_SCRAPE_RUNS", "100"))
TRIES = 20
SCRAPE_S_MAX = 0.05


def begun(trainer: FakeTrainer, name: str) -> FakeArena:
    """Take a run, and commit a checkpoint of it."""
    assert isinstance(trainer.open_run([Path("nvme0"), Path("nvme1")], name=name), frames.RunOpened)
    trainer.begin_attempt(1)
    arena = trainer.make_arena(trainer.layout())
    arena.save(CheckpointId(1, 1), seed=1)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
    return arena


def test_a_scrape_does_not_grow_with_runs(node_config: Path, socket_path: Path) -> None:
    """The least of some tries is what it costs: others are for whatever else the machine does.

    Median and p99, which need an idle machine, are rows of bench/load.py.
    """
    with node_daemon(node_config, socket_path), connected(socket_path) as client, ExitStack() as held:
        port = client.status().daemon.metrics_port
        arena = begun(held.enter_context(FakeTrainer(socket_path)), "run0")
        held.callback(arena.close)
        of_one = scrape(port)
        for number in range(1, RUNS):
            arena = begun(held.enter_context(FakeTrainer(socket_path)), f"run{number}")
            held.callback(arena.close)
        of_all = scrape(port)
        took_s = min(scrape_s(port) for _ in range(TRIES))
    assert of_all["everstep_runs"] == of_all["everstep_ranks{attached}"] == RUNS
    assert of_all["everstep_shards_persisted_total"] == RUNS
    assert set(of_all) == set(of_one)
    print(f"{RUNS} runs: {len(of_all)} samples, {1000 * took_s:.1f} ms")
    assert took_s < SCRAPE_S_MAX


def scrape_s(port: int) -> float:
    began_s = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        answer.read()
    return time.perf_counter() - began_s
