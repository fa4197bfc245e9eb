"""Reads a tree of class folders: sorted names without a list of all of them, sizes, and the folders' times."""

import contextlib
import errno
import heapq
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, TypeAlias

from ...core.errors import UsageError
from .image_index_format import ImageIndexBuilder
from .index_file import settled
from .index_format import Buffer, Stamp

_Above: TypeAlias = "tuple[tuple[int, int], _Above] | None"
"""The folders above one, nearest first: device and inode."""

NAMES_AT_ONCE = 65_536
"""Names of one directory that are sorted in memory; more go to sorted runs in a temporary file each."""


def scan_tree(root: bytes, endings: tuple[bytes, ...], now_s: float) -> list[Buffer]:
    """Return the index of `root` in pieces; UsageError where a class has no images, or what is there is no image.

    Classes are the folders in `root`, sorted; of each class the folders below it by their whole path, and the files
    of each by name: the order that torchvision's ImageFolder gives. Links are followed.
    """
    classes = class_folders(root)
    if not classes:
        raise UsageError(f"{os.fsdecode(root)} has no class folders", hint="give the folder that holds them")
    builder, stamps = ImageIndexBuilder(), list[Stamp]()
    empty: list[str] = []
    for name in classes:
        folders = sorted(_folders_below(root, name))
        stamps += [_folder_stamp(root, folder, now_s) for folder in folders]  # before their names are read
        if not builder.add_class(name, _images_in(root, name, folders, endings)):
            empty.append(os.fsdecode(name))
    if empty:
        known = ", ".join(os.fsdecode(ending) for ending in endings) or "any ending"
        raise UsageError(
            f"no images ({known}) in class folders {', '.join(empty[:5])} of {os.fsdecode(root)}",
            hint="remove the folders, or give the endings by extensions=",
        )
    return builder.encode(stamps)


def class_folders(root: bytes) -> list[bytes]:
    """Return the names of the folders in `root`, sorted by their bytes."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if _is_folder(entry))


def sorted_names(folder: bytes, endings: tuple[bytes, ...]) -> Iterator[bytes]:
    """Yield the names of the files of one directory, sorted by their bytes, in memory for NAMES_AT_ONCE of them."""
    with contextlib.ExitStack() as files:
        runs: list[IO[bytes]] = []
        names: list[bytes] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.lower().endswith(endings) or _is_folder(entry):
                    continue
                names.append(entry.name)
                if len(names) == NAMES_AT_ONCE:
                    runs.append(files.enter_context(_sorted_run(names)))
                    names = []
        names.sort()
        yield from heapq.merge(names, *(_names_of(run) for run in runs)) if runs else names


def _images_in(
    root: bytes, name: bytes, folders: Sequence[bytes], endings: tuple[bytes, ...]
) -> Iterator[tuple[bytes, int]]:
    for folder in folders:
        for file in sorted_names(root + b"/" + folder, endings):
            path = root + b"/" + folder + b"/" + file
            yield (folder + b"/" + file)[len(name) + 1 :], _size_of(path)


def _size_of(path: bytes) -> int:
    try:
        status = os.stat(path)  # noqa: PTH116  paths may be bytes
    except OSError as exc:
        why = "a link to nothing, or was just removed" if isinstance(exc, FileNotFoundError) else exc.strerror
        raise UsageError(f"{os.fsdecode(path)} is {why}", hint="remove it from the folder") from exc
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{os.fsdecode(path)} is not a regular file", hint="remove it from the folder")
    return status.st_size


def _folders_below(root: bytes, folder: bytes) -> Iterator[bytes]:
    """Yield `folder` and all folders below it, as paths below `root`; UsageError where a link leads back up."""
    left: list[tuple[bytes, _Above]] = [(folder, None)]
    while left:
        folder, above = left.pop()
        status = os.stat(root + b"/" + folder)  # noqa: PTH116  paths may be bytes
        here = (status.st_dev, status.st_ino)
        if here in _places(above):
            raise UsageError(
                f"{os.fsdecode(root + b'/' + folder)} is a link to a folder above it", hint="remove it"
            )
        yield folder
        with os.scandir(root + b"/" + folder) as entries:
            left += [(folder + b"/" + entry.name, (here, above)) for entry in entries if _is_folder(entry)]


def _places(above: _Above) -> Iterator[tuple[int, int]]:
    while above is not None:
        here, above = above
        yield here


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return whether an entry is a folder, or a link to one; a link to itself is none."""
    try:
        return entry.is_dir()
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            return False
        raise


def _folder_stamp(root: bytes, folder: bytes, now_s: float) -> Stamp:
    status = os.stat(root + b"/" + folder)  # noqa: PTH116  paths may be bytes
    return Stamp(path=folder, mtime_s=settled(status.st_mtime_ns, now_s), size_bytes=0)


def _sorted_run(names: list[bytes]) -> IO[bytes]:
    run = tempfile.TemporaryFile()  # noqa: SIM115  closed by the caller
    names.sort()
    run.write(b"\0".join(names) + b"\0")  # no name has a zero byte
    run.seek(0)
    return run


def _names_of(run: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := run.read(1 << 16):
        *whole, rest = (rest + chunk).split(b"\0")
        yield from whole
