"""`everstep doctor`: what the node and its directories offer, what is wrong with them, and what to do."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoint.engine import EngineKind
from ...core.errors import EverstepError
from ...core.paths import data_socket_path
from . import doctor
from .doctor_host import daemon_pid, look_at_host
from .doctor_pins import pinned_max_bytes, private_pinned_max_bytes
from .doctor_plan import Finding, Health, judge, judge_host, worst
from .output import EXIT_DONE, EXIT_FAILED, Output

if TYPE_CHECKING:
    from rich.console import Console

    from ..control.client import ControlClient

_STYLES = {Health.UNKNOWN: "dim", Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "bold red"}


def examine(arguments: argparse.Namespace) -> int:
    """`everstep doctor`: the directories named, else those of the daemon that answers."""
    daemon = _ask_daemon()
    named = [Path(each) for each in arguments.directory] or daemon.directories
    new = [path for path in named if path.resolve() not in daemon.in_use] if named else [Path()]
    node = doctor.look_at_node(
        len(new), daemon.label, daemon_pid=daemon_pid(), pinned_max_bytes=daemon.pinned_max_bytes
    )
    host = look_at_host(memfd_problem=node.memfd_problem, control_problem=daemon.problem)
    findings = judge_host(host) + judge(node, doctor.look_at_directories(named, daemon.in_use))
    verdict = worst(findings)
    document = {"verdict": verdict, "findings": findings}
    Output(as_json=arguments.json).show(document, lambda console: _draw(console, findings))
    return EXIT_FAILED if verdict is Health.FAIL else EXIT_DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Daemon:
    """Who answers on the user's socket, and what it says."""

    label: str = ""
    """Empty: nobody answers."""
    directories: list[Path] = field(default_factory=list[Path])
    in_use: dict[Path, tuple[str, str]] = field(default_factory=dict[Path, tuple[str, str]])
    """Engine and reason of each directory; a missing device has none."""
    pinned_max_bytes: int = 0
    problem: str = ""
    """Why one that listens did not answer; empty: it did, or none listens."""


def _ask_daemon() -> _Daemon:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    try:
        with connected(data_socket_path()) as client:
            status = client.status()
            pinned_bytes = _pinned_max_bytes(client)
    except EverstepError as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            return _Daemon(pinned_max_bytes=private_pinned_max_bytes())
        return _Daemon(problem=error.message)
    kind = "private" if status.daemon.is_private else "node"
    label = f"everstep {status.daemon.version}, {kind}, pid {status.daemon.pid}"
    devices = [device for store in status.stores for device in store.devices]
    in_use = {Path(device.path): (device.engine, device.engine_reason) for device in devices if device.engine}
    is_pinned = any(engine == EngineKind.URING.value for engine, _ in in_use.values())
    return _Daemon(
        label=label,
        directories=[Path(device.path) for device in devices],
        in_use=in_use,
        pinned_max_bytes=pinned_bytes if is_pinned else 0,
    )


def _pinned_max_bytes(client: "ControlClient") -> int:
    try:
        return pinned_max_bytes(client.reload_config(dry_run=True).values)
    except EverstepError:  # another user's daemon tells its configuration to its own user and to root
        return 0


def _draw(console: "Console", findings: list[Finding]) -> None:
    from rich.text import Text  # noqa: PLC0415  slow to import

    place = None
    for finding in findings:
        if finding.place != place:
            place = finding.place
            console.print(Text(("\n" if place else "") + (place or "this node"), "bold"), soft_wrap=True)
        health = Text(f"  {finding.health.value:<4}  ", _STYLES[finding.health])
        console.print(health + Text(f"{finding.check}: {finding.found}", "default"), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"        -> {finding.advice}", "dim"), soft_wrap=True)
