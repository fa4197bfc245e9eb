"""A training that goes on over the death of a node's daemon hears what became of the checkpoint that was under way."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pausing import Pause, Phase, wait_until
from service_manager import ServiceManager
from torch import nn

import everstep
from everstep.proto import frames

SOON_S = 20.0
"""Far below the ten minutes that a last checkpoint may take."""
PERSIST = "everstep.daemon.devices.persist:persist_shard"


@pytest.fixture
def socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run" / "data.sock"
    path.parent.mkdir(mode=0o700)
    monkeypatch.setenv("EVERSTEP_SOCKET", str(path))
    monkeypatch.setenv("EVERSTEP_PRIVATE_DAEMON", "never")
    return path


@pytest.fixture
def manager(tmp_path: Path, socket_path: Path) -> Iterator[ServiceManager]:
    for name in ("d0", "d1"):
        (tmp_path / name).mkdir()
    config = tmp_path / "node.toml"
    config.write_text(
        f'[devices]\nnvme0 = "{tmp_path}/d0"\nnvme1 = "{tmp_path}/d1"\n[daemon]\nsocket = "{socket_path}"\n'
    )
    made = ServiceManager(tmp_path, config)
    yield made
    made.close()


def test_what_the_next_daemon_has_written_did_not_fail(
    manager: ServiceManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pause = Pause(tmp_path / "pause")
    manager.start(pause.environment(Phase(PERSIST)))
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING),
        everstep.attach(
            "outlived", model=model, optimizer=optimizer, storage=["nvme0", "nvme1"], every=1
        ) as run,
    ):

        def step() -> None:
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()

        def sealed() -> bool:
            if not run.report().checkpoints_sealed:
                step()
            return (pause.folder / "reached").exists()

        wait_until(sealed)
        under_way = f"{run.attempt}.{run.steps}"
        manager.kill()

        def has_failed() -> bool:
            step()
            return any(each.startswith(under_way) for each in run.report().failures)

        wait_until(has_failed)
        manager.start()

        def is_known() -> bool:
            step()
            return "checkpoint_outlived" in caplog.text

        wait_until(is_known)
        assert f"checkpoint={under_way}" in caplog.text
        assert not any(each.startswith(under_way) for each in run.report().failures)
    assert run.report().failures == ()


def test_what_the_next_daemon_has_of_its_devices_is_told(
    manager: ServiceManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager.start()
    with (
        caplog.at_level(logging.WARNING),
        everstep.attach("outlived", model=nn.Linear(8, 8), storage=["nvme0", "nvme1"], every=10**6) as run,
    ):
        run.step()
        assert run.report().notes == ()
        manager.kill()
        (tmp_path / "d1").rename(tmp_path / "unplugged")
        manager.start()

        def is_back() -> bool:
            run.step()
            return "daemon_reconnected" in caplog.text

        wait_until(is_back)
        notes = run.report().notes
        assert any(f"device {tmp_path}/d1 is not used any more" in note for note in notes), notes
        assert any("nothing is deleted" in note for note in notes), notes


def test_who_has_lost_the_run_waits_for_no_daemon_as_it_closes(
    manager: ServiceManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.start()
    with caplog.at_level(logging.WARNING):
        run = everstep.attach("lost", model=nn.Linear(8, 8), storage=["nvme0", "nvme1"], every=10**6)
        run.step()
        manager.kill()

        def fence() -> None:
            wait_until(lambda: "daemon_unavailable" in caplog.text)
            run.on_event(frames.Fenced(message="attempt 2 has begun"))  # as a daemon says of another trainer

        fencing = threading.Thread(target=fence)
        fencing.start()
        began_s = time.monotonic()
        run.close()
        assert time.monotonic() - began_s < SOON_S
        fencing.join()
    assert "checkpoint_skipped run=lost step=2 reason=attempt 2 has begun" in caplog.text
