"""A scratch folder that shows what the user's working folder shows, and takes what a script writes there.

It is made of links: every entry of the working folder, and of the folders above it, so that `data/train` and
`../data` are found. What is written becomes the scratch folder's own first: a linked file is copied, a linked folder
becomes a folder of links. Writing by an absolute path, and by native code into files that exist, is not caught.
"""

# ruff: noqa: PTH208 - strings: a hundred thousand names

import os
import shutil
from pathlib import Path

from ...core.errors import UsageError

ENTRIES_MAX = 100_000
ABOVE_MAX = 4096
"""A folder above the working folder with more entries is shown empty but for the way down."""


class WorkFolder:
    """The working folder of one run."""

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

        With `written` the file itself is, else only the folders above it: it is made, renamed or removed.
        """
        parts = Path(os.path.normpath(path)).parts
        if len(parts) <= len(self._root.parts) or Path(*parts[: len(self._root.parts)]) != self._root:
            return
        here = self._root
        for number, part in enumerate(parts[len(self._root.parts) :], start=len(self._root.parts) + 1):
            here /= part
            if here.is_symlink() and (written or number < len(parts)):
                _replace(here)


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


def _replace(link: Path) -> None:
    target = Path(os.path.realpath(link))
    if target.is_dir():
        link.unlink()
        link.mkdir()
        _link_entries(target, link, ENTRIES_MAX)
    elif target.is_file():
        link.unlink()
        shutil.copyfile(target, link)
