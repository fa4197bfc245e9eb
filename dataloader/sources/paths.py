"""The files that a user names: a path, a folder, a pattern, or a list of them."""

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UsageError
from .index_file import SUFFIX
from .shard_plan import expand_braces

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def listed(paths: Paths, endings: tuple[str, ...]) -> list[str]:
    """Return absolute paths of files, at least one: a list in its order, a folder's or a pattern's sorted.

    Indices of everstep are left out. A text may hold `{000..009}`, `{a,b}`, `*`, `?` and `[…]`; a file of exactly that
    name comes first. Of a folder the files with one of `endings` are meant.

    Raises:
        UsageError: nothing of that name, or nothing in the folder.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    found = [path for each in given for path in _of_one(os.fspath(each), endings)]
    found = [path for path in found if SUFFIX not in Path(path).name]  # what `*` finds at the second start
    if not found:
        raise UsageError("the list of files is empty", hint="give at least one path; an index is none")
    return found


def joined_fingerprint(kind: str, digests: Sequence[str]) -> str:
    """Return `kind:digest` of several digests in order."""
    return f"{kind}:{hashlib.blake2b(chr(0).join(digests).encode(), digest_size=16).hexdigest()}"


def _of_one(text: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(text).absolute()
    try:
        if path.is_dir():
            return _in_folder(path, endings)
        if path.exists():
            return [str(path)]
    except OSError as exc:
        raise UsageError(
            f"{path} cannot be read: {exc.strerror}", hint="check the path and its rights"
        ) from exc
    return [each for pattern in expand_braces(str(path)) for each in _matching(pattern)]


def _in_folder(folder: Path, endings: tuple[str, ...]) -> list[str]:
    found = sorted(str(each) for each in folder.iterdir() if each.name.endswith(endings) and each.is_file())
    if not found:
        raise UsageError(f"{folder} has no files that end in {' or '.join(endings)}", hint="name the files")
    return found


def _matching(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207  patterns are absolute
    if not found or not all(Path(each).is_file() for each in found):
        raise UsageError(f"there is no file {pattern}", hint="give paths, a folder, or a pattern of files")
    return found
