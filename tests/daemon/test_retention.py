"""What a daemon keeps: by its own rules, or by those of the run's trainer."""

from pathlib import Path

from pausing import wait_until

from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames


def save_nine(trainer: FakeTrainer) -> None:
    """Save steps 1 to 9 of one rank, each durable before the next."""
    trainer.begin_attempt(1)
    arena = trainer.make_arena(trainer.layout())
    for step in range(1, 10):
        arena.save(CheckpointId(1, step), seed=step, slot=step % 2)
        trainer.event(frames.Persisted)
        trainer.send(frames.SealedEverywhere(attempt=1, step=step))
    arena.close()


def steps(client: ControlClient) -> list[int]:
    return [view.checkpoint.step for view in client.checkpoints("test")]


def test_a_run_says_what_it_wants_kept(socket_path: Path, devices: list[Path]) -> None:
    with (
        daemon_process(socket_path),
        FakeTrainer(socket_path) as trainer,
        connected(socket_path) as client,
    ):
        rules = frames.KeepRules(last=2, every_steps=3)
        assert isinstance(trainer.open_run(devices, keep=rules), frames.RunOpened)
        save_nine(trainer)
        wait_until(lambda: steps(client) == [9, 8, 6, 3, 1])


def test_else_the_daemon_says_it(node_config: Path, socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write('[retention]\nkeep_last = 2\nevery = "1000w"\n')  # this century in two stretches
    with (
        node_daemon(node_config, socket_path),
        FakeTrainer(socket_path) as trainer,
        connected(socket_path) as client,
    ):
        trainer.open_run([Path("nvme0"), Path("nvme1")])
        save_nine(trainer)
        wait_until(lambda: steps(client) == [9, 8, 1])


def test_halves_go_when_they_are_given_up(socket_path: Path, devices: list[Path]) -> None:
    """Rank 1 fails again and again: what rank 0 wrote would never be complete, nor be collected."""
    with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run(devices, world_size=2)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        for step in range(1, 7):
            arena.save(CheckpointId(1, step), seed=step, slot=step % 2, world_size=2)
            trainer.event(frames.Persisted)
            trainer.send(frames.SealedEverywhere(attempt=1, step=step))
            if step > 1:
                trainer.send(frames.GiveUp(attempt=1, step=step, in_memory=True))
        wait_until(lambda: [path.name for path in devices[0].rglob("*.mf")] == ["1.1.0.mf"])
        assert 6 in [offer.step for offer in trainer.offers()]  # in memory still
        arena.close()


def test_rules_that_make_no_sense_are_refused(socket_path: Path, devices: list[Path]) -> None:
    with daemon_process(socket_path), FakeTrainer(socket_path) as trainer:
        reply = trainer.open_run(devices, keep=frames.KeepRules(last=0))
        assert isinstance(reply, frames.Failure)
        assert (reply.code, "last is 0" in reply.message) == ("ConfigError", True)
        assert isinstance(trainer.open_run(devices), frames.RunOpened)
