"""`everstep export`: finds the checkpoint and the directories that hold it, and has the files written."""

import argparse
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...core.errors import UsageError
from ...core.paths import data_socket_path
from ...core.sizes import size_text
from ..control.views import CheckpointView
from .node_commands import Target, parse_target
from .output import EXIT_DONE, Output
from .tool_child import run_child

if TYPE_CHECKING:
    from rich.console import Console

SHARD_BYTES_MIN = 1024


def export(arguments: argparse.Namespace) -> int:
    """`everstep export`."""
    target = parse_target(arguments.run, [*arguments.storage, *arguments.target])
    if not target.run:
        raise UsageError(
            "export takes a run", hint="`everstep export RUN DEST --to safetensors [--storage DIR ...]`"
        )
    if arguments.shard_bytes < SHARD_BYTES_MIN:
        raise UsageError(f"--shard-bytes is {arguments.shard_bytes}", hint=f"at least {SHARD_BYTES_MIN}")
    with _located(target) as (found, directories, uid):
        request: dict[str, object] = {
            "directories": [str(path) for path in directories],
            "uid": uid,
            "owner_uid": found.owner_uid,
            "run_id": found.run_id,
            "checkpoint": str(found.checkpoint),
            "rank": min(found.ranks) if arguments.rank is None else arguments.rank,
            "format": arguments.to,
            "destination": str(Path(arguments.destination).absolute()),
            "shard_size_bytes": arguments.shard_bytes,
        }
        if not target.directories and os.getuid() not in (
            0,
            uid,
        ):  # whose files others cannot open: it lends them
            request |= {"socket": str(data_socket_path()), "ranks": list(found.ranks)}
        answer = run_child("hook.export", request)
    document = {"checkpoint": found.title, "format": arguments.to, **answer}
    Output(as_json=arguments.json).show(document, lambda console: _draw(console, found, answer))
    return EXIT_DONE


@contextmanager
def _located(target: Target) -> Generator[tuple[CheckpointView, tuple[Path, ...], int]]:
    """Give the checkpoint, all directories of its store, and whom they belong to; a daemon keeps it meanwhile."""
    from . import offline  # noqa: PLC0415  the daemon's side is slow to import

    if target.directories:
        with offline.reading(target.directories) as store:
            summary = store.detail(target.run, target.checkpoint, leaf_count_max=0).summary
        yield summary, target.directories, offline.owner_uid(target.directories)
        return
    from ..control.client import connected  # noqa: PLC0415

    hint = "name storage directories with --storage, or set EVERSTEP_SOCKET"
    with (
        connected(data_socket_path(), hint=hint) as daemon,
        daemon.exporting(target.run, target.checkpoint) as held,
    ):
        yield held.summary, held.directories, held.store_uid


def _draw(console: "Console", found: CheckpointView, answer: dict[str, object]) -> None:
    from rich.text import Text  # noqa: PLC0415  slow to import

    from .render import count_text  # noqa: PLC0415

    files = cast(dict[str, int], answer["files"])
    console.print(
        Text(
            f"exported {found.title} to {answer['destination']}: {count_text(len(files), 'file')},"
            f" {size_text(sum(files.values()))}",
            "green",
        ),
        soft_wrap=True,
    )
    left_out = cast(list[str], answer["left_out"])
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        console.print(
            Text(
                f"! {count_text(len(left_out), 'tensor')} that other ranks have of their own ({shown}):"
                " --rank K exports those of rank K",
                "yellow",
            ),
            soft_wrap=True,
        )
