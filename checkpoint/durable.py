"""Small files and directories that survive a power loss: the two orders of calls that everything else is made of."""

import contextlib
from pathlib import Path

from ..core.errors import StorageError
from ..core.ids import random_id
from .storage_ops import StorageOps

TEMPORARY_PREFIX = ".tmp."
"""Names that recovery drops: a file under one was never published."""


def temporary_path(directory: Path) -> Path:
    """Return a fresh name in `directory` that recovery will drop if it stays."""
    return directory / f"{TEMPORARY_PREFIX}{random_id()}"


def publish_new(ops: StorageOps, path: Path, content: bytes) -> bool:
    """Make a new small file durable under its name; False, and nothing changed, when the name is taken.

    Where it is taken nothing is written at all, so that a full device does not fail for a file that stands already.
    """
    if ops.stat(path) is not None:
        return False
    temporary = _write_temporary(ops, path, content)
    try:
        published = ops.rename_noreplace(temporary, path)
    except StorageError:
        discard(ops, temporary)
        raise
    if not published:
        ops.unlink(temporary)
        return False
    ops.sync_directory(path.parent)
    return True


def publish_over(ops: StorageOps, path: Path, content: bytes) -> None:
    """Make a small file durable under its name, replacing the one before at once: a crash leaves either whole."""
    temporary = _write_temporary(ops, path, content)
    try:
        ops.replace(temporary, path)
    except StorageError:
        discard(ops, temporary)
        raise
    ops.sync_directory(path.parent)


def _write_temporary(ops: StorageOps, path: Path, content: bytes) -> Path:
    temporary = temporary_path(path.parent)
    try:
        ops.write_small_new(temporary, content)
    except StorageError:
        discard(ops, temporary)
        raise
    return temporary


def discard(ops: StorageOps, path: Path) -> None:
    """Remove a temporary file if that works; recovery drops it otherwise. Never hides the error being handled."""
    with contextlib.suppress(StorageError):
        ops.unlink(path)


def make_directories(ops: StorageOps, root: Path, *names: str) -> Path:
    """Make `root/name/name/…` durable, each level in its parent, and return the last one; `root` exists.

    Each parent is made durable even when the directory was there: who made it may have crashed before doing so.
    """
    path = root
    for name in names:
        ops.make_directory(path / name)
        ops.sync_directory(path)
        path /= name
    return path


def temporaries(ops: StorageOps, directory: Path) -> list[Path]:
    """Return what unfinished writes left in a directory."""
    return [directory / name for name in ops.list_directory(directory) if name.startswith(TEMPORARY_PREFIX)]
