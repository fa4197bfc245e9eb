"""`everstep export`: a checkpoint as files of other tools. A program of its own: `python -m everstep.hook.export`.

The files are made in a folder with another name, made durable, and renamed: what stands at the destination is whole.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

from ..core.errors import UsageError
from ..core.ids import CheckpointId
from .tool_process import run_tool

if TYPE_CHECKING:
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


def main() -> int:
    """Run the program."""
    return run_tool(lambda document: export(msgspec.convert(document, ExportRequest)))


def export(request: ExportRequest) -> dict[str, object]:
    """Write the files and return what was written: files with their sizes, and what was left out.

    Raises:
        UsageError: something stands at the destination.
        NotFoundError, CorruptDataError, IncompleteError, StorageError: the checkpoint cannot be read whole.
        OSError: the destination cannot be written.
    """
    from .export_source import opened_source  # noqa: PLC0415  torch is imported where a missing one can be said

    destination = Path(request.destination)
    source_of = opened_source(
        [Path(each) for each in request.directories],
        uid=request.uid,
        owner_uid=request.owner_uid,
        run_id=request.run_id,
        checkpoint=CheckpointId.parse(request.checkpoint),
        rank=request.rank,
    )
    with source_of as source, published_folder(destination) as folder:
        _write(folder, source, request)
        (folder / SIDE_FILE).write_text(json.dumps(_side_document(source, request.format), indent=1))
        files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*"))}
        left_out = source.whole.left_out
    return {"destination": str(destination), "files": files, "left_out": left_out}


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


@contextmanager
def published_folder(destination: Path) -> Generator[Path]:
    """Give an empty folder that becomes `destination` when the block is left, durably; after an error it is removed.

    Raises:
        UsageError: something stands at the destination: it is never overwritten.
        OSError: the folder cannot be made.
    """
    parent = destination.parent
    if destination.is_symlink() or (destination.exists() and not _is_empty_folder(destination)):
        raise UsageError(f"{destination} is there already", hint="name a folder that is absent or empty")
    if not parent.is_dir():
        raise UsageError(f"there is no folder {parent}", hint="make it, or name another destination")
    folder = parent / f".{destination.name}.{secrets.token_hex(8)}.tmp"
    folder.mkdir()
    try:
        yield folder
        for path in sorted(folder.rglob("*"), reverse=True):
            _sync(path)
        _sync(folder)
        folder.rename(destination)  # over an empty folder, never over anything else
        _sync(parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
