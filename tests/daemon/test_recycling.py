"""A daemon writes new segments over files of deleted checkpoints, says how much, and leaves none behind."""

import io
from contextlib import redirect_stdout
from pathlib import Path

from pausing import wait_until
from scraping import scrape

from everstep.core.ids import CheckpointId
from everstep.daemon.cli.main import main
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames


def save_six(trainer: FakeTrainer, devices: list[Path]) -> None:
    """Save steps 1 to 6, each when all but the two before it have been removed."""
    trainer.open_run([Path("nvme0"), Path("nvme1")], keep=frames.KeepRules(last=2))
    trainer.begin_attempt(1)
    arena = trainer.make_arena(trainer.layout())
    for step in range(1, 7):
        arena.save(CheckpointId(1, step), seed=step, slot=step % 2)
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        trainer.send(frames.SealedEverywhere(attempt=1, step=step))
        wait_until(lambda step=step: generation_count(devices) == min(step, 2))
    arena.close()


def generation_count(devices: list[Path]) -> int:
    return len({path.name for device in devices for path in device.glob("runs/*/*/data/*")})


def said(command: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(command) == 0
    return " ".join(out.getvalue().split())


def pool_bytes(client: ControlClient) -> list[int]:
    (store,) = client.status().stores
    return [device.pool_bytes for device in store.devices]


def test_files_of_deleted_checkpoints_are_written_again(
    node_config: Path, devices: list[Path], socket_path: Path
) -> None:
    with (
        node_daemon(node_config, socket_path),
        FakeTrainer(socket_path) as trainer,
        connected(socket_path) as client,
    ):
        save_six(trainer, devices)
        assert sum(pool_bytes(client)) > 0
        found = scrape(client.status().daemon.metrics_port)
        assert 0 < found["everstep_recycled_bytes_total"] < found["everstep_written_bytes_total"]
        (store,) = client.devices()
        by_metric = {str(path): found[f"everstep_device_pool_bytes{{{path}}}"] for path in devices}
        assert {device.path: device.pool_bytes for device in store.devices} == by_metric
        assert any(any(path.glob("pool/*")) for path in devices)
        for command in (["status"], ["device", "ls"]):
            assert "kept to be written over" in said(command)
    assert not any(any(path.glob("pool/*")) for path in devices)


def test_a_daemon_may_be_told_not_to(node_config: Path, devices: list[Path], socket_path: Path) -> None:
    with node_config.open("a") as file:
        file.write("[io]\nrecycle = false\n")
    with (
        node_daemon(node_config, socket_path),
        FakeTrainer(socket_path) as trainer,
        connected(socket_path) as client,
    ):
        save_six(trainer, devices)
        assert pool_bytes(client) == [0, 0]
        assert scrape(client.status().daemon.metrics_port)["everstep_recycled_bytes_total"] == 0
    assert not any((path / "pool").exists() for path in devices)
