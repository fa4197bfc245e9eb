"""Many clients of one daemon: idle ones cost next to nothing, and those that come and go leave nothing behind."""

import os
import threading
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from held_by import HeldBy, held_by
from pausing import wait_until
from places import memory_folder

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.leaf import whole_leaf
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

CLIENTS = 256
RUNS = 16
CYCLES = int(os.environ.get("EVERSTEP_ATTACH_CYCLES", "1000"))
"""10,000 in bench/load.py."""
WARM_CYCLES = 200
MEMORY_MAX_BYTES = 128 << 20
WARM_SAVES = 1400
"""More than fill the log of events: 4,096, three of each."""
SAVES = 1000
"""Of each 1 KiB that stays is seen."""
KEPT_MAX = 5
"""Three are, and one or two are on their way."""
IDLE_S = 2.0
WAKEUPS_MAX = 64
"""In that time, of all threads together: what watches drives and runs does so by the second, not by the client."""
GROWTH_MAX_BYTES = 1 << 20
"""Of an allocator that keeps what it had: a thousand sessions that wait for the garbage collector are 2.8 MiB."""


@pytest.fixture
def devices() -> Generator[list[Path]]:
    """Two directories in memory: some thousand checkpoints are written, and no drive is looked at."""
    with memory_folder() as folder:
        made = [folder / name for name in ("nvme0", "nvme1")]
        for path in made:
            path.mkdir()
        yield made


@pytest.fixture
def daemon(node_config: Path, socket_path: Path) -> Generator[int]:
    with node_daemon(node_config, socket_path) as process:
        yield process.pid


def attached(socket_path: Path, name: str, *, rank: int = 0, world_size: int = 1) -> FakeTrainer:
    trainer = FakeTrainer(socket_path)
    reply = trainer.open_run([Path("nvme0"), Path("nvme1")], name=name, rank=rank, world_size=world_size)
    assert isinstance(reply, frames.RunOpened), reply
    return trainer


def cycle(socket_path: Path, number: int, *, clean: bool) -> None:
    """Attach, and leave: by a word, or by vanishing."""
    with attached(socket_path, f"run-{number % RUNS}") as trainer:
        if clean:
            assert isinstance(trainer.ask(frames.Detach(request_id=trainer.number())), frames.Done)


def settled(pid: int, most_descriptors: int | None = None) -> HeldBy:
    """Return what the daemon holds once it has seen the last one go: ten looks in a row are alike, or it is enough."""
    looks: list[int] = []

    def is_settled() -> bool:
        looks.append(held_by(pid).descriptors)
        if most_descriptors is not None:
            return looks[-1] <= most_descriptors
        return len(looks) >= 10 and len(set(looks[-10:])) == 1

    wait_until(is_settled)
    return held_by(pid)


def test_256_attached_idle_clients_cost_little_memory_and_wake_nobody(daemon: int, socket_path: Path) -> None:
    before = held_by(daemon)
    layout = plan_layout([whole_leaf("weight", "uint8", (4096,))], [], segment_count=2)
    per_run = CLIENTS // RUNS
    with ExitStack() as held:
        for number in range(CLIENTS):
            trainer = held.enter_context(
                attached(socket_path, f"run-{number % RUNS}", rank=number // RUNS, world_size=per_run)
            )
            trainer.begin_attempt(1)
            held.callback(trainer.make_arena(layout, slot_count=1).close)
        with connected(socket_path) as client:
            status = client.status()
        assert sum(rank.pid == os.getpid() for run in status.runs for rank in run.ranks) == CLIENTS
        assert status.daemon.arena_bytes == CLIENTS * layout.slot_size_bytes
        idle = settled(daemon)
        threading.Event().wait(IDLE_S)  # that nothing happens is what is looked at
        after = held_by(daemon)
    assert after.anonymous_bytes - before.anonymous_bytes < MEMORY_MAX_BYTES
    assert after.wakeups - idle.wakeups < WAKEUPS_MAX
    assert after.threads == idle.threads


@pytest.mark.parametrize("clean", [True, False])
def test_who_attaches_and_leaves_again_and_again_leaves_nothing_behind(
    daemon: int, socket_path: Path, clean: bool
) -> None:
    for number in range(WARM_CYCLES):
        cycle(socket_path, number, clean=clean)
    before = settled(daemon)
    for number in range(CYCLES):
        cycle(socket_path, number, clean=clean)
    after = settled(daemon, before.descriptors)
    assert after.threads <= before.threads
    assert after.memfds == before.memfds == 0
    assert after.aio_contexts <= before.aio_contexts
    assert after.anonymous_bytes - before.anonymous_bytes <= GROWTH_MAX_BYTES
    with connected(socket_path) as client:
        assert len(client.status().runs) == RUNS


@pytest.mark.timeout(300)
def test_checkpoints_leave_nothing_behind_in_memory(daemon: int, socket_path: Path) -> None:
    with attached(socket_path, "run") as trainer:
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())

        def save(step: int) -> None:
            slot = step % 2
            arena.save(CheckpointId(1, step), seed=1, slot=slot)
            trainer.event(frames.Persisted)
            trainer.send(frames.SealedEverywhere(attempt=1, step=step))
            trainer.send(
                frames.Complete(attempt=1, step=step)
            )  # which the daemon, of one rank, knows by itself
            if step > 1:
                trainer.event(frames.SlotFree)

        for step in range(1, WARM_SAVES + 1):
            save(step)
        before = settled(daemon)
        for step in range(WARM_SAVES + 1, WARM_SAVES + SAVES + 1):
            save(step)
        after = settled(daemon)
        arena.close()
        with connected(socket_path) as client:
            assert len(client.checkpoints("run")) <= KEPT_MAX, "the collection kept up"
    assert after.memfds == before.memfds
    assert after.aio_contexts == before.aio_contexts
    assert after.anonymous_bytes - before.anonymous_bytes <= GROWTH_MAX_BYTES
