"""A scratch folder that shows what the user's working folder shows, and takes what a script writes there.

It is made of links: every entry of the working folder, and of the folders above it, so that `data/train` and
`../data` are found. What is written becomes the scratch folder's own first: a linked file is copied, a linked folder
becomes a folder of links. Each change is one step for whoever reads there meanwhile, and the script's processes
take turns. Writing by an absolute path, and by native code into files that exist, is not caught.
"""

# ruff: noqa: PTH208 - strings: a hundred thousand names

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Protocol, cast

from cffi import FFI

from ...core.errors import UsageError

ENTRIES_MAX = 100_000
ABOVE_MAX = 4096
"""A folder above the working folder with more entries is shown empty but for the way down."""

_ffi = FFI()
_ffi.cdef("int renameat2(int old_fd, const char *old, int new_fd, const char *new, unsigned int flags);")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class _Libc(Protocol):
    def renameat2(self, old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int, /) -> int: ...


_libc = cast("_Libc", _ffi.dlopen(None))


class WorkFolder:
    """The working folder of one run; travels to workers, which write there as well."""

    def __init__(self, root: Path, directory: Path) -> None:
        """`root` is an empty folder; `directory` is the user's working folder."""
        self._root = Path(os.path.realpath(root))
        self._real = Path(os.path.realpath(directory))
        self.path = self._root / self._real.relative_to("/")

    def make(self) -> None:
        """Make the links.

        Raises:
            UsageError: the working folder has too many entries.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self._real, *self._real.parents):
            inside = self._root / folder.relative_to("/")
            most = ENTRIES_MAX if folder == self._real else ABOVE_MAX
            if not _link_entries(folder, inside, most) and folder == self._real:
                raise UsageError(
                    f"{folder} has more than {ENTRIES_MAX} entries", hint="run from another working folder"
                )

    def own(self, path: str, written: bool) -> None:
        """Make what stands at an absolute path the scratch folder's own before it is changed.

        With `written` the file or folder itself is, else only the folders above it: it is made, renamed or removed.

        Raises:
            UsageError: a folder in which something is to be changed has too many entries.
        """
        parts = Path(os.path.normpath(path)).parts
        if len(parts) <= len(self._root.parts) or Path(*parts[: len(self._root.parts)]) != self._root:
            return
        here = self._root
        for number, part in enumerate(parts[len(self._root.parts) :], start=len(self._root.parts) + 1):
            here /= part
            if here.is_symlink() and (written or number < len(parts)):
                with self._alone():
                    if here.is_symlink():  # no other process was first
                        self._replace(here)

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        fd = os.open(f"{self._root}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _replace(self, link: Path) -> None:
        target, new = Path(os.path.realpath(link)), Path(f"{self._root}.new")
        _remove(new)  # of a process that was killed
        if target.is_dir():
            new.mkdir()
            if not _link_entries(target, new, ENTRIES_MAX):
                raise UsageError(
                    f"the script writes into {target}, which has more than {ENTRIES_MAX} entries",
                    hint="let it write into another folder, or name it by an absolute path",
                )
            _exchange(new, link)
            _remove(new)
        elif target.is_file():
            shutil.copy(target, new)
            new.replace(link)


def _link_entries(folder: Path, inside: Path, most: int) -> bool:
    """Link each entry of a folder that is not there yet; return whether there were few enough."""
    try:
        names = os.listdir(folder)
    except OSError:
        return True  # not ours to read, neither for the script
    if len(names) > most:
        return False
    for name in names:
        place = inside / name
        if not os.path.lexists(place):
            place.symlink_to(folder / name)
    return True


def _exchange(new: Path, link: Path) -> None:
    """Let two names change places in one step; in two where the file system cannot."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(link), _RENAME_EXCHANGE):
        link.unlink()
        new.rename(link)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
