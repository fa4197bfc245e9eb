"""`everstep export`: a checkpoint as files of other tools. A program of its own: `python -m everstep.hook.export`.

The files are made in a folder with another name, made durable, and renamed: what stands at the destination is whole.
"""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

from ..core.converter import Converter
from ..core.ids import CheckpointId
from .export_folder import published_folder
from .tool_process import run_tool

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .export_source import ExportSource

SIDE_FILE = "everstep.json"
SIDE_FORMAT = "everstep-export-v1"


class ExportFormat(Enum):
    """For whom the files are."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


class ExportRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to export, and where to."""

    directories: list[str]
    uid: int
    """Whom the store's files must belong to."""
    owner_uid: int
    run_id: str
    checkpoint: str
    rank: int
    format: ExportFormat
    destination: str
    shard_size_bytes: int
    socket: str = ""
    """Of the daemon that lends the files, where the directories are not this user's to read; empty: they are."""
    ranks: list[int] = []
    """Of the checkpoint; for what is lent."""


_REQUEST = Converter(ExportRequest)


def main() -> int:
    """Run the program."""
    return run_tool(lambda document: export(_REQUEST.convert(document)))


def export(request: ExportRequest) -> dict[str, object]:
    """Write the files and return what was written: files with their sizes, and what was left out.

    Raises:
        UsageError: something stands at the destination.
        StateTypeError: the format cannot hold a value, or would lose an entry of a dict.
        NotFoundError, CorruptDataError, IncompleteError, StorageError: the checkpoint cannot be read whole.
        OSError: the destination cannot be written.
    """
    destination = Path(request.destination)
    with _source(request) as source, published_folder(destination) as folder:
        _write(folder, source, request)
        (folder / SIDE_FILE).write_text(json.dumps(_side_document(source, request.format), indent=1))
        files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*"))}
        left_out = source.whole.left_out
    return {"destination": str(destination), "files": files, "left_out": left_out}


def _source(request: ExportRequest) -> "AbstractContextManager[ExportSource]":
    # torch is imported where a missing one can be said
    from .export_source import lent_source, opened_source  # noqa: PLC0415

    checkpoint = CheckpointId.parse(request.checkpoint)
    if request.socket:
        return lent_source(
            Path(request.socket),
            run_id=request.run_id,
            checkpoint=checkpoint,
            ranks=request.ranks,
            rank=request.rank,
        )
    return opened_source(
        [Path(each) for each in request.directories],
        uid=request.uid,
        owner_uid=request.owner_uid,
        run_id=request.run_id,
        checkpoint=checkpoint,
        rank=request.rank,
    )


def _write(folder: Path, source: "ExportSource", request: ExportRequest) -> None:
    if request.format is ExportFormat.SAFETENSORS:
        from .export_safetensors import write_safetensors  # noqa: PLC0415

        write_safetensors(folder, source, shard_size_bytes=request.shard_size_bytes)
        return
    from .state_tree import StateTree  # noqa: PLC0415

    tree = StateTree(source.documents, source.raw, by_name=request.format is ExportFormat.DCP)
    match request.format:
        case ExportFormat.TORCH:
            from .export_torch import write_torch  # noqa: PLC0415

            write_torch(folder, source, tree.components())
        case ExportFormat.DCP:
            from .export_dcp import write_dcp  # noqa: PLC0415

            write_dcp(folder, source, tree.components())
        case _:
            assert_never(request.format)


def _side_document(source: "ExportSource", kind: ExportFormat) -> dict[str, object]:
    """Return what the files cannot say: exact values, dtypes and aliases; `import` reads it beside safetensors."""
    manifest = source.manifest
    return {
        "format": SIDE_FORMAT,
        "kind": kind.value,
        "run": manifest.run_name,
        "checkpoint": str(manifest.checkpoint),
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "notes": manifest.notes,
        "tensors": {
            tensor.name: {"dtype": tensor.dtype, "shape": tensor.shape, "alias_of": tensor.alias_of}
            for tensor in source.whole.tensors
        },
        "left_out": source.whole.left_out,
        "values": source.documents,
    }


if __name__ == "__main__":
    sys.exit(main())
