"""The control API over TCP: certificates on both sides, TLS 1.3, a table of who may what."""

import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair

from everstep.core.errors import ConfigError, DaemonUnavailableError, UsageError
from everstep.daemon.access import endpoint
from everstep.daemon.config import load_config
from everstep.daemon.control.client import ControlClient, connected
from everstep.daemon.testing import node_daemon
from everstep.proto import node_pb2 as pb
from everstep.proto import node_pb2_grpc

HOST = "127.0.0.1"


@dataclass
class Served:
    """A daemon that answers over TCP."""

    authority: Authority
    port: int
    socket_path: Path
    log: Path

    def channel(self, pair: Pair | None, authority: Authority | None = None) -> grpc.Channel:
        """Return a channel of whoever has this certificate, and believes this authority."""
        root = (authority or self.authority).certificate.read_bytes()
        key, chain = (pair.key.read_bytes(), pair.certificate.read_bytes()) if pair else (None, None)
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(
            f"{HOST}:{self.port}", grpc.ssl_channel_credentials(root, key, chain), options=options
        )


def section(authority: Authority, pair: Pair, clients: str) -> str:
    return (
        f'[control]\nlisten = "{HOST}:0"\ncertificate_file = "{pair.certificate}"\nkey_file = "{pair.key}"\n'
        f'authority_file = "{authority.certificate}"\n[control.clients]\n{clients}\n'
    )


CLIENTS = """
"viewer.example" = {role = "viewer"}
"spiffe://example/operator" = {role = "operator"}
"admin" = {role = "admin"}
"of-another" = {role = "operator", user = "4711"}
"both.example" = {role = "admin"}
"less.example" = {role = "viewer"}
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Authority(folder)


@pytest.fixture
def served(authority: Authority, node_config: Path, socket_path: Path) -> Iterator[Served]:
    pair = authority.sign("node", "IP:127.0.0.1")
    with node_config.open("a") as file:
        file.write(section(authority, pair, CLIENTS))
    with node_daemon(node_config, socket_path):
        log = socket_path.with_name("daemon.log")
        found = re.search(r"control_serves_network port=(\d+)", log.read_text())
        assert found
        yield Served(authority, int(found[1]), socket_path, log)


@contextmanager
def calling(served: Served, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Generator[ControlClient]:
    for name, value in (
        (endpoint.CONNECT, f"{HOST}:{served.port}"),
        (endpoint.CERTIFICATE, str(pair.certificate)),
        (endpoint.KEY, str(pair.key)),
        (endpoint.AUTHORITY, str(served.authority.certificate)),
    ):
        monkeypatch.setenv(name, value)
    with connected(Path("/nowhere/data.sock")) as client:
        yield client


def status_code(channel: grpc.Channel, **metadata: str) -> grpc.StatusCode:
    with channel:
        stub = node_pb2_grpc.NodeStub(channel)
        try:
            stub.GetStatus(pb.GetStatusRequest(), timeout=10, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]
    return grpc.StatusCode.OK


def test_the_certificate_says_what_its_holder_may(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    sign = served.authority.sign
    viewer, operator = sign("v", "DNS:viewer.example"), sign("o", "URI:spiffe://example/operator")
    with calling(served, viewer, monkeypatch) as client:
        assert client.status().daemon.uid == os.getuid()
        assert client.checkpoints("") == []
        with pytest.raises(UsageError, match="needs the role operator, the caller has viewer"):
            client.drop_cache(1)
        with pytest.raises(UsageError, match="makes no tokens"):
            client.issue_token(ttl_s=60, is_read_only=True)
    with calling(served, operator, monkeypatch) as client:
        assert client.start_scrub("", []).checkpoint_count == 0
        with pytest.raises(UsageError, match="needs the role admin"):
            client.inspect_stores()
    with calling(served, sign("admin"), monkeypatch) as client:
        assert client.inspect_stores().findings == ()
    with calling(served, sign("t", "DNS:both.example", "DNS:less.example"), monkeypatch) as client:
        client.status()
        with pytest.raises(UsageError, match="PERMISSION_DENIED"):
            client.stop()


def test_nobody_comes_in_without_one_that_counts(served: Served) -> None:
    sign = served.authority.sign
    foreign = Authority(served.authority.folder, "foreign")
    assert status_code(served.channel(sign("v", "DNS:viewer.example"))) is grpc.StatusCode.OK
    for pair, code in (
        (None, grpc.StatusCode.UNAVAILABLE),
        (foreign.sign("f", "DNS:viewer.example"), grpc.StatusCode.UNAVAILABLE),
        (sign("n", "DNS:unknown.example"), grpc.StatusCode.UNAUTHENTICATED),
        # Alternative names go before the common name.
        (sign("admin", "DNS:unknown.example"), grpc.StatusCode.UNAUTHENTICATED),
    ):
        assert status_code(served.channel(pair)) is code
    # A daemon that is not ours is not called either.
    assert status_code(served.channel(sign("admin"), foreign)) is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(f"{HOST}:{served.port}") as channel:
        assert status_code(channel) is grpc.StatusCode.UNAVAILABLE


def test_a_token_makes_a_certificate_no_better(served: Served) -> None:
    with connected(served.socket_path) as client:
        token = client.issue_token(ttl_s=60, is_read_only=False).token
    unknown = served.authority.sign("n", "DNS:unknown.example")
    code = status_code(served.channel(unknown), authorization=f"Bearer {token}")
    assert code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("version", "is_spoken"), [("TLSv1_2", False), ("TLSv1_3", True)])
def test_only_tls_1_3_is_spoken(served: Served, version: str, is_spoken: bool) -> None:
    pair = served.authority.sign("v", "DNS:viewer.example")
    context = ssl.create_default_context(cafile=str(served.authority.certificate))
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(str(pair.certificate), str(pair.key))
    with socket.create_connection((HOST, served.port), timeout=10) as plain:
        if is_spoken:
            with context.wrap_socket(plain, server_hostname=HOST) as spoken:
                assert spoken.version() == "TLSv1.3"
        else:
            with pytest.raises(OSError, match=r"alert|reset|EOF|closed"):
                context.wrap_socket(plain, server_hostname=HOST).close()


def test_new_files_are_taken_and_connections_stay(served: Served) -> None:
    authority, viewer = served.authority, served.authority.sign("v", "DNS:viewer.example")
    before = served.channel(viewer)
    stub = node_pb2_grpc.NodeStub(before)
    stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    first = _serial(served)
    authority.sign("node", "IP:127.0.0.1")  # over the files that the daemon has read
    assert _serial(served) != first
    stub.GetStatus(pb.GetStatusRequest(), timeout=10)  # by the connection of before
    # What cannot be used changes nothing.
    second = _serial(served)
    (authority.folder / "node.pem").write_text("no certificate\n")
    assert _serial(served) == second
    stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    before.close()
    assert "certificates_not_read" in served.log.read_text()


def _serial(served: Served) -> bytes:
    """Return the certificate that the daemon shows to a new connection."""
    pair = served.authority.sign("v2", "DNS:viewer.example")
    context = ssl.create_default_context(cafile=str(served.authority.certificate))
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(str(pair.certificate), str(pair.key))
    with (
        socket.create_connection((HOST, served.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as spoken,
    ):
        shown = spoken.getpeercert(binary_form=True)
        assert shown
        return shown


def test_the_command_line_calls_it(served: Served) -> None:
    pair = served.authority.sign("admin")
    arguments = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    arguments += ["--tls-ca", str(served.authority.certificate)]
    viewer = served.authority.sign("v", "DNS:viewer.example")
    viewing = ["--tls-cert", str(viewer.certificate), "--tls-key", str(viewer.key), *arguments[4:]]
    command = [sys.executable, "-P", "-m", "everstep.daemon.cli.main", "--connect", f"{HOST}:{served.port}"]
    environment = {**os.environ, "EVERSTEP_SOCKET": "/nowhere/data.sock"}
    for given, expected, words in (
        ([*arguments, "status"], 0, "daemon"),
        ([*arguments[:2], "status"], 2, "--tls-key"),
        ([*arguments, "quota"], 0, "uid"),
        ([*viewing, "device", "drain", "nvme0"], 1, "needs the role admin"),
    ):
        done = subprocess.run(
            [*command, *given], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == expected, done
        assert words in done.stdout + done.stderr


def test_an_address_without_certificates_does_not_start(
    authority: Authority, node_config: Path, socket_path: Path
) -> None:
    pair = authority.sign("node", "IP:127.0.0.1")
    good = section(authority, pair, '"a" = {role = "viewer"}')
    text = node_config.read_text()
    for changed, words in (
        ('[control]\nlisten = "0.0.0.0:7078"\n', "could pretend to be anybody"),
        ('[control]\nlisten = "127.0.0.1:7078"\n', "without control.certificate_file"),
        (good.replace('"a" = {role = "viewer"}', ""), "names nobody who may call"),
        (good.replace("viewer", "king"), "role is 'king'"),
        (good.replace('"viewer"', '"admin", user = "4711"'), "for user '4711' only"),
        (good.replace('"viewer"', '"viewer", user = "nobody-here"'), "not known here"),
        (good.replace('"viewer"', '"viewer", users = "1"'), "users"),
        (good.replace(f"{HOST}:0", "here"), "control.listen"),
        ('[control]\nkey_file = "/x"\n', "no listen"),
    ):
        node_config.write_text(text + changed)
        with pytest.raises(ConfigError) as caught:
            load_config(node_config)
        assert words in str(caught.value)
    pair.key.chmod(0o640)
    node_config.write_text(text + good)
    with pytest.raises(AssertionError, match="others may read"), node_daemon(node_config, socket_path):
        pass


def test_whoever_asks_a_daemon_that_is_not_there_hears_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = served.authority.sign("admin")
    served.port = 1
    with (
        calling(served, pair, monkeypatch) as client,
        pytest.raises(DaemonUnavailableError, match=r"127\.0\.0\.1:1"),
    ):
        client.status()
