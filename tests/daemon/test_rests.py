"""While a shard is written, scrapes rest, and so does a trainer that has used up its credit: a real daemon."""

import statistics
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from scraping import scrape

from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.courtesy import APART_S, LOOK_S
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

FIRST = CheckpointId(1, 1)
TRIES = 15
DEADLINE_S = 60.0
WIDE = tuple(whole_leaf(f"layers.{number}.weight", "float32", (4,)) for number in range(1000))
"""Its manifest takes 2 ms on a slow machine, far from `LOOK_S`, and a hundred of them use the credit up."""


def times_s(ask: Callable[[], object]) -> list[float]:
    found: list[float] = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        ask()
        found.append(time.perf_counter() - began_s)
    return found


def check_that_one_comes_within(soon_s: float, ask: Callable[[], object]) -> None:
    """One that rests never comes so soon; others may be late, as the machine is busy."""
    deadline_s = time.monotonic() + DEADLINE_S
    while min(times_s(ask)) >= soon_s:
        assert time.monotonic() < deadline_s, "none comes at once"


def read(port: int) -> bytes:
    """Scrape, and do not look at it, which takes longer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read()


@contextmanager
def being_written(socket_path: Path) -> Generator[None]:
    """A snapshot of another run is announced and not copied on: its shard is being written until its trainer goes."""
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0")], name="slow")
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.begin(FIRST)
        arena.announce(FIRST)
        with connected(socket_path) as client:
            port = client.status().daemon.metrics_port
        while not scrape(port)["everstep_shards_persisting"]:
            time.sleep(0.01)
        yield
        arena.close()


def test_scrapes_rest_while_a_shard_is_written(node_config: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path), connected(socket_path) as client:
        port = client.status().daemon.metrics_port
        check_that_one_comes_within(APART_S / 2, lambda: read(port))
        with being_written(socket_path):
            resting = times_s(lambda: read(port))
    assert statistics.median(resting) >= APART_S / 2


def test_a_trainer_that_asks_without_end_rests_when_its_credit_is_used_up(
    node_config: Path, socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0")], name="wide")
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout(WIDE), slot_count=1)
        arena.save(FIRST, seed=1)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)

        def ask() -> None:
            question = frames.GetManifest(request_id=trainer.number(), attempt=1, step=1, rank=0)
            assert isinstance(trainer.ask(question), frames.ManifestBytes)

        with being_written(socket_path):
            check_that_one_comes_within(LOOK_S, ask)
            deadline_s = time.monotonic() + DEADLINE_S
            while statistics.median(times_s(ask)) < LOOK_S:
                assert time.monotonic() < deadline_s, "it never rests"
        check_that_one_comes_within(LOOK_S, ask)
        arena.close()
