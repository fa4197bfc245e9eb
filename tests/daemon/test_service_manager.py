"""What a service manager is told, on a real socket."""

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.daemon.service_manager import notify
from everstep.daemon.testing import daemon_process, node_daemon


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def test_a_nodes_daemon_is_ready_once_it_answers(
    manager: socket.socket, node_config: Path, socket_path: Path
) -> None:
    with node_daemon(node_config, socket_path):
        assert manager.recv(100) == b"READY=1"
    assert manager.recv(100) == b"STOPPING=1"


def test_a_private_one_does_not_speak_for_the_service_that_started_it(
    manager: socket.socket, socket_path: Path
) -> None:
    with daemon_process(socket_path):
        pass
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"everstep-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert sock.recv(100) == b"READY=1"


def test_one_that_does_not_listen_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    assert "service_manager_unreachable" in caplog.text
