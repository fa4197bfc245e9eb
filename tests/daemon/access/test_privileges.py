"""What a daemon that was started as root keeps of it."""

import contextlib
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from users import UIDS, begun, let_in, save, trainer_of

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import node_daemon

CAP_IPC_LOCK = 1 << 14


def facts_of(pid: int) -> dict[str, str]:
    return facts_in(Path(f"/proc/{pid}/status").read_text())


def statuses_of_threads(pid: int) -> Iterator[tuple[int, dict[str, str]]]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gRPC ends some of its own
            yield int(task.name), facts_in((task / "status").read_text())


def facts_in(text: str) -> dict[str, str]:
    lines = text.splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@pytest.mark.root
@pytest.mark.parametrize("users", [(), UIDS[:3]], ids=["for itself", "for several users"])
def test_root_without_its_rights(node_config: Path, socket_path: Path, users: tuple[int, ...]) -> None:
    if users:
        let_in(node_config, socket_path, [str(uid) for uid in users])
    with node_daemon(node_config, socket_path) as daemon, contextlib.ExitStack() as attached:
        for uid in (0, *users[:2]):  # each is served, and goes on while is looked
            trainer = attached.enter_context(trainer_of(uid, socket_path))
            arena = begun(trainer, f"of-{uid}")
            attached.callback(arena.close)
            save(trainer, arena, CheckpointId(1, 1), seed=uid)
        facts = facts_of(daemon.pid)
        for key in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd"):
            assert int(facts[key], 16) & ~CAP_IPC_LOCK == 0, (key, facts[key])
        assert facts["NoNewPrivs"] == "1"
        assert facts["Groups"] == ""
        assert set(facts["Uid"].split()) == {"0"}
        statuses = dict(statuses_of_threads(daemon.pid))  # a thread has rights of its own
        assert daemon.pid in statuses
        for thread, status in statuses.items():
            assert int(status["CapEff"], 16) & ~CAP_IPC_LOCK == 0, thread


CHILD = """
import os
from everstep.daemon.access.privileges import drop_privileges  # before this user may read nothing of Python's
drop_privileges("nobody")
os.write(1, os.read(os.open("/proc/self/status", os.O_RDONLY), 65536))
"""


@pytest.mark.root
def test_it_becomes_the_user_that_the_configuration_names() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CHILD], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    nobody, facts = pwd.getpwnam("nobody"), facts_in(done.stdout.decode())
    assert set(facts["Uid"].split()) == {str(nobody.pw_uid)}
    assert set(facts["Gid"].split()) == {str(nobody.pw_gid)}
    assert facts["Groups"] == ""
    assert facts["NoNewPrivs"] == "1"
    for key in ("CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd"):
        assert int(facts[key], 16) & ~CAP_IPC_LOCK == 0, (key, facts[key])


@pytest.mark.root
@pytest.mark.parametrize("user", ["", "nobody"])
def test_root_that_was_left_no_capability_stays_itself_and_becomes_nobody_else(user: str) -> None:
    """As a service manager starts it: with an empty bounding set."""
    code = f"from everstep.daemon.access.privileges import drop_privileges\ndrop_privileges({user!r})"
    done = subprocess.run(
        ["setpriv", "--bounding-set=-all", sys.executable, "-P", "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (not user), done.stderr
    assert ("daemon.user is 'nobody', and this daemon may not become it" in done.stderr) == bool(user)


def test_a_user_that_is_not_there_is_refused(node_config: Path, socket_path: Path) -> None:
    node_config.write_text(node_config.read_text() + 'user = "nobody-at-all"\n')
    with (
        pytest.raises(AssertionError, match="'nobody-at-all', whom this machine does not know"),
        node_daemon(node_config, socket_path),
    ):
        pass
