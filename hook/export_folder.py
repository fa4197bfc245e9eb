"""A folder that appears under its name when it is whole and durable.

Until then it has a hidden name beside it, and its maker holds a lock on it: what lies there without one was left by a
process that was killed, and the next one that makes the same folder removes it.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import UsageError


@contextmanager
def published_folder(destination: Path) -> Generator[Path]:
    """Give an empty folder that becomes `destination` when the block is left, durably; after an error it is removed.

    Raises:
        UsageError: something stands at the destination, which is never overwritten, or nothing can be made there.
        OSError: the folder cannot be made.
    """
    parent = destination.parent
    if destination.is_symlink() or (destination.exists() and not _is_empty_folder(destination)):
        raise UsageError(f"{destination} is there already", hint="name a folder that is absent or empty")
    if not parent.is_dir():
        raise UsageError(f"there is no folder {parent}", hint="make it, or name another destination")
    if not os.access(parent, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(
            f"uid {os.geteuid()} may make nothing in {parent}",
            hint="name a destination in a folder of your own",
        )
    _remove_left_over(destination)
    folder, lock = _make_locked(destination)
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
    finally:
        os.close(lock)


def _make_locked(destination: Path) -> tuple[Path, int]:
    """Return a new hidden folder and the descriptor that holds its lock, where the file system has such locks."""
    while True:
        folder = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}.tmp")
        folder.mkdir()
        try:
            lock = _open_folder(folder)
        except FileNotFoundError:  # another one took it for left over, before it was locked
            continue
        with suppress(OSError):  # some network file systems lock no folders: nobody removes it there
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _remove_left_over(destination: Path) -> None:
    """Remove the folders of processes that were killed while they made this one."""
    hidden = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{16}}\.tmp")
    for path in list(destination.parent.iterdir()):
        if not hidden.fullmatch(path.name):
            continue
        with suppress(OSError):  # in use, another user's, or gone: it stays
            lock = _open_folder(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
