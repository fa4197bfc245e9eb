"""`everstep fsck`: inspects directories with their locks held, or asks the daemon; its exit codes are its own."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from ...checkpoint.findings import Severity
from ...checkpoint.fsck import FsckReport
from ...core.errors import UsageError
from ...core.paths import data_socket_path
from . import render
from .node_commands import target_of
from .output import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, Output

EXIT_LOST = EXIT_USAGE
"""The same number: who calls fsck from a script and gets 2 has to look in both cases."""
_EXIT_CODES = {Severity.NOTE: EXIT_DONE, Severity.REPAIRABLE: EXIT_FAILED, Severity.LOST: EXIT_LOST}


def fsck(arguments: argparse.Namespace) -> int:
    """`everstep fsck`: 0 nothing to do, 1 repairable or repaired, 2 something committed is lost."""
    target = target_of(arguments)
    if target.run:
        raise UsageError(
            f"fsck takes directories, got the run {target.title!r}",
            hint="`everstep verify RUN` reads a checkpoint of a run",
        )
    wants_change: bool = arguments.repair or arguments.data
    if target.directories:
        report, source = _offline(target.directories, arguments), ", ".join(map(str, target.directories))
    elif wants_change:
        raise UsageError(
            "--repair and --data need directories",
            hint="stop the daemon, then everstep fsck DIR ... --repair",
        )
    else:
        report, source = _by_daemon(), "the daemon's stores"
    document = {
        "source": source,
        "repaired": report.is_repaired,
        "run_count": report.run_count,
        "shard_count": report.shard_count,
        "blocks_read": bool(arguments.data),
        "findings": report.findings,
        "put_aside": report.put_aside,
    }
    reader = "--data reads them" if target.directories else "`everstep verify` and the scrub read them"
    unread = "" if arguments.data else f"blocks were not read ({reader})"
    Output(as_json=arguments.json).show(
        document,
        lambda console: render.fsck(console, report, source, is_asked=arguments.repair, unread=unread),
    )
    return _EXIT_CODES[report.worst]


def _offline(directories: Sequence[Path], arguments: argparse.Namespace) -> FsckReport:
    from . import offline  # noqa: PLC0415  slow to import

    return offline.inspect(directories, repair=arguments.repair, data=arguments.data)


def _by_daemon() -> FsckReport:
    from ..control.client import connected  # noqa: PLC0415  grpc is slow to import

    hint = "name the storage directories to inspect them without a daemon, or set EVERSTEP_SOCKET"
    with connected(data_socket_path(), hint=hint) as daemon:
        return daemon.inspect_stores()


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"fsck": fsck}
