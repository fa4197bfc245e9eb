"""The trainer's end of the data socket, against a real daemon and against peers that misbehave."""

import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from everstep.core.errors import (
    DaemonUnavailableError,
    DeadlineError,
    FencedError,
    QuotaError,
    RunBusyError,
    VersionMismatchError,
)
from everstep.core.version import VERSION
from everstep.daemon.testing import daemon_process
from everstep.hook import client as client_module
from everstep.hook.client import DaemonClient
from everstep.proto import frames
from everstep.proto.frames import PROTOCOL, Reply, Role
from everstep.proto.wire import FrameReader, decode_request, pack

WELCOME = frames.Welcome(
    version="9", protocol=PROTOCOL, token="t", private=True, pid=4711, control_socket="/c"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "data.sock"


def connect(path: Path, on_event: Callable[[Reply], None] = lambda _: None) -> DaemonClient:
    return DaemonClient(path, Role.TRAINER, VERSION, on_event)


@contextmanager
def connected(path: Path, on_event: Callable[[Reply], None] = lambda _: None) -> Generator[DaemonClient]:
    client = connect(path, on_event)
    try:
        yield client
    finally:
        client.close()


def open_run(client: DaemonClient, device: Path) -> Reply:
    device.mkdir(exist_ok=True)
    reply, fd = client.request(
        lambda number: frames.OpenRun(
            request_id=number, name="c", rank=0, world_size=1, storage=[str(device)], takeover=False
        )
    )
    assert fd is None
    return reply


class TestWithADaemon:
    @pytest.fixture(autouse=True)
    def daemon(self, path: Path) -> Iterator[None]:
        with daemon_process(path):
            yield

    def test_it_is_welcomed_and_answered(self, path: Path, tmp_path: Path) -> None:
        with connected(path) as client:
            assert client.welcome.protocol == PROTOCOL
            assert client.welcome.private
            assert isinstance(open_run(client, tmp_path / "d"), frames.RunOpened)
            assert client.broken is None

    def test_a_refusal_is_raised_as_the_daemons_own_error(self, path: Path, tmp_path: Path) -> None:
        with connected(path) as client, connected(path) as other:
            open_run(client, tmp_path / "d")
            with pytest.raises(RunBusyError) as caught:
                open_run(other, tmp_path / "d")
            assert "takeover=True" in caught.value.hint
            with pytest.raises(FencedError):
                other.request(lambda number: frames.ListOffers(request_id=number))

    def test_answers_find_their_requests_whatever_the_order(self, path: Path, tmp_path: Path) -> None:
        with connected(path) as client:
            open_run(client, tmp_path / "d")
            client.request(lambda number: frames.BeginAttempt(request_id=number, attempt=1, fresh=False))
            arenas = [client.ask(lambda number, size=size: make_arena(number, size)) for size in (64, 1, 16)]
            offers = client.ask(lambda number: frames.ListOffers(request_id=number))
            assert isinstance(offers.result(20)[0], frames.Offers)
            for size, future in zip((64, 1, 16), arenas, strict=True):
                ready, fd = future.result(20)
                assert isinstance(ready, frames.ArenaReady)
                assert fd is not None
                assert os.fstat(fd).st_size == ready.slot_size_bytes == size * 4096
                os.close(fd)

    def test_frames_that_answer_nothing_are_events(self, path: Path, tmp_path: Path) -> None:
        events: list[Reply] = []
        heard = threading.Event()

        def on_event(event: Reply) -> None:
            events.append(event)
            heard.set()

        with connected(path, on_event) as client:
            open_run(client, tmp_path / "d")
            client.send(frames.BeginSnapshot(arena=5, slot=0, attempt=1, step=1))
            assert heard.wait(20)
        (event,) = events
        assert isinstance(event, frames.Failure)
        assert event.code == "FencedError"

    def test_a_forked_child_lets_go_of_the_socket_and_the_parent_goes_on(
        self, path: Path, tmp_path: Path
    ) -> None:
        with connected(path) as client:
            open_run(client, tmp_path / "d")
            inode = os.fstat(client._sock.fileno()).st_ino
            assert inode in open_inodes()

            def lets_go() -> bool:
                held = open_inodes()
                try:
                    client.send(frames.Detach(request_id=1))
                except DaemonUnavailableError as error:
                    return inode not in held and "forked child" in error.message
                return False

            assert in_child(lets_go)
            assert client.broken is None
            reply, _ = client.request(lambda number: frames.ListOffers(request_id=number))
            assert isinstance(reply, frames.Offers)

    def test_a_daemon_that_takes_nothing_stops_nobody_for_long(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("everstep.hook.client.SEND_DEADLINE_S", 0.3)
        with connected(path) as client:

            def send_for_ever() -> None:
                while True:
                    client.send(frames.ListOffers(request_id=10**9))

            os.kill(client.welcome.pid, signal.SIGSTOP)
            try:
                with pytest.raises(DaemonUnavailableError, match="does not take frames"):
                    send_for_ever()
                assert client.broken is not None
            finally:
                os.kill(client.welcome.pid, signal.SIGCONT)

    def test_closing_again_is_nothing(self, path: Path) -> None:
        client = connect(path)
        client.close()
        client.close()
        assert client.broken is not None


def make_arena(number: int, pages: int) -> frames.MakeArena:
    return frames.MakeArena(
        request_id=number, layout_digest=str(pages), slot_size_bytes=pages * 4096, slot_count=1
    )


def open_inodes() -> set[int]:
    """Return the inodes of this process's open files."""
    found: set[int] = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing itself
            found.add(link.stat().st_ino)
    return found


def in_child(check: Callable[[], bool]) -> bool:
    """Return what `check` says in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


class TestWithoutOne:
    def test_nobody_there(self, path: Path) -> None:
        with pytest.raises(DaemonUnavailableError, match=f"no daemon answers on {path}: No such file"):
            connect(path)

    def test_a_stale_socket_file(self, path: Path) -> None:
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        with pytest.raises(DaemonUnavailableError, match=f"no daemon answers on {path}: Connection refused"):
            connect(path)

    def test_one_that_is_killed_fails_what_waits_and_all_that_follows(
        self, path: Path, tmp_path: Path
    ) -> None:
        with daemon_process(path) as process, connected(path) as client:
            open_run(client, tmp_path / "d")
            process.send_signal(signal.SIGSTOP)  # so that the request is pending when it dies
            waiting = client.ask(lambda number: frames.ListOffers(request_id=number))
            process.kill()
            with pytest.raises(DaemonUnavailableError, match=r"closed the connection|was lost"):
                waiting.result(20)
            assert isinstance(client.broken, DaemonUnavailableError)
            with pytest.raises(DaemonUnavailableError):
                client.request(lambda number: frames.ListOffers(request_id=number))

    def test_one_that_does_not_answer_in_time_is_named(self, path: Path, tmp_path: Path) -> None:
        with daemon_process(path) as process, connected(path) as client:
            open_run(client, tmp_path / "d")
            process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(
                    DeadlineError, match=rf"pid {process.pid}\) did not answer within 0 s.*log"
                ):
                    client.request(lambda number: frames.ListOffers(request_id=number), 0.05)
            finally:
                process.send_signal(signal.SIGCONT)


class Refuser:
    """Refuses the first client before it can say anything, as a daemon does that has no room for it."""

    def __init__(self, path: Path, reason: frames.Failure) -> None:
        path.parent.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._reason = reason

    def connected(self, sock: socket.socket) -> None:
        """Called with the client's socket when it is connected, before it says Hello."""
        ours, _ = self._listener.accept()
        with ours:
            ours.sendall(pack(self._reason))
        self._listener.close()


class Peer:
    """Answers each frame of the first client by the next of the given bytes, and then hangs up."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        path.parent.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._answers = answers
        self.hello: frames.Request | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            reader = FrameReader(size_bytes_max=4096)
            for answer in self._answers or (b"",):
                while (body := reader.next_body()) is None:
                    reader.receive(sock)
                self.hello = self.hello or decode_request(body)
                sock.sendall(answer)


class TestPeers:
    def test_one_that_ends_before_hello(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        monkeypatch.setattr("everstep.hook.client._connect", lambda _: ours)
        with pytest.raises(DaemonUnavailableError, match="did not answer Hello"):
            DaemonClient(path, Role.TRAINER, VERSION, lambda _: None)

    def test_one_that_refuses_before_hello_is_heard(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hello cannot be sent any more, and the reason is there all the same."""
        refuser = Refuser(path, frames.Failure(re=0, code="QuotaError", message="3 are many", hint="close"))
        connect_as_ever = client_module._connect

        def connect_and_be_refused(to: Path) -> socket.socket:
            sock = connect_as_ever(to)
            refuser.connected(sock)
            return sock

        monkeypatch.setattr(client_module, "_connect", connect_and_be_refused)
        with pytest.raises(QuotaError) as caught:
            connect(path)
        assert (caught.value.message, caught.value.hint) == ("3 are many", "close")

    def test_one_that_hangs_up_after_hello(self, path: Path) -> None:
        with Peer(path), pytest.raises(DaemonUnavailableError, match="closed the connection"):
            connect(path)

    def test_one_of_another_protocol(self, path: Path) -> None:
        refusal = frames.Failure(
            re=0, code="VersionMismatchError", message="speaks protocol 9", hint="one version"
        )
        with (
            Peer(path, pack(refusal)) as peer,
            pytest.raises(VersionMismatchError, match=r"protocol 9 \(one version\)"),
        ):
            connect(path)
        assert peer.hello == frames.Hello(protocol=PROTOCOL, version=VERSION, role=Role.TRAINER)

    @pytest.mark.parametrize(
        "answer",
        [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", pack(frames.Done(re=1)), b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        ids=["huge", "garbage", "another frame", "HTTP"],
    )
    def test_one_that_is_no_daemon(self, path: Path, answer: bytes) -> None:
        with Peer(path, answer), pytest.raises(DaemonUnavailableError, match="the daemon"):
            connect(path)

    def test_garbage_after_the_welcome_breaks_the_connection(self, path: Path) -> None:
        with Peer(path, pack(WELCOME) + b"\x03\0\0\0abc"):
            client = connect(path)
        while client.broken is None:
            threading.Event().wait(0.01)
        assert "cannot be read" in client.broken.message
        client.close()

    def test_a_descriptor_that_was_announced_and_did_not_come_breaks_the_connection(self, path: Path) -> None:
        ready = frames.ArenaReady(re=1, arena=1, slot_size_bytes=4096, slot_count=1, allocation_s=0.0)
        with (
            Peer(path, pack(WELCOME), pack(ready)),
            connected(path) as client,
            pytest.raises(DaemonUnavailableError, match="announced but did not come"),
        ):
            client.request(lambda number: make_arena(number, 1), 10)
