"""Another user of the node, by its real uid: it may look, and sees nothing of what others do."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from asking import Site

from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

pytestmark = pytest.mark.root

OTHER_UID = 65534

CHILD = f"""
import os, sys
from pathlib import Path
import everstep.daemon.control.service  # nothing is imported once this user may read nothing
from everstep.daemon.control.client import connected

os.setgroups([])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
with connected(Path(sys.argv[1])) as client:
    print(client.open_web_session()[0])
"""


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder that others can be let into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    (folder / "s").mkdir(mode=0o700)
    yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


def test_a_user_sees_its_own_runs_only(node_config: Path, socket_path: Path) -> None:
    with node_daemon(node_config, socket_path) as process, FakeTrainer(socket_path) as trainer:
        trainer.open_run([Path("nvme0"), Path("nvme1")], name="secret-project")
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 1), seed=1)
        trainer.event(frames.Persisted)
        arena.close()
        for path, mode in (
            (socket_path.parents[1], 0o711),
            (socket_path.parent, 0o711),
            (socket_path, 0o666),
            (control_socket_path(socket_path), 0o666),
        ):
            path.chmod(mode)
        url = subprocess.check_output(
            [sys.executable, "-c", CHILD, str(socket_path)], text=True, timeout=60
        ).strip()
        with connected(socket_path) as client:
            site = Site(client, client.status().daemon.metrics_port, process.pid)
            parts = urlsplit(url)
            told = site.ask(f"{parts.path}?{parts.query}")
            theirs = site.ask(
                "/api/state", headers={"Cookie": told.headers["Set-Cookie"].partition(";")[0]}
            ).body
            mine = json.loads(site.ask("/api/state", headers=site.log_in()).body)
    assert b"secret-project" not in theirs
    found = json.loads(theirs)
    assert (found["runs"], found["sees_all"], found["daemon"]["persisted_count"]) == ([], False, None)
    assert not [event for event in found["events"] if event["run"]]
    assert [run["name"] for run in mine["runs"]] == ["secret-project"]
    assert mine["sees_all"]
