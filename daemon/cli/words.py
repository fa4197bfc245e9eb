"""Words of a command line: which of them are storage, and how a suggested command names the same storage."""

import os
import re
import shlex
from collections.abc import Sequence

_COMMAND = re.compile(r"`(everstep (?:ls|show|verify|rm|tag|untag|export|fsck)\b[^`]*)`")


def directories_in(words: Sequence[str]) -> list[str]:
    """Return the words that are directories or hold a slash: they are storage, whatever stands beside them."""
    return [word for word in words if "/" in word or is_directory(word)]


def is_directory(word: str) -> bool:
    """Tell whether a word is one; a word that is too long for a file's name is none."""
    return os.path.isdir(word)  # noqa: PTH112 - Path.is_dir raises for it


def with_storage(hint: str, directories: Sequence[str]) -> str:
    """Return a hint whose commands, which stand in backticks, read these directories; as it was where there are none.

    Without them a command that is suggested to somebody who reads storage would ask a daemon that is not there.
    """
    if not directories:
        return hint
    storage = shlex.join(["--storage", *directories])

    def completed(found: re.Match[str]) -> str:
        is_complete = "DIR" in found[1] or "--storage" in found[1]
        return found[0] if is_complete else f"`{found[1]} {storage}`"

    return _COMMAND.sub(completed, hint)
