"""The metrics port of a real daemon: who gets what, and how strangers are kept from harm."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from asking import Site

from everstep.core.errors import ConfigError
from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.daemon.config import load_config
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.daemon.web.server import CONNECTIONS_MAX, REQUEST_BYTES_MAX, REQUEST_S
from everstep.proto import frames, node_pb2_grpc
from everstep.proto import node_pb2 as pb

PAGE = ["/", "/app.js", "/timeline.js", "/style.css", "/icon.svg"]
RUBBISH = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n", b"400"),
    (b"GET / HTTP/9.9\r\n\r\n", b"400"),
    (b"GET /\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2 * REQUEST_BYTES_MAX + b"\r\n\r\n", b"431"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 4000 + b"\r\n", b"431"),
    (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd", b"405"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    (
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"200",
    ),
]
TOKEN = "0123456789abcdef" * 4


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def settled(pid: int, count: int) -> int:
    """Return the descriptors once they are as few as they were, or after a while."""
    for _ in range(100):
        if descriptors(pid) <= count:
            break
        time.sleep(0.05)
    return descriptors(pid)


class TestWhoGetsWhat:
    def test_nothing_but_the_state_needs_a_login(self, site: Site) -> None:
        for path in (*PAGE, "/healthz", "/metrics"):
            assert site.ask(path).status == 200, path
        assert site.ask("/api/state").status == 401
        assert site.ask("/api/state", headers={"Cookie": "everstep_session=guess"}).status == 401
        assert site.ask("/etc/passwd").status == site.ask("/../style.css").status == 404
        assert site.ask("/%2e%2e/daemon.log").status == 404

    def test_metrics_hold_no_name_of_a_run(self, site: Site, socket_path: Path) -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")], name="secret-project")
            assert b"secret-project" not in site.ask("/metrics").body
            assert b"secret-project" in site.ask("/api/state", headers=site.log_in()).body

    def test_every_answer_says_what_a_browser_may_do(self, site: Site) -> None:
        for path in (*PAGE, "/healthz", "/metrics", "/api/state", "/nothing", "/login?token=x"):
            headers = site.ask(path).headers
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none';"), path
            assert "unsafe" not in policy
            assert "http" not in policy
            assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
            assert headers["Referrer-Policy"] == "no-referrer"

    def test_a_login_works_once_and_not_by_looking(self, site: Site) -> None:
        url, valid_s = site.client.open_web_session()
        parts = urlsplit(url)
        path = f"{parts.path}?{parts.query}"
        assert (parts.hostname, parts.port) == ("127.0.0.1", site.port)
        assert 0 < valid_s <= 300
        assert site.ask(path, method="HEAD").status == 200
        told = site.ask(path)
        cookie = told.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert "Path=/" in cookie
        assert "Secure" not in cookie
        assert re.match("everstep_session_[0-9a-f]{8}=", cookie), (
            "other daemons of this host have other names"
        )
        again = site.ask(path)
        assert again.status == 403
        assert "Set-Cookie" not in again.headers
        assert b"everstep web" in again.body

    def test_it_is_read_only(self, site: Site) -> None:
        cookie = site.log_in()
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            told = site.ask("/api/state", method=method, headers=cookie)
            assert (told.status, told.headers["Allow"]) == (405, "GET, HEAD"), method

    def test_another_page_of_this_host_gets_nothing(self, site: Site) -> None:
        """A browser sends the cookie to every port of the host, and says so."""
        cookie = site.log_in()
        assert site.ask("/api/state", headers={**cookie, "Sec-Fetch-Site": "same-origin"}).status == 200
        for other in ("same-site", "cross-site"):
            assert site.ask("/api/state", headers={**cookie, "Sec-Fetch-Site": other}).status == 403

    def test_a_token_that_ends_opens_no_session_that_outlives_it(self, site: Site, socket_path: Path) -> None:
        issued = site.client.issue_token(ttl_s=60, is_read_only=False)
        with grpc.insecure_channel(f"unix:{control_socket_path(socket_path)}") as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            metadata = (("authorization", f"Bearer {issued.token}"),)
            assert stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=metadata).daemon.pid == site.pid
            with pytest.raises(grpc.RpcError) as caught:
                stub.OpenWebSession(pb.OpenWebSessionRequest(), timeout=10, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    def test_a_node_that_drains_says_so(self, site: Site) -> None:
        cookie = site.log_in()
        assert not json.loads(site.ask("/api/state", headers=cookie).body)["daemon"]["is_draining"]
        site.client.drain()
        assert json.loads(site.ask("/api/state", headers=cookie).body)["daemon"]["is_draining"]

    def test_a_name_that_was_pointed_here_gets_nothing(self, site: Site) -> None:
        cookie = site.log_in()
        for path in ("/", "/api/state", "/metrics", "/login?token=x"):
            assert site.ask(path, headers={**cookie, "Host": "evil.example"}).status == 421, path
        assert site.ask("/healthz", headers={"Host": "evil.example"}).status == 200

    def test_the_state_of_a_run(self, site: Site, socket_path: Path, devices: list[Path]) -> None:
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0"), Path("nvme1")], name="gpt")
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 7), seed=1)
            trainer.event(frames.Persisted)
            arena.close()
            cookie = site.log_in()
            state = json.loads(site.ask("/api/state", headers=cookie).body)
            rest = json.loads(site.ask(f"/api/state?after={state['last']}", headers=cookie).body)
        run = state["runs"][0]
        assert (run["name"], run["state"], run["step"], run["newest"]["checkpoint"]) == (
            "gpt",
            "training",
            7,
            "1.7",
        )
        assert [each["name"] for each in state["devices"]] == ["nvme0", "nvme1"]
        assert [each["path"] for each in state["devices"]] == [str(path) for path in devices]
        assert state["level"] == "green"
        kinds = [event["kind"] for event in state["events"]]
        assert kinds.index("run_attached") < kinds.index("snapshot_sealed") < kinds.index("shard_committed")
        assert all(event["sequence"] > state["last"] for event in rest["events"])
        assert site.ask("/api/state?after=-1", headers=cookie).status == 400

    def test_gzip_for_those_who_take_it(self, site: Site) -> None:
        plain = site.ask("/metrics").body
        told = site.ask("/metrics", headers={"Accept-Encoding": "gzip"})
        assert told.headers["Content-Encoding"] == "gzip"
        assert len(told.body) < len(plain) / 2


class TestStrangers:
    def test_rubbish_is_answered_once_and_leaves_nothing(self, site: Site) -> None:
        before = descriptors(site.pid)
        for sent, status in RUBBISH:
            with socket.create_connection(("127.0.0.1", site.port), timeout=10) as sock:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                found = b""
                while data := sock.recv(65536):
                    found += data
            assert found.startswith(b"HTTP/1.1 " + status), (sent[:60], found[:80])
            assert found.count(b"HTTP/1.1 ") == 1, sent[:60]
        assert settled(site.pid, before) <= before

    def test_who_drips_is_ended_and_who_floods_keeps_nobody_out(self, site: Site) -> None:
        """More connections than there is room for, each alive by a byte now and then: the oldest ones go."""
        before, thread_count = descriptors(site.pid), threads(site.pid)
        silent = [
            socket.create_connection(("127.0.0.1", site.port), timeout=10) for _ in range(3 * CONNECTIONS_MAX)
        ]
        try:
            for sock in silent[-CONNECTIONS_MAX:]:
                sock.send(b"G")
            assert site.ask("/metrics").status == 200
            assert descriptors(site.pid) <= before + CONNECTIONS_MAX + 2
            assert threads(site.pid) == thread_count
            began_s = time.monotonic()
            newest = silent[-1]
            for letter in b"ET / HTTP/1.1\r\nX: " + b"a" * 1000:
                time.sleep(0.25)
                try:
                    newest.send(bytes([letter]))
                except OSError:
                    break
                if newest in _readable(newest):
                    break
            assert newest.recv(100).startswith(b"HTTP/1.1 408")
            assert time.monotonic() - began_s < 4 * REQUEST_S
        finally:
            for sock in silent:
                sock.close()
        assert settled(site.pid, before) <= before

    def test_a_hanging_daemon_is_said_not_hidden(self, site: Site) -> None:
        os.kill(site.pid, signal.SIGSTOP)
        try:
            with socket.create_connection(("127.0.0.1", site.port), timeout=1) as sock:
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                with pytest.raises(TimeoutError):
                    sock.recv(1)
        finally:
            os.kill(site.pid, signal.SIGCONT)
        assert site.ask("/healthz").body == b"ok\n"


def _readable(sock: socket.socket) -> list[socket.socket]:
    sock.setblocking(False)
    try:
        return [sock] if sock.recv(1, socket.MSG_PEEK) else []
    except BlockingIOError:
        return []
    finally:
        sock.settimeout(10)


class TestBeyondLoopback:
    """`0.0.0.0` here is still reached by 127.0.0.1: what counts is where it listens."""

    def test_it_refuses_to_listen_for_anybody(self, node_config: Path) -> None:
        with node_config.open("a") as file:
            file.write('[metrics]\naddress = "0.0.0.0"\n')
        with pytest.raises(ConfigError) as caught:
            load_config(node_config)
        assert "0.0.0.0 is not loopback" in caught.value.message
        assert "token_file" in caught.value.hint

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            ('address = "everywhere"', "metrics.address is 'everywhere'"),
            ('certificate_file = "/x"', "need each other"),
            ('authority_file = "/x"', "authority_file needs TLS"),
            ("port = 70000", "metrics.port is 70000"),
        ],
    )
    def test_what_makes_no_sense_is_named(self, node_config: Path, lines: str, words: str) -> None:
        with node_config.open("a") as file:
            file.write(f"[metrics]\n{lines}\n")
        with pytest.raises(ConfigError, match=words):
            load_config(node_config)

    def test_a_token_opens_the_metrics_and_no_page_travels_readable(
        self, node_config: Path, socket_path: Path, tmp_path: Path
    ) -> None:
        token = tmp_path / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        with node_config.open("a") as file:
            file.write(f'[metrics]\naddress = "0.0.0.0"\ntoken_file = "{token}"\n')
        with node_daemon(node_config, socket_path) as process, connected(socket_path) as client:
            site = Site(client, client.status().daemon.metrics_port, process.pid)
            assert site.ask("/metrics").status == 401
            assert site.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN[:-1]}x"}).status == 401
            assert site.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
            assert site.ask("/healthz").status == 200
            assert site.ask("/").status == site.ask("/api/state").status == 403
            token.write_text(TOKEN[::-1])
            assert site.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status == 401
            assert site.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN[::-1]}"}).status == 200

    def test_certificates_open_the_metrics_and_the_page_goes_over_tls(
        self, node_config: Path, socket_path: Path, tmp_path: Path
    ) -> None:
        for name in ("authority", "server", "client", "stranger"):
            _certificate(tmp_path, name, issuer=None if name in ("authority", "stranger") else "authority")
        with node_config.open("a") as file:
            file.write(
                f'[metrics]\naddress = "0.0.0.0"\ncertificate_file = "{tmp_path}/server.pem"\n'
                f'key_file = "{tmp_path}/server.key"\nauthority_file = "{tmp_path}/authority.pem"\n'
            )
        nobody = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        known = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        known.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
        stranger = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        stranger.load_cert_chain(tmp_path / "stranger.pem", tmp_path / "stranger.key")
        old = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with node_daemon(node_config, socket_path) as process, connected(socket_path) as client:
            site = Site(client, client.status().daemon.metrics_port, process.pid)
            assert site.ask("/metrics", context=known).status == 200
            assert site.ask("/metrics", context=nobody).status == 401
            assert site.ask("/healthz", context=nobody).status == 200
            for refused in (stranger, old):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    site.ask("/metrics", context=refused)
            with pytest.raises((ConnectionError, ValueError, OSError)):
                site.ask("/metrics")
            cookie = site.log_in(context=nobody)
            assert cookie["Cookie"].startswith("__Host-everstep_session_")
            assert site.ask("/api/state", headers=cookie, context=nobody).status == 200
            _certificate(tmp_path, "server", issuer="authority", days=30)  # renewed while it runs
            assert site.ask("/healthz", context=nobody).status == 200


def _certificate(folder: Path, name: str, *, issuer: str | None, days: int = 2) -> None:
    """Make NAME.key and NAME.pem for 127.0.0.1, signed by the issuer or by itself."""
    by = (
        []
        if issuer is None
        else ["-CA", str(folder / f"{issuer}.pem"), "-CAkey", str(folder / f"{issuer}.key")]
    )
    uses = ["-addext", "basicConstraints=critical,CA:" + ("FALSE" if issuer else "TRUE")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", *uses, "-days", str(days),
         "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"), *by],
        check=True, capture_output=True,
    )  # fmt: skip
