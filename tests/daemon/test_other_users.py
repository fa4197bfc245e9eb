"""Another user of the node, by its real uid: what concerns everybody's devices is not for it, nor are others' runs."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

pytestmark = pytest.mark.root

OTHER_UID = 65534

CHILD = f"""
import json, os, sys
from pathlib import Path
import everstep.daemon.control.service  # nothing is imported once this user may read nothing
from everstep.core.errors import EverstepError
from everstep.daemon.control.client import connected

os.setgroups([])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
device = sys.argv[2]

def refusal(call):
    try:
        return repr(call())
    except EverstepError as error:
        return str(error)

with connected(Path(sys.argv[1])) as client:
    said = {{
        "drain": refusal(lambda: client.drain_device(device, cancel=False)),
        "cancel": refusal(lambda: client.drain_device(device, cancel=True)),
        "retire": refusal(lambda: client.retire_device(device, force=True, dry_run=False)),
        "dry": refusal(lambda: client.retire_device(device, force=True, dry_run=True)),
        "readmit": refusal(lambda: client.readmit_device(device)),
        "inspect": refusal(client.inspect_stores),
        "stop": refusal(client.stop),
    }}
    parts = [len(each.parts) for store in client.devices() for each in store.devices]
    runs = [run.name for run in client.status().runs]
print(json.dumps({{"said": said, "parts": parts, "runs": runs}}))
"""


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder that others can be let into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    (folder / "s").mkdir(mode=0o700)
    yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


def open_to_others(socket_path: Path) -> None:
    """As a service manager does that makes the sockets for a group of users."""
    for path, mode in (
        (socket_path.parents[1], 0o711),
        (socket_path.parent, 0o711),
        (socket_path, 0o666),
        (control_socket_path(socket_path), 0o666),
    ):
        path.chmod(mode)


def test_device_calls_are_for_the_operator(node_config: Path, devices: list[Path], socket_path: Path) -> None:
    with node_daemon(node_config, socket_path), FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")], name="mine")
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        trainer.event(frames.Persisted)
        arena.close()
        open_to_others(socket_path)
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(socket_path), str(devices[0])],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        refused = f"(PERMISSION_DENIED): this daemon belongs to uid {os.getuid()}"
        assert {name: refused in text for name, text in found["said"].items()} == dict.fromkeys(
            ("drain", "cancel", "retire", "dry", "readmit", "inspect", "stop"), True
        )
        assert (found["parts"], found["runs"]) == ([0, 0], [])
        with connected(socket_path) as client:
            (store,) = client.devices()
            assert [len(device.parts) for device in store.devices] == [1, 1]
            assert {device.state.value for device in store.devices} == {"ok"}
