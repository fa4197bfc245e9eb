"""The daemon's process: what it says when it cannot start, how it ends, and its engines in processes of their own."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

from pausing import Pause, Phase, pausing_daemon, wait_until

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, daemon_process, node_daemon
from everstep.proto import frames

EVERSTEP = Path(sys.executable).with_name("everstep")
PUBLISHING = Phase("everstep.checkpoint.commit:head_of")


def refused(config: Path) -> tuple[int, str]:
    """Return how `everstep daemon` ends that cannot start, and its last words."""
    done = subprocess.run(
        [EVERSTEP, "daemon", "--config", config], capture_output=True, text=True, timeout=30, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Group" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("everstep: ")]
    assert len(said) == 1, done.stderr
    return done.returncode, done.stderr


class TestStarting:
    def test_a_missing_device_directory_is_named(self, node_config: Path, devices: list[Path]) -> None:
        devices[1].rmdir()
        code, said = refused(node_config)
        assert code in (1, 2)
        assert str(devices[1]) in said

    def test_a_used_metrics_port_is_named(self, node_config: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with node_config.open("a") as file:
                file.write(f"[metrics]\nport = {port}\n")
            code, said = refused(node_config)
        assert code == 2
        assert f"metrics.port {port}" in said
        assert "0 takes any" in said

    def test_a_socket_in_use_is_named_with_its_holder(
        self, node_config: Path, socket_path: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        other.mkdir()
        with daemon_process(socket_path) as holder, FakeTrainer(socket_path) as trainer:
            trainer.open_run([other])
            code, said = refused(node_config)
        assert code == 2
        assert f"another daemon (private, pid {holder.pid}) listens on {socket_path}" in said

    def test_an_idle_private_daemon_makes_way(self, node_config: Path, socket_path: Path) -> None:
        with daemon_process(socket_path) as holder, node_daemon(node_config, socket_path) as node:
            assert holder.wait(30) == 0
            with connected(socket_path) as client:
                assert client.status().daemon.pid == node.pid

    def test_a_device_in_use_is_named_with_its_holder(
        self, node_config: Path, devices: list[Path], tmp_path: Path
    ) -> None:
        other = tmp_path / "s" / "data.sock"
        with daemon_process(other) as holder, FakeTrainer(other) as trainer:
            trainer.open_run(devices)
            code, said = refused(node_config)
            assert f"pid {holder.pid}" in said
        assert code == 1


class TestEnding:
    def test_sigterm_drains_what_is_sealed(
        self, socket_path: Path, devices: list[Path], pause: Pause
    ) -> None:
        """The data are written, the manifest is not: without draining there would be no checkpoint."""
        with pausing_daemon(pause, PUBLISHING) as daemon, FakeTrainer(socket_path) as trainer:
            trainer.open_run(devices)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 7), seed=3)
            pause.reached(daemon)
            with connected(socket_path) as client:
                daemon.terminate()
                wait_until(lambda: client.status().daemon.is_draining)
            assert daemon.poll() is None
            assert not list(devices[0].rglob("*.mf"))
            pause.go()
            assert daemon.wait(20) == 0
            content = arena.content(3)
            arena.close()
        with opened(devices, read_only=True) as (store, _):
            (run,) = store.runs()
            assert load(run, run.manifest(CheckpointId(1, 7), 0)) == content

    def test_sigint_ends_a_node_daemon(self, node_config: Path, socket_path: Path) -> None:
        with node_daemon(node_config, socket_path) as daemon:
            daemon.send_signal(signal.SIGINT)
            assert daemon.wait(10) == 0
        assert not socket_path.exists()


class TestEngines:
    def test_in_processes_of_their_own(
        self, node_config: Path, devices: list[Path], socket_path: Path
    ) -> None:
        """A whole save, and a whole restore from the devices, though no thread of the daemon moves a byte."""
        with node_config.open("a") as file:
            file.write("[io]\nprocess = true\n")
        checkpoint = CheckpointId(1, 7)
        with node_daemon(node_config, socket_path) as daemon:
            with FakeTrainer(socket_path) as trainer:
                trainer.open_run([Path("nvme0"), Path("nvme1")])
                trainer.begin_attempt(1)
                arena = trainer.make_arena(trainer.layout())
                arena.save(checkpoint, seed=3)
                assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
                trainer.ask(frames.Detach(request_id=99))
                arena.close()
                with connected(socket_path) as client:
                    engines = [device.engine for device in client.status().stores[0].devices]
                assert all(name.endswith("in a process") for name in engines)
            with FakeTrainer(socket_path) as trainer:
                trainer.open_run([Path("nvme0"), Path("nvme1")])
                trainer.begin_attempt(2)
                shard = trainer.fetch(checkpoint)
                assert isinstance(shard, frames.Streaming)
                chunks, end = trainer.stream(shard)
                assert not end.code
                assert set(chunks) == {0, 1}
            daemon.kill()  # the fixture for leftovers looks for its children
