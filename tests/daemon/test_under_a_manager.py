"""A node's daemon under a service manager: heartbeats end when something stands still; its socket comes before it."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pausing import Pause, Phase, wait_until
from service_manager import ServiceManager

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer
from everstep.daemon.watchdog import watchdog_period_s
from everstep.proto import frames

WATCHDOG = {"WATCHDOG_USEC": "400000"}
NAMES = [Path("nvme0"), Path("nvme1")]


@pytest.fixture
def manager(tmp_path: Path, node_config: Path, socket_path: Path) -> Iterator[ServiceManager]:
    socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    made = ServiceManager(tmp_path, node_config)
    yield made
    made.close()


def more_beats(manager: ServiceManager, count: int = 3) -> None:
    """Return when so many heartbeats more have come."""
    target = manager.beats() + count
    wait_until(lambda: manager.beats() >= target)


def test_heartbeats_come_until_the_process_stands_still(manager: ServiceManager) -> None:
    manager.start(WATCHDOG)
    more_beats(manager)
    assert manager.process is not None
    manager.process.send_signal(signal.SIGSTOP)
    manager.beats_for(0.1)  # what was on its way
    assert manager.beats_for(1.0) == 0
    manager.process.send_signal(signal.SIGCONT)
    more_beats(manager)
    assert manager.stop() == 0


def test_heartbeats_end_while_a_device_moves_nothing_of_what_it_has(
    manager: ServiceManager, socket_path: Path, pause: Pause
) -> None:
    manager.start(WATCHDOG | pause.environment(Phase("everstep.checkpoint.engine_lanes:LanedEngine.run")))
    with FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        more_beats(manager)
        arena.save(CheckpointId(1, 1), seed=1)
        wait_until(lambda: "lane_stuck" in manager.log())
        manager.beats_for(0.1)
        assert manager.beats_for(1.0) == 0
        pause.go()
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        more_beats(manager)
        arena.close()
    assert manager.stop() == 0


def test_heartbeats_end_while_the_loop_of_the_metrics_port_stands_still(
    manager: ServiceManager, socket_path: Path, pause: Pause
) -> None:
    manager.start(WATCHDOG | pause.environment(Phase("everstep.daemon.web.site:Site._metrics")))
    more_beats(manager)  # a loop that nobody asks for anything stands still as well, and goes on when asked
    port = json.loads(socket_path.with_name("daemon.json").read_bytes())["metrics_port"]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as scraper:
        scraper.sendall(f"GET /metrics HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
        wait_until(lambda: "lane_stuck" in manager.log())
        assert "metrics port" in manager.log()
        manager.beats_for(0.1)  # what was on its way
        assert manager.beats_for(1.0) == 0
        pause.go()
        more_beats(manager)
        assert scraper.recv(100).startswith(b"HTTP/1.1 200")
    assert manager.stop() == 0


def test_the_watchdog_of_another_process_is_not_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_period_s() == 2.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_period_s() is None
    monkeypatch.delenv("WATCHDOG_PID")
    for wrong in ("", "0", "soon", "-4"):
        monkeypatch.setenv("WATCHDOG_USEC", wrong)
        assert watchdog_period_s() is None


_TRAINING = """
import torch, everstep
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with everstep.attach("job", model=model, optimizer=optimizer, storage=["nvme0", "nvme1"], every=1) as run:
    print("restored", run.restore(), flush=True)
    for _ in range(3):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        run.step()
        assert run.wait(30)
    print("complete", run.report().checkpoints_complete)
"""


def test_a_trainer_that_comes_before_the_daemon_waits_on_the_socket_of_the_manager(
    manager: ServiceManager, socket_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        inode = socket_path.stat().st_ino
        manager.sockets = [("everstep-data", listener.fileno())]
        training = subprocess.Popen([sys.executable, "-c", _TRAINING], stdout=subprocess.PIPE, text=True)
        assert select.select([listener], [], [], 60)[0], "nobody has come"
        manager.start()  # as the manager does when somebody connects
        said, _ = training.communicate(timeout=60)
        assert training.returncode == 0
        assert int(said.split()[-1]) >= 1, said
        assert manager.beats() == 0  # nobody asked for them
        assert manager.stop() == 0
        assert socket_path.stat().st_ino == inode  # the next one will answer there
        manager.start()
        with FakeTrainer(socket_path) as trainer:
            assert isinstance(trainer.hello, frames.Welcome)
        assert manager.stop() == 0


def test_what_is_no_listening_socket_is_said_to_be_none(manager: ServiceManager) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as wrong:
        wrong.bind(("127.0.0.1", 0))
        wrong.listen()
        manager.sockets = [("everstep-data", wrong.fileno())]
        manager.start(ready=False)
        assert manager.process is not None
        assert manager.process.wait(30) == 2
    assert "does not listen on a unix stream socket" in manager.log()


def test_a_second_socket_is_refused(manager: ServiceManager, socket_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as two,
    ):
        one.bind(str(socket_path))
        two.bind(f"{socket_path}.2")
        one.listen()
        two.listen()
        manager.sockets = [("everstep-data", one.fileno()), ("everstep-data", two.fileno())]
        manager.start(ready=False)
        assert manager.process is not None
        assert manager.process.wait(30) == 2
    assert "more than one socket" in manager.log()
