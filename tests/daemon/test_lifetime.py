"""The memory of a crashed trainer is given back in time, whoever else is attached; the daemon ends on its own."""

import time
from pathlib import Path

from pausing import wait_until

from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.views import RankState
from everstep.daemon.nodes.testing import node_environment, write_token
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames, peer_frames


def crash(socket_path: Path, devices: list[Path], *, name: str, rank: int = 0, world_size: int = 1) -> None:
    """Leave a snapshot of a trainer that vanished."""
    with FakeTrainer(socket_path) as trainer:
        assert isinstance(
            trainer.open_run(devices, name=name, rank=rank, world_size=world_size), frames.RunOpened
        )
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 7), seed=1, rank=rank, world_size=world_size)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()


def states(client: ControlClient, run: str) -> list[RankState]:
    return [rank.state for each in client.status().runs if each.name == run for rank in each.ranks]


def given_back(socket_path: Path) -> bool:
    return "memory_given_back" in socket_path.with_name("daemon.log").read_text()


def test_a_crashed_trainers_memory_is_given_back_while_others_train(
    socket_path: Path, devices: list[Path]
) -> None:
    with daemon_process(socket_path, linger_s=0.3) as daemon, FakeTrainer(socket_path) as living:
        living.open_run(devices, name="living")
        crash(socket_path, devices, name="crashed")
        with connected(socket_path) as client:
            wait_until(lambda: given_back(socket_path))
            wait_until(lambda: client.status().daemon.arena_bytes == 0)
            assert states(client, "crashed") == [RankState.CLOSED]
            assert states(client, "living") == [RankState.ATTACHED]
        assert daemon.poll() is None


def test_a_rank_that_does_not_come_back_gives_its_memory_back(socket_path: Path, devices: list[Path]) -> None:
    """Of two ranks one crashes, and the other goes on alone."""
    with daemon_process(socket_path, linger_s=0.3) as daemon, FakeTrainer(socket_path) as alone:
        assert isinstance(alone.open_run(devices, name="run"), frames.RunOpened)
        crash(socket_path, devices, name="run", rank=1, world_size=2)
        alone.begin_attempt(2)
        arena = alone.make_arena(alone.layout())
        own_bytes = arena.ready.slot_size_bytes * arena.ready.slot_count
        with connected(socket_path) as client:
            wait_until(lambda: given_back(socket_path))
            wait_until(lambda: client.status().daemon.arena_bytes == own_bytes)
            assert states(client, "run") == [RankState.ATTACHED, RankState.CLOSED]
        assert daemon.poll() is None
        arena.close()


def test_one_who_comes_back_in_time_finds_it(socket_path: Path, devices: list[Path]) -> None:
    with daemon_process(socket_path, linger_s=600):
        crash(socket_path, devices, name="run")
        with FakeTrainer(socket_path) as restarted:
            restarted.open_run(devices, name="run")
            restarted.begin_attempt(2)
            fetched = restarted.fetch(CheckpointId(1, 7))
            assert isinstance(fetched, frames.Fetched)


def test_a_private_daemon_ends_once_the_last_memory_is_given_back(
    socket_path: Path, devices: list[Path]
) -> None:
    with daemon_process(socket_path, linger_s=0.3) as daemon:
        crash(socket_path, devices, name="run")
        assert daemon.wait(10) == 0
    assert given_back(socket_path)


def test_a_trainer_that_dies_before_its_first_snapshot_leaves_nothing_to_wait_for(
    socket_path: Path, devices: list[Path]
) -> None:
    with daemon_process(socket_path, linger_s=600) as daemon:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices, name="run")
            trainer.begin_attempt(1)
            trainer.make_arena(trainer.layout()).close()
        assert daemon.wait(10) == 0


def test_a_private_daemon_waits_for_who_was_told_its_address(socket_path: Path, devices: list[Path]) -> None:
    """Other nodes were told it, too; a daemon started in its place would listen elsewhere."""
    token = write_token(socket_path.parent)
    environment = node_environment("127.0.0.1:0", [], token, {"address": ""})
    with daemon_process(socket_path, linger_s=2.0, environment=environment) as daemon:
        with FakeTrainer(socket_path) as trainer:
            asked_s = time.monotonic()
            address = trainer.ask(peer_frames.AskAddress(request_id=trainer.number()))
            assert isinstance(address, peer_frames.PeerAddress)
            assert address.address
            trainer.open_run(devices, name="run")
        assert daemon.wait(20) == 0
        assert time.monotonic() - asked_s >= 2.0
