"""`everstep export`: finds the checkpoint and the directories that hold it, and has the files written."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..core.errors import NotFoundError, UsageError
from ..core.paths import data_socket_path
from ..core.sizes import size_text
from .cli_commands import Target, parse_target
from .cli_output import EXIT_DONE, Output
from .tool_child import run_child
from .views import CheckpointView

if TYPE_CHECKING:
    from rich.console import Console

SHARD_BYTES_MIN = 1024


def export(arguments: argparse.Namespace) -> int:
    """`everstep export`."""
    target = parse_target(arguments.run, [*arguments.storage, *arguments.target])
    if not target.run:
        raise UsageError(
            "export takes a run", hint="everstep export RUN DEST --to safetensors [--storage DIR ...]"
        )
    if arguments.shard_bytes < SHARD_BYTES_MIN:
        raise UsageError(f"--shard-bytes is {arguments.shard_bytes}", hint=f"at least {SHARD_BYTES_MIN}")
    found, directories, uid = _locate(target)
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
    answer = run_child("hook.export", request)
    document = {"checkpoint": found.title, "format": arguments.to, **answer}
    Output(as_json=arguments.json).show(document, lambda console: _draw(console, found, answer))
    return EXIT_DONE


def _locate(target: Target) -> tuple[CheckpointView, tuple[Path, ...], int]:
    """Return the checkpoint, all directories of its store, and whom they must belong to."""
    from . import offline  # noqa: PLC0415  the daemon's side is slow to import

    if target.directories:
        with offline.reading(target.directories) as store:
            summary = store.detail(target.run, target.checkpoint, leaf_count_max=0).summary
        return summary, target.directories, offline.owner_uid(target.directories)
    from .control_client import connected  # noqa: PLC0415

    hint = "name storage directories with --storage, or set EVERSTEP_SOCKET"
    with connected(data_socket_path(), hint=hint) as daemon:
        detail = daemon.detail(target.run, target.checkpoint, leaf_count_max=0)
        status = daemon.status()
    wanted = {segment.device_id for segment in detail.segments}
    for store in status.stores:
        if wanted <= {device.device_id for device in store.devices}:
            return detail.summary, tuple(Path(device.path) for device in store.devices), status.daemon.uid
    raise NotFoundError(
        f"{detail.summary.title} is on no store that the daemon has open",
        hint="name its directories: --storage",
    )


def _draw(console: "Console", found: CheckpointView, answer: dict[str, object]) -> None:
    from rich.text import Text  # noqa: PLC0415  slow to import

    from .cli_render import count_text  # noqa: PLC0415

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
