"""kill -9 of a node's daemon between sealing and persisting: the next one finds the snapshot in the FD store."""

import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pausing import Pause, Phase, wait_until
from scraping import scrape
from service_manager import ServiceManager

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeArena, FakeTrainer
from everstep.proto import frames

KILLS = int(os.environ.get("EVERSTEP_FD_STORE_KILLS", "3"))
ARENAS = int(os.environ.get("EVERSTEP_FD_STORE_ARENAS", "64"))
NAMES = [Path("nvme0"), Path("nvme1")]
PERSIST = "everstep.daemon.devices.persist:persist_shard"
MANIFEST = "everstep.checkpoint.publication:Publication.publish"


@pytest.fixture
def manager(tmp_path: Path, node_config: Path, socket_path: Path) -> Iterator[ServiceManager]:
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    made = ServiceManager(tmp_path, node_config)
    yield made
    made.close()


def attached(socket_path: Path, attempt: int, name: str = "test") -> tuple[FakeTrainer, FakeArena]:
    trainer = FakeTrainer(socket_path)
    assert isinstance(trainer.open_run(NAMES, name=name), frames.RunOpened)
    assert isinstance(trainer.begin_attempt(attempt), frames.Done)
    return trainer, trainer.make_arena(trainer.layout())


def stored(devices: list[Path], name: str, checkpoint: CheckpointId) -> dict[str, bytes]:
    with opened(devices, read_only=True) as (store, _):
        run = next(run for run in store.runs() if run.name == name)
        return load(run, run.manifest(checkpoint, 0))


def committed(manager: ServiceManager, run: str, checkpoint: CheckpointId) -> bool:
    lines = manager.log().splitlines()
    return any(
        "shard_persisted" in line and run in line and f"checkpoint={checkpoint} " in line for line in lines
    )


def ranks_in(manager: ServiceManager, event: str) -> list[int]:
    """Return the ranks of which an event was logged."""
    return [int(rank) for rank in re.findall(rf"{event} .*?rank=(\d+)", manager.log())]


def test_what_was_sealed_is_committed_by_the_next_one_again_and_again(
    manager: ServiceManager, socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    content: dict[CheckpointId, dict[str, bytes]] = {}
    for kill in range(KILLS):
        checkpoint = CheckpointId(kill + 1, 7)
        place = (PERSIST, MANIFEST)[kill % 2]
        match = "" if place == MANIFEST else f"attempt={checkpoint.attempt}, step=7)"
        number = 1 if place == PERSIST or kill == 0 else 2  # the adopted one is published first
        for name in ("reached", "go"):
            (pause.folder / name).unlink(missing_ok=True)
        manager.start(pause.environment(Phase(place, number, match)))
        for before in content:
            wait_until(lambda: committed(manager, "", before))  # noqa: B023 - called at once
        trainer, arena = attached(socket_path, checkpoint.attempt)
        with trainer:
            arena.save(checkpoint, seed=kill)
            content[checkpoint] = arena.content(kill)
            wait_until((pause.folder / "reached").exists)
            manager.kill()
            arena.close()
        assert any(name.startswith("everstep-arena-") for name in manager.names())
    manager.start()
    last = max(content)
    wait_until(lambda: committed(manager, "", last))
    wait_until(lambda: not manager.names())
    assert manager.stop() == 0
    assert manager.log().count("snapshot_adopted") == KILLS
    kept = sorted(content)[-2:]  # what retention leaves, at least
    for checkpoint in kept:
        assert stored(devices, "test", checkpoint) == content[checkpoint]


def test_runs_of_several_ranks_and_a_snapshot_written_while_it_was_copied(
    manager: ServiceManager, socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    manager.start(pause.environment(Phase(MANIFEST)))
    checkpoint = CheckpointId(1, 3)
    trainers, arenas = [], []
    for name in ("one", "two"):
        for rank in range(2):
            trainer = FakeTrainer(socket_path)
            trainer.open_run(NAMES, name=name, rank=rank, world_size=2)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            trainers.append(trainer)
            arenas.append((name, rank, arena))
    content = {}
    for seed, (name, rank, arena) in enumerate(arenas):
        arena.begin(checkpoint)
        arena.fill(seed)
        arena.announce(checkpoint, rank=rank, world_size=2)
        arena.copied(0)
        content[name, rank] = arena.content(seed)
    first = arenas[0]
    first[2].seal(checkpoint, rank=first[1], world_size=2)
    wait_until(
        (pause.folder / "reached").exists
    )  # nobody's manifest is written; the first one's is about to be
    wait_until(lambda: len(manager.names()) == 8)
    manager.kill()
    for trainer in trainers:
        trainer.close()
    manager.start()
    wait_until(lambda: "shard_persisted" in manager.log())
    wait_until(lambda: not manager.names())
    assert manager.stop() == 0
    with opened(devices, read_only=True) as (store, _):
        runs = {run.name: run for run in store.runs()}
        assert load(runs["one"], runs["one"].manifest(checkpoint, 0)) == content["one", 0]
        assert [info.ranks for info in runs["one"].checkpoints()] == [(0,)]
        assert list(runs["two"].checkpoints()) == []  # was copied, not sealed
    for _, _, arena in arenas:
        arena.close()


def test_a_living_trainer_comes_back_to_a_new_arena_and_the_old_one_goes(
    manager: ServiceManager, socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    manager.start(pause.environment(Phase(PERSIST)))
    first, second = CheckpointId(1, 1), CheckpointId(1, 2)
    trainer, arena = attached(socket_path, 1)
    arena.save(first, seed=1)
    wait_until((pause.folder / "reached").exists)
    manager.kill()
    trainer.close()
    old = set(manager.names())
    manager.start()
    trainer, fresh = attached(socket_path, 1)
    with trainer:
        fresh.save(second, seed=2)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        wait_until(lambda: len(manager.names()) == 2 and not old.intersection(manager.names()))
        trainer.ask(frames.Detach(request_id=trainer.number()))
    wait_until(lambda: not manager.names())
    content = arena.content(1), fresh.content(2)
    arena.close()
    fresh.close()
    assert manager.stop() == 0
    assert (stored(devices, "test", first), stored(devices, "test", second)) == content


_TRAINER = """
import sys, threading
from pathlib import Path
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer
trainer = FakeTrainer(Path(sys.argv[1]))
trainer.open_run([Path("nvme0"), Path("nvme1")])
trainer.begin_attempt(1)
trainer.make_arena(trainer.layout()).save(CheckpointId(1, 5), seed=9)
print("sealed", flush=True)
threading.Event().wait()
"""


@contextmanager
def another_process(socket_path: Path) -> Generator["subprocess.Popen[bytes]"]:
    """A trainer that has sealed a snapshot, and can be killed."""
    command = [sys.executable, "-c", _TRAINER, socket_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"sealed\n"
            yield process
        finally:
            process.kill()


def test_a_dead_trainers_snapshot_is_restored_from_the_memory_that_outlived_daemon_and_trainer(
    manager: ServiceManager, socket_path: Path, pause: Pause
) -> None:
    manager.start(pause.environment(Phase(PERSIST)))
    with another_process(socket_path):
        wait_until((pause.folder / "reached").exists)
        manager.kill()
    manager.start()
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES)
        trainer.begin_attempt(2)
        offer = trainer.offers()[0]
        assert (offer.attempt, offer.step, offer.in_memory) == (1, 5, True)
        fetched = trainer.fetch(CheckpointId(1, 5))
        assert isinstance(fetched, frames.Fetched), fetched
        os.close(trainer.reader.take_fd())
    assert "restore_from_memory" in manager.log()


def test_what_cannot_be_written_beneath_a_living_trainer_is_restored_once_that_is_dead(
    manager: ServiceManager, socket_path: Path, pause: Pause
) -> None:
    """Memory alone has it: who has it mapped keeps it from others, and not from staying."""
    fails = pause.environment(Phase(PERSIST, raises="StorageError"))
    manager.start(fails)
    with another_process(socket_path):
        wait_until(lambda: ranks_in(manager, "shard_failed") == [0])
        assert manager.stop() == 0
        manager.start(fails)
        wait_until(lambda: ranks_in(manager, "shard_failed") == [0, 0])
        with FakeTrainer(socket_path) as early:
            early.open_run(NAMES)
            assert early.offers() == [], "another may still write to it"
        assert len(manager.names()) == 2
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES)
        trainer.begin_attempt(2)
        offer = trainer.offers()[0]
        assert (offer.attempt, offer.step, offer.in_memory) == (1, 5, True)
        assert isinstance(trainer.fetch(CheckpointId(1, 5)), frames.Fetched)
        os.close(trainer.reader.take_fd())


def test_it_goes_once_that_trainer_has_sealed_something_newer(
    manager: ServiceManager, socket_path: Path, pause: Pause
) -> None:
    fails = pause.environment(Phase(PERSIST, raises="StorageError"))
    manager.start(fails)
    trainer, arena = attached(socket_path, 1)
    with trainer:
        arena.save(CheckpointId(1, 1), seed=1)
        assert isinstance(trainer.event(frames.PersistFailed), frames.PersistFailed)
        arena.close()
        assert manager.stop() == 0
    old = set(manager.names())
    manager.start(fails)
    wait_until(lambda: ranks_in(manager, "shard_failed") == [0, 0])
    trainer, fresh = attached(socket_path, 1)
    with trainer:
        fresh.save(CheckpointId(1, 2), seed=2)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        assert old < set(manager.names())
        trainer.send(frames.SealedEverywhere(attempt=1, step=2))
        wait_until(lambda: not old.intersection(manager.names()))
    fresh.close()


def test_what_is_committed_is_not_written_again(
    manager: ServiceManager, socket_path: Path, pause: Pause
) -> None:
    """Killed between the commit and its being noted in the state: the catalogue knows better."""
    manager.start(
        pause.environment(Phase("everstep.daemon.arena:Arena.forget", 2))
    )  # the first: at its begin
    trainer, arena = attached(socket_path, 1)
    arena.save(CheckpointId(1, 1), seed=1)
    wait_until((pause.folder / "reached").exists)
    manager.kill()
    trainer.close()
    arena.close()
    assert len(manager.names()) == 2
    manager.start()
    assert manager.names() == []
    assert "arena_outlived" in manager.log()
    assert "snapshot_adopted" not in manager.log()


def test_what_has_no_room_in_the_store_is_said_and_counted_until_there_is_room(
    manager: ServiceManager, socket_path: Path
) -> None:
    manager.start({"FDSTORE": "4"})
    with ExitStack() as held:
        trainers: list[FakeTrainer] = []
        for name in ("one", "two", "three"):
            trainer, arena = attached(socket_path, 1, name)
            trainers.append(trainer)
            held.enter_context(trainer)
            held.callback(arena.close)
        wait_until(lambda: len(manager.names()) == 4)
        assert "fd_not_stored rank=0 reason=the store has 4 of 4 descriptors" in manager.log()
        with connected(socket_path) as client:
            port = client.status().daemon.metrics_port
        assert scrape(port)["everstep_arenas_not_stored"] == 1
        trainers[0].ask(frames.Detach(request_id=trainers[0].number()))
        wait_until(lambda: len(manager.names()) == 2)
        before = set(manager.names())
        again = trainers[1].make_arena(
            trainers[1].layout()
        )  # it is stored, and takes the place of the one before
        held.callback(again.close)
        wait_until(lambda: len(manager.names()) == 2 and not before.intersection(manager.names()))
        manager.kill()
    manager.start({"FDSTORE": "4"})  # nothing was sealed: all of it leaves the store
    wait_until(lambda: not manager.names())
    trainer, arena = attached(socket_path, 2, "one")
    with trainer:
        arena.close()
        wait_until(lambda: len(manager.names()) == 2)
    assert manager.stop() == 0


def test_an_adopted_run_keeps_what_its_trainer_has_asked_for(
    manager: ServiceManager, socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    """Its rules come back with the trainer; until then the daemon knows its own configuration's alone."""
    steps = range(1, 8)
    manager.start(pause.environment(Phase(PERSIST, steps[-1])))
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES, keep=frames.KeepRules(last=10))
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        for step in steps:
            arena.save(CheckpointId(1, step), seed=step, slot=step % 2)
            if step != steps[-1]:
                trainer.send(frames.SealedEverywhere(attempt=1, step=step))
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        wait_until((pause.folder / "reached").exists)
        manager.kill()
        arena.close()
    manager.start()
    wait_until(lambda: committed(manager, "", CheckpointId(1, steps[-1])))
    assert manager.stop() == 0
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        assert sorted(info.checkpoint.step for info in run.checkpoints()) == [*steps]


def test_a_daemon_ends_well_beside_an_arena_in_which_nothing_was_sealed(
    manager: ServiceManager, socket_path: Path
) -> None:
    """Its memory is given back while its place in the store is."""
    manager.start()
    trainer, arena = attached(socket_path, 1)
    with trainer:
        arena.close()
        wait_until(lambda: len(manager.names()) == 2)
        assert manager.stop() == 0, manager.log()
    assert "daemon_ended" in manager.log()
    assert not manager.names()


def test_many_arenas_come_back_and_each_is_written_once(
    manager: ServiceManager, socket_path: Path, devices: list[Path], pause: Pause
) -> None:
    manager.start(pause.environment(Phase(PERSIST)))
    checkpoint = CheckpointId(1, 3)
    with ExitStack() as held:
        arenas: list[FakeArena] = []
        for rank in range(ARENAS):
            trainer = held.enter_context(FakeTrainer(socket_path))
            trainer.open_run(NAMES, rank=rank, world_size=ARENAS)
            trainer.begin_attempt(1)
            arenas.append(trainer.make_arena(trainer.layout(), slot_count=1))
            held.callback(arenas[-1].close)
        for rank, arena in enumerate(arenas):
            arena.save(checkpoint, rank, rank=rank, world_size=ARENAS)
        sealed = "everstep_snapshots_sealed_total"
        with connected(socket_path) as client:
            port = client.status().daemon.metrics_port
        wait_until(lambda: scrape(port)[sealed] == ARENAS)
        content = [arena.content(rank) for rank, arena in enumerate(arenas)]
        manager.kill()
    manager.start()
    wait_until(lambda: not manager.names())
    assert manager.stop() == 0
    # Some by the first daemon, which may have been killed before it said so, each other one by the second.
    written, found = ranks_in(manager, "shard_persisted"), ranks_in(manager, "arena_outlived")
    adopted = ranks_in(manager, "snapshot_adopted")
    assert adopted
    assert sorted(adopted + found) == [*range(ARENAS)]
    assert len(set(written)) == len(written)
    assert set(adopted) <= set(written)
    with opened(devices, read_only=True) as (store, _):
        (run,) = store.runs()
        for rank, each in enumerate(content):
            assert load(run, run.manifest(checkpoint, rank)) == each


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_living_trainer_hears_of_what_was_written_while_it_was_away(
    manager: ServiceManager, socket_path: Path, pause: Pause, attempt: int
) -> None:
    """It thinks that its checkpoint failed with the daemon; a new attempt has nothing to do with it."""
    manager.start(pause.environment(Phase(PERSIST)))
    trainer, arena = attached(socket_path, 1)
    arena.save(CheckpointId(1, 5), seed=1)
    wait_until((pause.folder / "reached").exists)
    manager.kill()
    trainer.close()
    manager.start()
    wait_until(lambda: committed(manager, "", CheckpointId(1, 5)))
    trainer, again = attached(socket_path, attempt)
    with trainer:
        again.save(CheckpointId(attempt, 6), seed=2)
        heard = trainer.event(frames.Persisted)
        assert isinstance(heard, frames.Persisted)
        assert (heard.attempt, heard.step) == ((1, 5) if attempt == 1 else (2, 6))
    arena.close()
    again.close()
