"""A launcher asks a real daemon: well, with a drive that is sick, full or gone, and while it ends."""

import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_launcher import Answer, ask
from loop_disk import LoopDisk, skip_without
from pausing import Pause, Phase, pausing_daemon, wait_until
from scraping import scrape

from everstep.core.errors import ConfigError
from everstep.core.ids import CheckpointId
from everstep.daemon.config import load_config
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

NAMES = [Path("nvme0"), Path("nvme1")]
LEFT_BYTES = 8 << 20
"""Of a drive that is full for everstep, which leaves twice as much to others; a page can still be written."""


@pytest.fixture
def endpoint(node_config: Path, socket_path: Path) -> Path:
    """Where the daemon is to answer launchers."""
    path = socket_path.with_name("nvhcd.sock")
    node_config.write_text(f'{node_config.read_text()}[health_check]\nsocket = "{path}"\n')
    return path


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, which can be filled and taken away."""
    path = tmp_path / "drive"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "everstep-test", path]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)  # a test may have done it


@pytest.fixture
def on_drive(drive: Path, node_config: Path, endpoint: Path, devices: list[Path]) -> Path:
    """The endpoint of a node whose first device lies on the drive."""
    node_config.write_text(node_config.read_text().replace(f'"{devices[0]}"', f'"{drive}"'))
    return endpoint


def counted(socket_path: Path) -> dict[str, float]:
    """Return how often a launcher was told what."""
    with connected(socket_path) as client:
        samples = scrape(client.status().daemon.metrics_port)
    return {result: samples[f"everstep_health_checks_total{{{result}}}"] for result in ("well", "refused")}


def refused_by(answer: Answer, check: str, path: Path) -> str:
    """Check that the launcher leaves the node for this reason alone; return the sentence."""
    assert not answer.takes_node
    assert (answer.success, answer.exit_code) == (False, 1)
    assert answer.document["failed_checks"] == [check]
    assert answer.document["fail_count"] == 1
    assert str(path) in answer.error
    return answer.error


def test_a_well_node_is_taken(node_config: Path, endpoint: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path):
        answer = ask(endpoint)
        assert answer.takes_node
        assert (answer.exit_code, answer.error) == (0, "")
        assert answer.document == {"fail_count": 0, "failed_checks": [], "device_count": 2, "findings": []}
        assert ask(endpoint, args=[]).takes_node
        assert counted(socket_path) == {"well": 2, "refused": 0}
        assert stat.S_IMODE(endpoint.stat().st_mode) == 0o666
    assert not endpoint.exists(), "a launcher that finds no socket asks nobody"


def test_without_the_section_nobody_is_answered(node_config: Path) -> None:
    assert load_config(node_config).health_check.socket == ""


@pytest.mark.root
def test_a_drive_that_died_while_nobody_wrote_refuses(
    node_config: Path, endpoint: Path, devices: list[Path], socket_path: Path, tmp_path: Path
) -> None:
    skip_without("ext4")
    disk = LoopDisk(tmp_path, "ext4", "disk")
    try:
        disk.mount()
        (disk.path / "everstep").mkdir(mode=0o700)
        node_config.write_text(node_config.read_text().replace(str(devices[0]), str(disk.path / "everstep")))
        with node_daemon(node_config, socket_path):
            assert ask(endpoint).takes_node
            disk.cut()
            wait_until(lambda: not ask(endpoint).takes_node)  # a second's answers are shared
            said = refused_by(ask(endpoint), "everstep:suspect:nvme0", disk.path)
            assert "Input/output error" in said
            assert "replace it" in said
    finally:
        disk.remove()
    log = socket_path.with_name("daemon.log").read_text()
    assert log.count("health_check_changed may_start=False") == 1


def test_a_drive_on_which_a_write_failed_refuses_although_it_takes_writes_again(
    node_config: Path, endpoint: Path, devices: list[Path], socket_path: Path, tmp_path: Path
) -> None:
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run(NAMES)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        (devices[0] / "runs").rename(tmp_path / "away")
        arena.save(CheckpointId(1, 1), seed=1)
        assert isinstance(trainer.event(frames.DevicesChanged), frames.DevicesChanged)
        (tmp_path / "away").rename(devices[0] / "runs")
        assert "No such file" in refused_by(ask(endpoint), "everstep:suspect:nvme0", devices[0])
        arena.close()


@pytest.mark.root
def test_a_full_drive_refuses(node_config: Path, on_drive: Path, drive: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path):
        assert ask(on_drive).takes_node
        free_bytes = shutil.disk_usage(drive).free
        (drive / "filler").write_bytes(bytes(free_bytes - LEFT_BYTES))
        wait_until(lambda: not ask(on_drive).takes_node)
        said = refused_by(ask(on_drive), "everstep:full:nvme0", drive)
        assert "has no room: 8.0 MiB are free there" in said
        assert "make room" in said


@pytest.mark.root
def test_a_drive_that_was_unmounted_refuses_although_its_mount_point_takes_writes(
    node_config: Path, on_drive: Path, drive: Path, socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path):
        assert ask(on_drive).takes_node
        subprocess.run(["umount", "--lazy", drive], check=True)
        wait_until(lambda: not ask(on_drive).takes_node)
        assert "mount it" in refused_by(ask(on_drive), "everstep:missing:nvme0", drive)


def test_a_device_that_is_missing_from_the_start_refuses(
    node_config: Path, endpoint: Path, devices: list[Path], socket_path: Path, tmp_path: Path
) -> None:
    with node_daemon(node_config, socket_path):
        pass
    devices[1].rename(tmp_path / "away")
    with node_daemon(node_config, socket_path):
        refused_by(ask(endpoint), "everstep:missing:nvme1", devices[1])


def test_an_ending_daemon_refuses_until_it_has_ended(
    node_config: Path, endpoint: Path, socket_path: Path, pause: Pause
) -> None:
    phase = Phase("everstep.checkpoint.commit:head_of")
    with (
        pausing_daemon(pause, phase, node_config) as daemon,
        FakeTrainer(socket_path) as trainer,
    ):
        trainer.open_run(NAMES)
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        pause.reached(daemon)
        assert ask(endpoint).takes_node, "what is being written is no reason"
        daemon.terminate()
        wait_until(lambda: not ask(endpoint).takes_node)
        answer = ask(endpoint)
        assert answer.document["failed_checks"] == ["everstep:ending"]
        assert "would not find it" in answer.error
        pause.go()
        assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
        arena.close()
    assert not endpoint.exists()


def refuses_to_start(node_config: Path) -> str:
    """Return what a daemon says that ends at once."""
    command = [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "daemon", "--config", str(node_config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    return done.stderr


def test_it_takes_the_place_of_a_dead_service_but_not_of_a_living_one(
    node_config: Path, endpoint: Path, socket_path: Path
) -> None:
    endpoint.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(endpoint))
        other.listen()
        assert f"another service answers on {endpoint}" in refuses_to_start(node_config)
    assert endpoint.is_socket()
    with node_daemon(node_config, socket_path):
        assert ask(endpoint).takes_node


def test_it_does_not_listen_where_others_could_answer_in_its_place(
    node_config: Path, endpoint: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    node_config.write_text(node_config.read_text().replace(str(endpoint), str(shared / "nvhcd.sock")))
    assert f"others may write to {shared}" in refuses_to_start(node_config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('socket = "nvhcd.sock"', "name an absolute path"),
        (f'socket = "/{"x" * 107}"', "longer than 107 bytes"),
        ("socket_mode = 0o1777", "socket_mode is 0o1777"),
        ('refuse = ["sick"]', "names 'sick'.*missing, suspect, hanging, full, slow"),
    ],
)
def test_what_is_wrong_in_the_section_is_named(node_config: Path, line: str, words: str) -> None:
    node_config.write_text(f"{node_config.read_text()}[health_check]\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        load_config(node_config)
