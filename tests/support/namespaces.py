"""Hosts of a network of their own: namespaces, joined by a bridge in one more; nothing of this machine is touched."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT_FOLDER = Path("/etc/netns")
"""`ip netns exec` puts what lies there over /etc."""


def reason_against() -> str:
    """Return why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"es{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"ip netns: {tried.stderr.strip()}"
    bridge = subprocess.run(
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    _ip("netns", "del", name)
    return f"ip link add type bridge: {bridge.stderr.strip()}" if bridge.returncode else ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Host:
    """One of them."""

    name: str
    ip: str
    switch: str
    port: str
    """Its end of the cable at the switch."""

    @property
    def prefix(self) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Pull the cable: packets vanish, no connection is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def join(self) -> None:
        """Plug it in again."""
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def write_hosts(self, text: str) -> None:
        """Change its /etc/hosts, also for programs that run there already."""
        path = ROOT_FOLDER / self.name / "hosts"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)  # in place: it is bind-mounted


@contextmanager
def network(count: int) -> Generator[list[Host]]:
    """Make so many hosts; all is gone when the block is left."""
    base = f"es{os.getpid()}"
    switch = f"{base}-sw"
    had_folder = ROOT_FOLDER.exists()
    with ExitStack() as stack:
        _namespace(stack, switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        hosts: list[Host] = []
        for number in range(count):
            host = Host(f"{base}-h{number}", f"10.77.0.{number + 1}", switch, f"p{number}")
            _namespace(stack, host.name)
            _ip(
                "-n",
                switch,
                "link",
                "add",
                host.port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.name,
            )
            _ip("-n", switch, "link", "set", host.port, "master", "br0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "addr", "add", f"{host.ip}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            hosts.append(host)
        yield hosts
    if not had_folder:
        shutil.rmtree(ROOT_FOLDER, ignore_errors=True)


def _namespace(stack: ExitStack, name: str) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    stack.callback(shutil.rmtree, ROOT_FOLDER / name, ignore_errors=True)
