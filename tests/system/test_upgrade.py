"""From the version before this one to this one and back: over one store, and across one data socket and control API."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pausing import Pause, Phase, wait_until
from service_manager import ServiceManager
from versions import Version, earlier_version, this_version

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.hook.trainer_testing import Job, Trainer
from everstep.proto import frames

LATER_DAEMON = Path(__file__).resolve().parents[1] / "scripts" / "later_daemon.py"
PERSIST = "everstep.daemon.devices.persist:persist_shard"
DEADLINE_S = 80.0
LONG = ("--step-s", "0.1", "--every", "2", "--epochs", "500")
CLI = ("-m", "everstep.daemon.cli.main")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return earlier_version(tmp_path_factory.mktemp("earlier"))


@contextmanager
def daemon_of(
    version: Version, node: "Node", program: Sequence[str] = CLI
) -> Generator["subprocess.Popen[bytes]"]:
    """The node's daemon, of a version; ended by SIGTERM with the block, when all that is sealed is written."""
    environment = {**os.environ, **version.environment}
    with node_daemon(node.config, node.socket_path, program=program, environment=environment) as process:
        yield process


def eventually(reached: Callable[[], bool]) -> None:
    """Wait for it; a trainer looks for its daemon ever more rarely, every half minute in the end."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


class Node:
    """One store and one run, used by both versions in turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.storage = [folder / "d0", folder / "d1"]
        for path in self.storage:
            path.mkdir()
        self.socket_path = Path(os.environ["EVERSTEP_SOCKET"])
        self.config = folder / "node.toml"
        devices = "".join(f'nvme{number} = "{path}"\n' for number, path in enumerate(self.storage))
        self.config.write_text(f'[daemon]\nsocket = "{self.socket_path}"\n[devices]\n{devices}')
        self._jobs: list[Job] = []

    def start(self, version: Version, *arguments: str) -> Trainer:
        """Start a trainer of a version."""
        job = Job(self._folder / f"job{len(self._jobs)}", version.script, version.start)
        self._jobs.append(job)
        return job.start(*arguments, storage=[Path("nvme0"), Path("nvme1")])

    def newest(self, version: Version) -> CheckpointId:
        """Return the newest checkpoint, as a version's command line says; without a daemon it reads the devices."""
        done = version.run(*CLI, "ls", "small", "--json", "--storage", *map(str, self.storage))
        assert done.returncode == 0, done.stderr
        return max(CheckpointId.parse(each["checkpoint"]) for each in json.loads(done.stdout)["checkpoints"])

    def end(self) -> None:
        """Kill what is left."""
        for job in self._jobs:
            job.end()


@pytest.fixture
def node(tmp_path: Path) -> Generator[Node]:
    made = Node(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_up_and_down_again_over_one_store_the_run_goes_on_bit_for_bit(
    node: Node, earlier: Version, undisturbed: str
) -> None:
    this, restored = this_version(), list[object]()
    for version, until in ((earlier, 8), (this, 13), (earlier, 18)):
        with daemon_of(version, node):
            trainer = node.start(version, "--until", str(until))
            restored.append(trainer.until_key("restored")["restored"])
            trainer.until_key("waiting")
            trainer.kill()
    with daemon_of(this, node):
        last = node.start(this)
        first = last.until_key("restored")
        restored.append(first["restored"])
        (done,) = last.done()
    assert restored == [None, "1.5", "2.10", "3.15"]
    assert first["source"] == "disk"
    assert (done["done"], done["failures"], first["skipped"]) == (undisturbed, [], [])
    for version in (earlier, this):  # and each sees all of it, whoever wrote it
        storage = ["--storage", *map(str, node.storage)]
        listed = version.run(*CLI, "ls", "small", "--json", *storage)
        verified = version.run(*CLI, "verify", "small", *storage)
        assert listed.returncode == verified.returncode == 0, (listed, verified)
        assert "4.25" in listed.stdout
        assert "3.15" in listed.stdout


@pytest.mark.parametrize("is_upgraded", ["daemon", "trainer"])
def test_versions_on_both_ends_of_the_data_socket_work_or_say_why_not(
    node: Node, earlier: Version, undisturbed: str, is_upgraded: str
) -> None:
    this = this_version()
    service, client = (this, earlier) if is_upgraded == "daemon" else (earlier, this)
    with daemon_of(service, node):
        trainer = node.start(client)
        if service.protocol() == client.protocol():
            (done,) = trainer.done()
            assert (done["done"], done["failures"]) == (undisturbed, [])
        else:
            assert trainer.finish() != 0
            assert "VersionMismatchError" in trainer.log
            assert "use one version of everstep" in trainer.log


def test_the_daemon_is_upgraded_and_downgraded_beneath_a_trainer(node: Node, earlier: Version) -> None:
    """Every daemon writes what is sealed before it ends, and the next one takes its clients over."""
    this = this_version()
    if this.protocol() != earlier.protocol():
        pytest.skip("the protocol has changed: see test_a_daemon_of_another_protocol_…")
    with daemon_of(earlier, node):
        trainer = node.start(earlier, *LONG)
        trainer.until_step(6)
    with daemon_of(this, node):
        eventually(lambda: trainer.log.count("daemon_reconnected") == 1)
        upgraded = node.newest(this)
        eventually(lambda: node.newest(this) > upgraded)
    with daemon_of(earlier, node):
        eventually(lambda: trainer.log.count("daemon_reconnected") == 2)
        downgraded = node.newest(earlier)
        eventually(lambda: node.newest(earlier) > downgraded)
        newest = node.newest(earlier)
        trainer.kill()
    with daemon_of(this, node):
        again = node.start(this, "--until", "1")
        restored = again.until_key("restored")["restored"]
        again.kill()
    assert CheckpointId.parse(restored) >= newest > downgraded > upgraded
    # What was being copied when a daemon ended, after all that was sealed was written, is said to have failed.
    failed = [line for line in trainer.log.splitlines() if "checkpoint_failed" in line]
    assert len(failed) <= 2, failed
    assert all(re.search("reason=the (connection to the )?daemon ", line) for line in failed), failed


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
def test_what_was_sealed_is_written_by_the_other_version_after_a_crash(
    node: Node, earlier: Version, tmp_path: Path, is_up: bool
) -> None:
    """The service manager keeps the arena; whoever it starts next finds the snapshot there."""
    this = this_version()
    if this.protocol() != earlier.protocol():
        pytest.skip("the protocol has changed: this test's trainer could not speak to both")
    crashing, adopting = (earlier, this) if is_up else (this, earlier)
    node.socket_path.parent.mkdir(mode=0o700, exist_ok=True)
    checkpoint, pause = CheckpointId(1, 7), Pause(tmp_path / "pause")
    with closing(ServiceManager(tmp_path, node.config)) as manager:
        manager.start(dict(crashing.environment) | pause.environment(Phase(PERSIST)))
        with FakeTrainer(node.socket_path) as trainer:
            assert isinstance(trainer.open_run([Path("nvme0"), Path("nvme1")]), frames.RunOpened)
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(checkpoint, seed=1)
            content = arena.content(1)
            wait_until((pause.folder / "reached").exists)
            manager.kill()
            arena.close()
        assert manager.names()
        manager.start(adopting.environment)
        wait_until(lambda: not manager.names())
        assert manager.stop() == 0
        assert manager.log().count("snapshot_adopted") == 1
    with opened(node.storage, read_only=True) as (store, _):
        (run,) = store.runs()
        assert load(run, run.manifest(checkpoint, 0)) == content


def test_command_lines_of_both_versions_speak_to_daemons_of_both(node: Node, earlier: Version) -> None:
    this = this_version()
    with daemon_of(earlier, node):
        node.start(earlier, "--epochs", "1").done()
    for service in (this, earlier):
        with daemon_of(service, node):
            for client in (this, earlier):
                status = client.run(*CLI, "status", "--json")
                assert status.returncode == 0, status.stdout + status.stderr
                assert len(json.loads(status.stdout)["stores"][0]["devices"]) == 2
                assert client.run(*CLI, "ls", "small").returncode == 0
                assert client.run(*CLI, "verify", "small").returncode == 0


def test_a_daemon_of_another_protocol_stops_no_trainer_and_loses_nothing(node: Node) -> None:
    this = this_version()
    with daemon_of(this, node):
        trainer = node.start(this, *LONG)
        trainer.until_step(6)
    with daemon_of(this, node, program=(str(LATER_DAEMON),)):
        eventually(lambda: "speaks protocol" in trainer.log)
        before = node.newest(this)
        status = this.run(*CLI, "status", "--json")
        assert status.returncode == 0, status.stdout + status.stderr
    assert "use one version of everstep" in trainer.log
    assert trainer.process.poll() is None
    with daemon_of(this, node):
        eventually(lambda: "daemon_reconnected" in trainer.log)
        eventually(lambda: node.newest(this) > before)
        trainer.kill()
