"""The units as they are shipped, under a real systemd: sandboxed, started by their socket, killed, started again."""

import json
import random
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from pausing import SCRIPTS, Pause, Phase, wait_until
from systemd import PYTHON_HOME, Systemd, reason_against, systemd

from everstep.checkpoint.testing import load, opened
from everstep.core.ids import CheckpointId

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
SERVICE, SOCKET = "everstep@0.service", "everstep@0.socket"
ENVIRONMENT = {"EVERSTEP_SOCKET": "/run/everstep/0/data.sock", "EVERSTEP_PRIVATE_DAEMON": "never"}
PROGRAM = f"{sys.executable} -P {SCRIPTS / 'pausing_daemon.py'}"
DROP_IN = f"""
[Service]
ExecStart=
ExecStart={PROGRAM} daemon --config /mnt/%i.toml
ReadWritePaths=/mnt
StandardOutput=append:/mnt/log
StandardError=append:/mnt/log
# As shipped it sees no home folders, where the Python of a test may be.
ProtectHome=tmpfs
BindReadOnlyPaths={ROOT} {sys.prefix} {PYTHON_HOME}
"""
DRIVES = ("nvme0", "nvme1")
CONFIG = "[devices]\n" + "".join(f'{name} = "/mnt/{name}"\n' for name in DRIVES)
PERSIST = "everstep.daemon.devices.persist:persist_shard"


@pytest.fixture
def manager(tmp_path: Path) -> Generator[Systemd]:
    with systemd(tmp_path) as made:
        for name in DRIVES:
            (made.drives / name).mkdir(mode=0o700)
        (made.drives / "0.toml").write_text(CONFIG)
        for name in ("everstep@.service", "everstep@.socket"):
            made.put(name, (UNITS / name).read_text())
        made.put(f"{SERVICE}.d/test.conf", DROP_IN)
        made.ctl("start", SOCKET)
        yield made
        made.ctl("stop", SERVICE, SOCKET)


def saver(run: str, *seeds: int) -> list[str]:
    """Return the command of a process that saves through the service's socket."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    words = ["--run", run, "--size-bytes", 1 << 20, "--seeds", *seeds]
    return [str(each) for each in ("env", *variables, sys.executable, "-P", SCRIPTS / "saving.py", *words)]


def logged(manager: Systemd, event: str) -> list[dict[str, object]]:
    lines = (manager.drives / "log").read_text().splitlines()
    return [found for line in lines if line.startswith("{") and (found := json.loads(line))["event"] == event]


def saved(manager: Systemd) -> dict[CheckpointId, bytes]:
    """Return the content of each checkpoint that is complete."""
    with opened([manager.drives / name for name in DRIVES], read_only=True) as (store, _):
        (run,) = store.runs()
        return {
            info.checkpoint: load(run, run.manifest(info.checkpoint, 0))["weight"]
            for info in run.checkpoints()
        }


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(1 << 20)


def test_the_socket_starts_it_and_it_saves_in_its_sandbox(manager: Systemd) -> None:
    assert manager.shows(SERVICE, "ActiveState") == "inactive"
    manager.run(*saver("first", 1, 2))
    assert manager.shows(SERVICE, "ActiveState") == "active"
    assert [each["engine"] for each in logged(manager, "device_opened")] == ["aio", "aio"]
    assert saved(manager) == {CheckpointId(1, 1): content(1), CheckpointId(1, 2): content(2)}
    pid = manager.shows(SERVICE, "MainPID")
    status = dict(line.split(":\t", 1) for line in manager.run("cat", f"/proc/{pid}/status").splitlines())
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert int(manager.shows(SERVICE, "WatchdogTimestampMonotonic")) > 0
    manager.ctl("reload", SERVICE)
    wait_until(lambda: bool(logged(manager, "configuration_reloaded")))
    assert manager.shows(SERVICE, "MainPID") == pid


def test_what_was_sealed_when_it_was_killed_is_in_the_store_of_systemd_and_written_by_the_next_one(
    manager: Systemd,
) -> None:
    pause = Pause(manager.drives / "pause")
    settings = pause.environment(Phase(PERSIST)) | {"PAUSE_FOLDER": "/mnt/pause"}
    lines = [f'Environment="{name}={value}"' for name, value in settings.items()]
    manager.put(f"{SERVICE}.d/pause.conf", "\n".join(["[Service]", *lines]))
    with manager.start(*saver("first", 1)) as process:
        wait_until((pause.folder / "reached").exists)
        assert int(manager.shows(SERVICE, "NFileDescriptorStore")) == 2
        manager.put(f"{SERVICE}.d/pause.conf", "")
        manager.ctl("kill", "--kill-who=main", "--signal=SIGKILL", SERVICE)
        assert process.wait(60) != 0
    wait_until(lambda: manager.shows(SERVICE, "NRestarts") == "1")
    wait_until(lambda: bool(logged(manager, "shard_persisted")))
    assert len(logged(manager, "snapshot_adopted")) == 1
    assert (
        manager.shows(SERVICE, "NFileDescriptorStore") == "2"
    )  # for its trainer, when that is started again
    assert manager.shows(SERVICE, "ActiveState") == "active"
    assert saved(manager) == {CheckpointId(1, 1): content(1)}
