"""Another user of the node, by its real uid: what somebody else has cached is not there for it, in any way."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cached import HostileReader

from everstep.daemon.testing import daemon_process
from everstep.proto import frames

pytestmark = pytest.mark.root

OTHER_UID = 65534
SUPPORT = Path(__file__).resolve().parents[2] / "support"

CHILD = f"""
import json, os, sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
import everstep.daemon.control.service  # nothing is imported once this user may read nothing
from cached import HostileReader
from everstep.daemon.control.client import connected
from everstep.proto import frames

os.setgroups([])
os.setresgid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
os.setresuid({OTHER_UID}, {OTHER_UID}, {OTHER_UID})
said = {{}}
for name, count in (("theirs", 7), ("theirs", 9), ("nobodys", 7)):
    with HostileReader(Path(sys.argv[1])) as reader:
        reply = reader.open_cache(count, fingerprint=name)
        said[f"{{name}} {{count}}"] = [
            type(reply).__name__, getattr(reply, "code", ""), getattr(reply, "reason", ""),
            reader.view.header().published_count if hasattr(reader, "view") else None,
        ]
        if count == 7:
            reader.stage()
            said[f"fill {{name}}"] = reader.fill({{0: b"mine"}}).published_count
try:
    os.listdir(f"/proc/{{sys.argv[2]}}/fd")
    said["fds"] = "open"
except PermissionError:
    said["fds"] = "closed"
with connected(Path(sys.argv[1])) as client:
    said["caches"] = [(each.fingerprint, each.uid) for each in client.status().caches]
print(json.dumps(said))
"""


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """In a folder that others can be let into, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="es-users-", dir="/tmp"))
    (folder / "s").mkdir(mode=0o700)
    yield folder / "s" / "data.sock"
    shutil.rmtree(folder)


def test_not_found_and_not_yours_look_alike(socket_path: Path) -> None:
    with daemon_process(socket_path) as process, HostileReader(socket_path) as mine:
        mine.open_cache(7, fingerprint="theirs")
        mine.stage()
        filled = mine.fill({0: b"secret"})
        assert isinstance(filled, frames.CacheFilled)
        assert filled.published_count == 1
        for path, mode in (
            (socket_path.parents[1], 0o711),
            (socket_path.parent, 0o711),
            (socket_path, 0o666),
            (socket_path.with_name("control.sock"), 0o666),
        ):
            path.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, str(socket_path), str(process.pid)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["theirs 7"] == said["nobodys 7"] == ["CacheOpened", "", "", 0]
        assert said["theirs 9"][:2] == ["Failure", "UsageError"], "its own cache has 7"
        assert said["fill theirs"] == said["fill nobodys"] == 1
        assert said["fds"] == "closed"
        assert said["caches"] == [["theirs", OTHER_UID], ["nobodys", OTHER_UID]]
        assert mine.found(0) == b"secret"
        assert os.fstat(mine.arena_fd).st_mode & 0o777 == 0o400
