"""Several real daemons that share their caches on one machine, for tests and benchmarks.

Each has an address of its own: 127.0.0.2, 127.0.0.3, … on loopback, or a network namespace's. A reader is on the node
whose socket it uses: `EVERSTEP_SOCKET` (data sockets can be reached from every network namespace).
"""

import secrets
import signal
import socket
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..testing import daemon_process

PORTS = range(20_000, 32_000)
"""Below those that Linux chooses itself (net.ipv4.ip_local_port_range: 32768 and on)."""


@dataclass(slots=True)
class RunningNode:
    """One daemon."""

    address: str
    socket: Path
    environment: dict[str, str]
    prefix: Sequence[str]
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    @property
    def log(self) -> str:
        """What it has written."""
        return self.socket.with_name("daemon.log").read_text(errors="replace")


def free_port(host: str) -> int:
    """Return a port that nobody uses now, and that the kernel gives nobody who asks for any."""
    for port in secrets.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise AssertionError(f"no port of {host} is free")


def write_token(folder: Path) -> Path:
    """Return a new file with a token in it."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def node_environment(
    address: str, members: Sequence[str], token: Path | None, settings: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what makes a private daemon a node: `settings` are keys of `[cache]`."""
    given = {"listen": address, "address": address, "members": ",".join(members), "deadline_s": "10"}
    given |= {"token_file": str(token)} if token else {}
    given |= settings or {}
    return {f"EVERSTEP_CACHE_{key.upper()}": value for key, value in given.items()}


@contextmanager
def running_nodes(
    folder: Path,
    count: int,
    *,
    hosts: Sequence[str] = (),
    prefixes: Sequence[Sequence[str]] = (),
    settings: Mapping[str, str] | None = None,
    with_token: bool = True,
) -> Generator[list[RunningNode]]:
    """Run `count` daemons that share their caches, ended when the block is left.

    Args:
        folder: theirs; its path is short, since sockets lie in it.
        hosts: their addresses; empty: 127.0.0.2 and on.
        prefixes: what goes before each one's command: `["ip", "netns", "exec", NAME]`.
        settings: keys of `[cache]` for all of them, beside a token and a deadline of 10 s, for busy machines.
    """
    hosts = hosts or [f"127.0.0.{2 + number}" for number in range(count)]
    port = free_port("127.0.0.1")
    addresses = [f"{host}:{port}" for host in hosts]
    token = write_token(folder) if with_token else None
    with ExitStack() as stack:
        nodes: list[RunningNode] = []
        for number, address in enumerate(addresses):
            environment = node_environment(address, addresses, token, settings)
            path = folder / f"n{number}" / "data.sock"
            prefix = prefixes[number] if prefixes else ()
            process = stack.enter_context(daemon_process(path, environment=environment, prefix=prefix))
            nodes.append(RunningNode(address, path, environment, prefix, process))
        yield nodes
