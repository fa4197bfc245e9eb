"""Looks at the machine for what a configuration asks for; what it means says fit_plan.py. Changes nothing."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from ..node_memory import read_memory_bounds
from ..nodes.address_format import parse_address
from .fit_plan import MachineFacts, NamedFile, Port
from .keys_plan import KeyPath, key_text


def look_at_machine(path: Path, values: Mapping[KeyPath, object], *, daemon_runs: bool) -> MachineFacts:
    """Return what is found for these values of every key. `daemon_runs`: ports in use may be its own."""
    bounds = asyncio.run(read_memory_bounds())
    return MachineFacts(
        total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=min(bound.available_bytes for bound in bounds),
        config_path=str(path),
        config_mode=stat.S_IMODE(path.stat().st_mode),
        files=[
            _look_at_file(key_text(key), value)
            for key, value in values.items()
            if key[-1].endswith("_file") and isinstance(value, str) and value
        ],
        ports=list(_ports(values, daemon_runs=daemon_runs)),
    )


def _look_at_file(key: str, name: str) -> NamedFile:
    path = Path(name)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        path.open("rb").close()
    except OSError as error:
        return NamedFile(key=key, path=name, problem=error.strerror or str(error))
    return NamedFile(key=key, path=name, mode=mode)


def _ports(values: Mapping[KeyPath, object], *, daemon_runs: bool) -> list[Port]:
    """Return every place that a key says to listen on over TCP."""
    wanted: list[tuple[str, str, int]] = []
    port = values.get(("metrics", "port"))
    if values.get(("metrics", "enabled")) and isinstance(port, int) and port:
        wanted.append(("metrics.port", "127.0.0.1", port))
    for key, value in values.items():
        if key[-1] == "listen" and isinstance(value, str) and value:
            with contextlib.suppress(ValueError):  # said by the section's own check
                host, number = parse_address(value)
                wanted.append((key_text(key), host, number))
    return [
        Port(key=key, place=f"{host}:{number}", problem=_refusal(host, number), is_ours=daemon_runs)
        for key, host, number in wanted
    ]


def _refusal(host: str, port: int) -> str:
    """Return why nobody can listen there now; empty: one can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""
