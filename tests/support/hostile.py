"""A node daemon that is attacked, its honest neighbour, and what may not be left behind."""

import contextlib
import os
import re
import socket as sockets
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import msgspec
from certificates import Authority, Pair

from everstep.core.ids import CheckpointId
from everstep.core.paths import control_socket_path
from everstep.core.version import VERSION
from everstep.daemon.nodes.testing import free_port, write_token
from everstep.daemon.testing import FakeArena, FakeTrainer, node_daemon
from everstep.proto import frames

SETTLE_S = 60.0
HOST = "127.0.0.1"
POOL_THREADS = 12
"""Pools of the daemon grow to their bound when they are used first."""


@dataclass(frozen=True)
class Held:
    """What the daemon's process holds."""

    descriptors: int
    memfd_mappings: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Held":
        return cls(
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208
            memfd_mappings=Path(f"/proc/{pid}/maps").read_text().count("/memfd:"),
            threads=len(os.listdir(f"/proc/{pid}/task")),  # noqa: PTH208
        )

    def beyond(self, before: "Held") -> bool:
        return (
            self.descriptors > before.descriptors
            or self.memfd_mappings > before.memfd_mappings
            or self.threads > before.threads + POOL_THREADS
        )


@dataclass
class Neighbour:
    """Another tenant, who saves as ever."""

    trainer: FakeTrainer
    arena: FakeArena
    step: int = 0

    def save(self) -> float:
        """Save the next checkpoint, which must be committed whole; return the seconds from sealed to reported."""
        self.step += 1
        began_s = time.monotonic()
        slot = self.step % 2
        self.arena.save(CheckpointId(1, self.step), seed=self.step, slot=slot)
        persisted = self.trainer.event(frames.Persisted)
        assert isinstance(persisted, frames.Persisted)
        assert (persisted.attempt, persisted.step) == (1, self.step)
        self.trainer.send(frames.SealedEverywhere(attempt=1, step=self.step))
        if self.step > 1:
            self.trainer.event(frames.SlotFree)
        return time.monotonic() - began_s


@dataclass
class Attacked:
    """The daemon and its ports."""

    pid: int
    socket: Path
    tls_port: int
    peer_port: int
    metrics_port: int
    peer_token: Path
    authority: Authority
    pair: Pair
    devices: list[Path]
    neighbour: Neighbour
    before: Held
    held: list[sockets.socket] = field(default_factory=list[sockets.socket])

    @property
    def control(self) -> Path:
        return control_socket_path(self.socket)

    @property
    def log(self) -> str:
        return self.socket.with_name("daemon.log").read_text(errors="replace")

    def connect(self) -> sockets.socket:
        """Return a connection to the data socket."""
        sock = sockets.socket(sockets.AF_UNIX)
        sock.connect(str(self.socket))  # blocking: waits while the listener's queue is full
        sock.settimeout(SETTLE_S)
        return sock

    def tcp(self, port: int) -> sockets.socket:
        return sockets.create_connection((HOST, port), timeout=SETTLE_S)

    @contextlib.contextmanager
    def spoken(self) -> Generator[ssl.SSLSocket]:
        """Give a connection to the control API's port over which the viewer has shown its certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(self.pair.certificate, self.pair.key)
        context.set_alpn_protocols(["h2"])
        with self.tcp(self.tls_port) as plain, context.wrap_socket(plain, server_hostname=HOST) as sock:
            yield sock

    @contextlib.contextmanager
    def channel(self) -> Generator[grpc.Channel]:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_metadata_size", 1 << 20)]
        with grpc.insecure_channel(f"unix:{self.control}", options=options) as channel:
            yield channel

    def check(self) -> None:
        """The neighbour saves, and the daemon comes to hold no more than before."""
        for sock in self.held:
            sock.close()
        self.held.clear()
        self.neighbour.save()
        deadline_s = time.monotonic() + SETTLE_S
        while (now := Held.of(self.pid)).beyond(self.before):
            assert time.monotonic() < deadline_s, f"left behind: {now}, before: {self.before}"
            time.sleep(0.02)


@contextlib.contextmanager
def attacked(folder: Path, *, quota: str = "") -> Generator[Attacked]:
    """Run a daemon with all its ports and a neighbour that has saved."""
    authority = Authority(folder)
    pair, caller = authority.sign("node", "IP:127.0.0.1"), authority.sign("viewer")
    devices = [folder / "d0", folder / "d1"]
    for device in devices:
        device.mkdir()
    socket_path = folder / "s" / "data.sock"
    socket_path.parent.mkdir(mode=0o700)
    peer_port, token = free_port(HOST), write_token(folder)
    (folder / "node.toml").write_text(
        f'[daemon]\nsocket = "{socket_path}"\n'
        f'[cache]\nlisten = "{HOST}:{peer_port}"\ntoken_file = "{token}"\nmembers = ["{HOST}:{peer_port}"]\n'
        f'[control]\nlisten = "{HOST}:0"\ncertificate_file = "{pair.certificate}"\nkey_file = "{pair.key}"\n'
        f'authority_file = "{authority.certificate}"\n[control.clients]\nviewer = {{role = "viewer"}}\n'
        f'[quota]\n{quota}\n[devices]\nnvme0 = "{devices[0]}"\nnvme1 = "{devices[1]}"\n'
    )
    with node_daemon(folder / "node.toml", socket_path) as process, FakeTrainer(socket_path) as trainer:
        log = socket_path.with_name("daemon.log").read_text()
        port = re.search(r"control_serves_network port=(\d+)", log)
        assert port
        facts = re.search(r'"metrics_port":(\d+)', socket_path.with_name("daemon.json").read_text())
        assert facts
        trainer.open_run([Path("nvme0"), Path("nvme1")], name="neighbour")
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        neighbour = Neighbour(trainer, arena)
        for _ in range(4):
            neighbour.save()
        found = Attacked(
            process.pid,
            socket_path,
            int(port[1]),
            peer_port,
            int(facts[1]),
            token,
            authority,
            caller,
            devices,
            neighbour,
            Held.of(process.pid),
        )
        _warm_up(found)
        found.before = Held.of(process.pid)
        yield found
        for sock in found.held:
            sock.close()
        arena.close()


def _warm_up(found: Attacked) -> None:
    """Let every part be used once, so that its pools and epolls are there."""
    with found.channel() as channel:
        call = channel.unary_unary("/everstep.node.v1.Node/GetStatus")
        with contextlib.suppress(grpc.RpcError):
            call(b"", timeout=10)
    for port in (found.tls_port, found.peer_port, found.metrics_port):
        with found.tcp(port) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            ended(sock)
    with Evil(found) as evil:
        evil.attach("warm")


class Evil(FakeTrainer):
    """A trainer of another tenant that means harm."""

    def __init__(self, target: Attacked, *, hello: bool = True) -> None:
        self.target, self.attempt = target, 0
        super().__init__(target.socket, hello=hello)

    def __enter__(self) -> "Evil":
        return self

    def attach(self, name: str = "evil") -> FakeArena:
        """Take a run of its own with an arena that the daemon gives any tenant."""
        reply = self.open_run([Path("nvme0"), Path("nvme1")], name=name)
        assert isinstance(reply, frames.RunOpened), reply
        self.begin_attempt(reply.highest_attempt + 1)
        self.attempt = reply.highest_attempt + 1
        arena = self.make_arena(self.layout())
        arena.close()
        return arena

    def refusal(self, frame: frames.Request) -> str:
        """Send a frame and return the code with which it was refused; `closed` where the connection ended."""
        sentinel, asked = self.number(), 0
        if hasattr(frame, "request_id"):
            asked = self.number()
            frame = msgspec.structs.replace(frame, request_id=asked)
        try:
            self.send(frame)
            if not asked:
                self.send(frames.ListOffers(request_id=sentinel))
            said = ""
            while True:
                reply = self.receive()
                if getattr(reply, "re", None) == sentinel:
                    return said
                if asked and getattr(reply, "re", None) == asked:
                    return reply.code if isinstance(reply, frames.Failure) else ""
                if isinstance(reply, frames.Failure | frames.PersistFailed):
                    said = reply.code
        except (EOFError, OSError):
            return "closed"

    def failed(self) -> str:
        """Return the code of the next report that a snapshot cannot be persisted."""
        event = self.event(frames.PersistFailed)
        assert isinstance(event, frames.PersistFailed)
        return event.code


def ended(sock: sockets.socket) -> bytes:
    """Return what the other side said before it closed the connection; it must close it."""
    said = bytearray()
    with contextlib.suppress(
        ConnectionResetError, BrokenPipeError, ssl.SSLError
    ):  # TLS that ends without a word
        while data := sock.recv(1 << 16):
            said += data
    return bytes(said)


def paths_on(devices: Sequence[Path]) -> set[Path]:
    """Return all that lies there; rglob would fail where the daemon removes a directory meanwhile."""
    found = [(folder, names) for device in devices for folder, *names in os.walk(device)]
    return {Path(folder, name) for folder, (folders, files) in found for name in (*folders, *files)}


HELLO = frames.Hello(protocol=frames.PROTOCOL, version=VERSION, role=frames.Role.TRAINER)
Case = Callable[[Attacked], None]
