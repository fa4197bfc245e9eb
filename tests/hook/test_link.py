"""Whose daemon a trainer speaks to: never a private one of its own in the place of the node's."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from queue import SimpleQueue

import pytest
from pausing import wait_until

from everstep.core.errors import DaemonUnavailableError
from everstep.core.paths import data_socket_path
from everstep.core.version import VERSION
from everstep.daemon.testing import node_daemon
from everstep.hook import client as client_module
from everstep.hook import link as link_module
from everstep.hook.link import CLOSE_DEADLINE_S, Link, RunAddress
from everstep.proto import frames
from everstep.proto.frames import Reply, Request
from everstep.proto.wire import FrameReader, decode_request, pack


def address(*storage: str) -> RunAddress:
    return RunAddress(name="r", rank=0, world_size=1, storage=storage, takeover=False)


class Ending(Link):
    """A link whose thread that looks for a daemon ends between any two looks at it."""

    def __init__(self) -> None:
        self.joined = 0
        self._opening = None
        self.looked = 0
        self.client = self  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]

    @property
    def broken(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As of the client, which this is."""

    @property
    def _reconnecting(self) -> "Ending | None":  # pyright: ignore[reportIncompatibleVariableOverride]
        self.looked += 1
        return self if self.looked == 1 else None

    def join(self, timeout_s: float) -> None:
        self.joined += 1

    def is_alive(self) -> bool:
        return False

    def close(self) -> None:
        """Of the link at first, then of its client."""
        if not self.looked:
            super().close()


def ignored(event: Reply) -> None:
    pass


def test_a_link_that_is_closed_as_its_search_ends_is_closed() -> None:
    link = Ending()
    link.close()
    assert link.joined == 1


def test_device_names_start_no_private_daemon() -> None:
    with pytest.raises(DaemonUnavailableError) as caught:
        Link(address("d0", "d1"), ignored)
    assert "'d0'" in caught.value.message
    assert str(data_socket_path()) in caught.value.message
    assert "everstep daemon" in caught.value.hint
    assert not data_socket_path().exists()


def configured(folder: Path) -> Path:
    """The configuration of a node daemon over one device."""
    device, config = folder / "d0", folder / "node.toml"
    device.mkdir()
    config.write_text(f'[devices]\nd0 = "{device}"\n[daemon]\nsocket = "{data_socket_path()}"\n')
    return config


def test_a_nodes_daemon_that_died_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with node_daemon(configured(tmp_path), data_socket_path()) as process:
        link = Link(address("d0"), ignored)
        link.begin_attempt(1, fresh=False)
        process.kill()
        wait_until(lambda: link.broken)
        link.keep_up(lambda: None)
        link.close()  # waits for the try to end
    assert "daemon_unavailable" in caplog.text
    assert "the node's" in caplog.text
    with pytest.raises(DaemonUnavailableError):
        Link(address("d0"), ignored)  # nobody listens there


class Deaf:
    """Stands where the daemon stood; says Welcome to the next trainer if it is polite, and nothing more."""

    def __init__(self, path: Path, *, is_polite: bool) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._is_polite = is_polite
        self.heard = SimpleQueue[Request]()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        self._sock = sock
        with sock, contextlib.closing(FrameReader(size_bytes_max=1 << 20)) as reader:
            while True:
                while (body := reader.next_body()) is None:
                    if not reader.receive(sock):
                        return
                self.heard.put(decode_request(body))
                if self._is_polite:
                    welcome = frames.Welcome(
                        version=VERSION,
                        protocol=frames.PROTOCOL,
                        token="t",
                        private=True,
                        pid=1,
                        control_socket="/c",
                    )
                    sock.sendall(pack(welcome))
                    self._is_polite = False

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def test_a_private_daemon_that_ends_as_a_trainer_comes_is_followed_by_another(tmp_path: Path) -> None:
    """It says Welcome, and was about to end: nobody was attached, and everything committed."""
    path, device = data_socket_path(), tmp_path / "d0"
    device.mkdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    deaf = Deaf(path, is_polite=True)

    def end_when_asked() -> None:
        while not isinstance(deaf.heard.get(timeout=20), frames.OpenRun):
            pass
        path.unlink()
        deaf.close()

    ending = threading.Thread(target=end_when_asked)
    ending.start()
    link = Link(address(str(device)), ignored)
    ending.join()
    pid = link.client.welcome.pid
    assert (pid > 1, link.opened.run_id != "") == (True, True)
    os.kill(pid, signal.SIGTERM)
    link.close()


def test_a_private_daemon_that_dies_of_each_trainer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal:
        welcome = frames.Welcome(
            version=VERSION, protocol=frames.PROTOCOL, token="t", private=True, pid=1, control_socket="/c"
        )
        made, closed = 0, 0

        def __init__(self, *_: object, **__: object) -> None:
            Mortal.made += 1

        def request(self, *_: object) -> None:
            raise DaemonUnavailableError("the connection to the daemon was lost")

        def close(self) -> None:
            Mortal.closed += 1

    monkeypatch.setattr(link_module, "connect_or_start", Mortal)
    with pytest.raises(DaemonUnavailableError, match="was lost"):
        Link(address(str(tmp_path)), ignored)
    assert (Mortal.made, Mortal.closed) == (2, 2)


@contextlib.contextmanager
def looking_for_a_daemon(tmp_path: Path, *, is_polite: bool) -> Generator[Link]:
    """A link whose daemon died and whose next one is deaf; it has asked that one for the run, or greeted it."""
    with node_daemon(configured(tmp_path), data_socket_path()) as process:
        link = Link(address("d0"), ignored)
        link.begin_attempt(1, fresh=False)
        process.kill()
        process.wait()
        wait_until(lambda: link.broken)
    deaf = Deaf(data_socket_path(), is_polite=is_polite)
    try:
        link.keep_up(lambda: None)
        wanted = frames.OpenRun if is_polite else frames.Hello
        while not isinstance(deaf.heard.get(timeout=20), wanted):
            pass
        yield link
    finally:
        deaf.close()


def test_closing_waits_for_no_daemon_that_opens_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may recover a store with thousands of checkpoints: minutes."""
    with looking_for_a_daemon(tmp_path, is_polite=True) as link:
        began_s = time.monotonic()
        link.close()
        assert time.monotonic() - began_s < CLOSE_DEADLINE_S
    assert "what was committed stands" in caplog.text


def test_closing_waits_a_little_for_one_that_does_not_even_greet_and_leaves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_DEADLINE_S", 0.2)
    monkeypatch.setattr(client_module, "CONNECT_DEADLINE_S", 6.0)
    with looking_for_a_daemon(tmp_path, is_polite=False) as link:
        thread = link._reconnecting
        assert thread is not None
        began_s = time.monotonic()
        link.close()
        assert time.monotonic() - began_s < 5.0
        assert thread.is_alive()
        assert "what was committed stands" in caplog.text
        thread.join(20)
        assert link.broken, "whoever answers now is of no use any more"
