"""`everstep doctor`: what the node and its directories offer, what is wrong with them, and what to do."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import EverstepError
from ...core.paths import data_socket_path
from . import doctor
from .doctor_host import look_at_host
from .doctor_plan import Finding, Health, judge, judge_host, worst
from .output import EXIT_DONE, EXIT_FAILED, Output

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "bold red"}


def examine(arguments: argparse.Namespace) -> int:
    """`everstep doctor`: the directories named, else those of the daemon that answers."""
    daemon, known, in_use, problem = _ask_daemon()
    named = [Path(each) for each in arguments.directory] or known
    new = [path for path in named if path.resolve() not in in_use] if named else [Path()]
    node = doctor.look_at_node(len(new), daemon)
    host = look_at_host(memfd_problem=node.memfd_problem, control_problem=problem)
    findings = judge_host(host) + judge(node, doctor.look_at_directories(named, in_use))
    verdict = worst(findings)
    document = {"verdict": verdict, "findings": findings}
    Output(as_json=arguments.json).show(document, lambda console: _draw(console, findings))
    return EXIT_FAILED if verdict is Health.FAIL else EXIT_DONE


def _ask_daemon() -> tuple[str, list[Path], dict[Path, tuple[str, str]], str]:
    """Return who answers on the user's socket (empty: nobody), the directories of its stores, and their engines.

    Last comes why one that listens did not answer; empty: it did, or none listens.
    An engine comes with its reason; a missing device has none.
    """
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    try:
        with connected(data_socket_path()) as client:
            status = client.status()
    except EverstepError as error:
        listens = not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
        return "", [], {}, error.message if listens else ""
    kind = "private" if status.daemon.is_private else "node"
    label = f"everstep {status.daemon.version}, {kind}, pid {status.daemon.pid}"
    devices = [device for store in status.stores for device in store.devices]
    in_use = {Path(device.path): (device.engine, device.engine_reason) for device in devices if device.engine}
    return label, [Path(device.path) for device in devices], in_use, ""


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
