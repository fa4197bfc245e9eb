"""Tokens: what they allow, when they end, and where they never stand."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from everstep.core.errors import ConfigError, DaemonUnavailableError, NotFoundError, QuotaError, UsageError
from everstep.core.paths import control_socket_path
from everstep.daemon.access import endpoint
from everstep.daemon.access.roles_plan import Caller, Proof, Role
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.control.tokens import TIMED_TOKENS_MAX, TokenBook
from everstep.daemon.testing import DEADLINE_S, FakeTrainer, daemon_process
from everstep.proto import frames, node_pb2_grpc
from everstep.proto import node_pb2 as pb

OTHER = 4711


class Clock:
    """A time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> TokenBook:
    return TokenBook(clock)


def maker(book: TokenBook, uid: int = OTHER) -> Caller:
    found = book.holder(book.issue(uid))
    assert found is not None
    return found


class TestBook:
    def test_a_connections_token_speaks_for_its_user_until_it_is_revoked(self, book: TokenBook) -> None:
        token = book.issue(OTHER)
        holder = book.holder(token)
        assert holder is not None
        assert (holder.uid, holder.role, holder.proof) == (OTHER, Role.OPERATOR, Proof.CONNECTION)
        book.revoke(token)
        assert book.holder(token) is None

    def test_a_timed_token_ends_by_itself(self, book: TokenBook, clock: Clock) -> None:
        token, info = book.issue_timed(maker(book), ttl_s=60, is_read_only=False)
        clock.now_s += 59.9
        assert book.holder(token) == info.caller
        assert [each.token_id for each in book.timed(OTHER)] == [info.token_id]
        clock.now_s += 0.2
        assert book.holder(token) is None
        assert book.timed(None) == []

    def test_it_may_no_more_than_its_maker(self, book: TokenBook) -> None:
        by_other = maker(book)
        by_owner = maker(book, os.getuid())
        for made, is_read_only, role in (
            (by_other, False, Role.OPERATOR),
            (by_other, True, Role.VIEWER),
            (by_owner, False, Role.ADMIN),
            (by_owner, True, Role.VIEWER),
        ):
            token, _ = book.issue_timed(made, ttl_s=60, is_read_only=is_read_only)
            holder = book.holder(token)
            assert holder is not None
            assert (holder.uid, holder.role, holder.proof) == (made.uid, role, Proof.TOKEN)

    @pytest.mark.parametrize("proof", [Proof.TOKEN, Proof.CERTIFICATE])
    def test_it_begets_no_other(self, book: TokenBook, proof: Proof) -> None:
        caller = Caller(uid=OTHER, role=Role.ADMIN, proof=proof, name="")
        with pytest.raises(UsageError, match="makes no tokens"):
            book.issue_timed(caller, ttl_s=60, is_read_only=True)

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, 31 * 86400.0, float("nan"), float("inf")])
    def test_it_has_an_end_that_makes_sense(self, book: TokenBook, ttl_s: float) -> None:
        with pytest.raises(UsageError, match="a token lives"):
            book.issue_timed(maker(book), ttl_s=ttl_s, is_read_only=True)

    def test_only_its_user_and_root_revoke_it(self, book: TokenBook) -> None:
        token, info = book.issue_timed(maker(book), ttl_s=60, is_read_only=True)
        with pytest.raises(NotFoundError) as others:
            book.revoke_timed(info.token_id, OTHER + 1)
        with pytest.raises(NotFoundError) as nobodys:
            book.revoke_timed("00000000", OTHER + 1)
        assert str(others.value).replace(info.token_id, "X") == str(nobodys.value).replace("00000000", "X")
        assert book.holder(token) is not None
        book.revoke_timed(info.token_id, OTHER)
        assert book.holder(token) is None

    def test_a_user_has_a_bounded_number(self, book: TokenBook, clock: Clock) -> None:
        for _ in range(TIMED_TOKENS_MAX):
            book.issue_timed(maker(book), ttl_s=60, is_read_only=True)
        with pytest.raises(QuotaError, match=f"{TIMED_TOKENS_MAX} tokens"):
            book.issue_timed(maker(book), ttl_s=60, is_read_only=True)
        book.issue_timed(maker(book, OTHER + 1), ttl_s=60, is_read_only=True)
        clock.now_s += 61
        book.issue_timed(maker(book), ttl_s=60, is_read_only=True)

    def test_the_book_does_not_hold_what_it_gave_out(self, book: TokenBook) -> None:
        token = book.issue(OTHER)
        timed, _ = book.issue_timed(maker(book), ttl_s=60, is_read_only=True)
        held = repr(vars(book))
        assert token not in held
        assert timed not in held


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "data.sock"


@pytest.fixture
def client(socket_path: Path) -> Iterator[ControlClient]:
    with daemon_process(socket_path), connected(socket_path) as found:
        yield found


def everstep(*arguments: str, socket: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "everstep.daemon.cli.main", *arguments],
        env={**os.environ, "EVERSTEP_SOCKET": str(socket), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def status_code(
    stub: node_pb2_grpc.NodeStub, metadata: tuple[tuple[str, str], ...]
) -> grpc.StatusCode | None:
    """Return how a call of these fails; None: it does not."""
    try:
        stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined]
    return None


class TestDaemon:
    def test_a_file_lets_another_tool_in_until_it_is_revoked(
        self, client: ControlClient, socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "token"
        file.symlink_to(tmp_path / "elsewhere")  # what is there is replaced, not followed
        made = everstep("token", "--ttl", "1h", "--name", "grafana", "--file", str(file), socket=socket_path)
        assert made.returncode == 0, made.stderr
        token = file.read_text().strip()
        assert not (tmp_path / "elsewhere").exists()
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
        assert stat.S_ISREG(file.lstat().st_mode)
        assert token not in made.stdout + made.stderr
        (listed,) = client.tokens()
        assert (listed.name, listed.role, listed.owner_uid) == ("grafana", "admin", os.getuid())
        told = everstep("token", "list", socket=socket_path).stdout
        assert re.fullmatch(rf"{listed.token_id}  admin  uid {os.getuid()}  [\d.]+ min left  grafana\n", told)
        shown = everstep("--token-file", str(file), "status", "--json", socket=socket_path)
        assert shown.returncode == 0, shown.stderr
        again = everstep(
            "token", "--ttl", "1h", "--stdout", socket=socket_path, EVERSTEP_TOKEN_FILE=str(file)
        )
        assert again.returncode != 0
        assert "makes no tokens" in again.stderr
        revoked = everstep("token", "revoke", listed.token_id, socket=socket_path)
        assert revoked.returncode == 0, revoked.stderr
        refused = everstep("status", socket=socket_path, EVERSTEP_TOKEN_FILE=str(file))
        assert refused.returncode == 3
        assert "is the token still valid" in refused.stderr
        assert token not in socket_path.with_name("daemon.log").read_text()
        file.chmod(0o644)
        monkeypatch.setenv(endpoint.TOKEN_FILE, str(file))
        with pytest.raises(ConfigError, match="only this user can read"), connected(socket_path):
            pass

    def test_one_that_may_only_look_changes_nothing(
        self, client: ControlClient, socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        issued = client.issue_token(ttl_s=60, is_read_only=True)
        assert issued.token not in repr(issued)
        endpoint.write_token(tmp_path / "token", issued.token)
        monkeypatch.setenv(endpoint.TOKEN_FILE, str(tmp_path / "token"))
        with connected(socket_path) as reader:
            assert reader.status().daemon.uid == os.getuid()
            for change in (
                reader.stop,
                lambda: reader.remove_run("x", force=True),
                lambda: reader.drop_cache(1),
            ):
                with pytest.raises(UsageError, match=r"PERMISSION_DENIED.*viewer"):
                    change()
            with pytest.raises(UsageError, match="PERMISSION_DENIED"):
                reader.revoke_token(issued.info.token_id)

    def test_a_token_of_a_connection_ends_with_it(self, client: ControlClient, socket_path: Path) -> None:
        trainer = FakeTrainer(socket_path)
        assert isinstance(trainer.hello, frames.Welcome)
        metadata = (("authorization", f"Bearer {trainer.hello.token}"),)
        with grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=metadata)
            trainer.close()
            with FakeTrainer(socket_path):  # by its Welcome the daemon has seen the end of the first
                pass
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]

    def test_a_token_ends_with_its_holders_life_though_a_child_keeps_the_connection(
        self, client: ControlClient, socket_path: Path
    ) -> None:
        script = (
            "import os, sys, time\n"
            "from pathlib import Path\n"
            "from everstep.daemon.testing import FakeTrainer\n"
            "trainer = FakeTrainer(Path(sys.argv[1]))\n"
            "child = os.fork()\n"
            "if child:\n"
            "    print(child, trainer.hello.token, flush=True)\n"
            "time.sleep(300)\n"
        )
        command = [sys.executable, "-P", "-c", script, str(socket_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            child, token = holder.stdout.readline().split()
            metadata = (("authorization", f"Bearer {token}"),)
            with grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel:
                stub = node_pb2_grpc.NodeStub(channel)
                stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=metadata)
                holder.kill()
                holder.wait()
                until_s = time.monotonic() + DEADLINE_S
                while (code := status_code(stub, metadata)) is None:
                    assert time.monotonic() < until_s
            os.kill(int(child), signal.SIGKILL)
        assert code is grpc.StatusCode.UNAUTHENTICATED

    def test_a_second_hello_is_refused_and_makes_no_second_token(
        self, client: ControlClient, socket_path: Path
    ) -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.send(frames.Hello(protocol=frames.PROTOCOL, version="x", role=frames.Role.TRAINER))
            answer = trainer.receive()
            assert isinstance(answer, frames.Failure)
            assert "said Hello already" in answer.message

    def test_an_ended_one_is_refused(
        self, client: ControlClient, socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        issued = client.issue_token(ttl_s=1, is_read_only=True)
        endpoint.write_token(tmp_path / "token", issued.token)
        monkeypatch.setenv(endpoint.TOKEN_FILE, str(tmp_path / "token"))
        with connected(socket_path) as reader:
            threading.Event().wait(1.1)
            with pytest.raises(DaemonUnavailableError, match="still valid"):
                reader.tokens()
