"""The private daemon that a trainer starts is a process of its own: nothing of the trainer's lives on in it."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from everstep.core.errors import DaemonUnavailableError
from everstep.core.version import VERSION
from everstep.hook.client import DaemonClient
from everstep.hook.starter import connect_or_start


@pytest.fixture
def started() -> Iterator[DaemonClient]:
    """A client whose daemon was started by this process, while that had an inheritable descriptor open."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    client = connect_or_start(VERSION, lambda event: None)
    os.close(writer)
    try:
        # End of file: the daemon, which has answered, does not hold the other end.
        os.set_blocking(reader, False)
        assert os.read(reader, 1) == b""
        yield client
    finally:
        os.close(reader)
        client.close()
        os.kill(client.welcome.pid, signal.SIGTERM)
        os.waitpid(client.welcome.pid, 0)


def proc(client: DaemonClient) -> Path:
    return Path(f"/proc/{client.welcome.pid}")


def open_files(client: DaemonClient) -> dict[int, str]:
    """Return what each descriptor of the daemon is."""
    found: dict[int, str] = {}
    for entry in (proc(client) / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found[int(entry.name)] = str(entry.readlink())
    return found


def test_it_has_a_session_of_its_own(started: DaemonClient) -> None:
    """No terminal's hang-up and no signal to the trainer's group reaches it."""
    pid = started.welcome.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid != os.getsid(0)


def test_it_holds_no_directory_and_no_file_of_the_trainer(started: DaemonClient) -> None:
    assert (proc(started) / "cwd").readlink() == Path("/")
    folder = Path(os.environ["EVERSTEP_SOCKET"]).parent
    links = open_files(started)
    for _ in range(20):  # what it opens and closes again is its own business
        links = dict(links.items() & open_files(started).items())
    assert links[0] == "/dev/null"
    assert links[1] == links[2] == str(folder / "daemon.log")
    own = ("socket:", "anon_inode:", "pipe:", str(folder), "/dev/null")
    assert [name for name in links.values() if not name.startswith(own)] == []


def test_what_it_writes_is_its_users_alone(started: DaemonClient) -> None:
    (umask,) = [line for line in (proc(started) / "status").read_text().splitlines() if "Umask" in line]
    assert umask.split()[1] == "0077"


def test_none_is_started_where_the_node_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_PRIVATE_DAEMON", "never")
    with pytest.raises(DaemonUnavailableError, match="EVERSTEP_PRIVATE_DAEMON is 'never'") as caught:
        connect_or_start(VERSION, lambda event: None)
    assert caught.value.hint == "start the node's: everstep daemon --config FILE"
    assert list(Path(os.environ["EVERSTEP_SOCKET"]).parent.glob("daemon*")) == []
