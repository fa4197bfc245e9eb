"""The files that a user names: a path, a folder, a pattern, or a list of them."""

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import UsageError
from .shard_plan import expand_braces

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def listed(paths: Paths, endings: tuple[str, ...]) -> list[str]:
    """Return absolute paths of files, at least one: a list in its order, a folder's or a pattern's sorted.

    A text may hold `{000..009}`, `{a,b}`, `*`, `?` and `[…]`; a file of exactly that name comes first. Of a folder
    the files with one of `endings` are meant.

    Raises:
        UsageError: nothing of that name, or nothing in the folder.
    """
    if isinstance(paths, str | os.PathLike):
        return _of_one(os.fspath(paths), endings)
    found = [path for each in paths for path in _of_one(os.fspath(each), endings)]
    if not found:
        raise UsageError("the list of files is empty")
    return found


def joined_fingerprint(kind: str, digests: Sequence[str]) -> str:
    """Return `kind:digest` of several digests in order."""
    return f"{kind}:{hashlib.blake2b(chr(0).join(digests).encode(), digest_size=16).hexdigest()}"


def _of_one(text: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(text).absolute()
    if path.is_dir():
        found = sorted(str(each) for each in path.iterdir() if each.name.endswith(endings) and each.is_file())
        if not found:
            raise UsageError(f"{path} has no files that end in {' or '.join(endings)}")
        return found
    if path.exists():
        return [str(path)]
    return [each for pattern in expand_braces(str(path)) for each in _matching(pattern)]


def _matching(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207  patterns are absolute
    if not found or not all(Path(each).is_file() for each in found):
        raise UsageError(f"there is no file {pattern}", hint="give paths, a folder, or a pattern of files")
    return found
