"""The files that a dataset's sources say they read, whoever opens them: `files()` of objects with `get_bytes`."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from .work_meter import sources_of

DECLARED_MAX = 100_000
"""Files that are taken at most: each of them leaves memory before each epoch of a cold run."""

_Paths = Iterable[str | bytes | os.PathLike[str] | os.PathLike[bytes]]


@dataclass(slots=True)
class Declared:
    """Paths as the sources give them, and what went wrong."""

    paths: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def declared_files(dataset: object) -> Declared:
    """Return the files of the sources behind a dataset, at most DECLARED_MAX."""
    found = Declared()
    for source in sources_of(dataset):
        files = cast("Callable[[], _Paths] | None", getattr(source, "files", None))
        if not callable(files):
            continue
        name = type(source).__name__
        left = DECLARED_MAX - len(found.paths)
        try:
            paths = list(map(os.fsdecode, islice(files(), left + 1)))
        except Exception as exc:  # noqa: BLE001  a user's class; the report says so
            found.notes.append(f"{name}.files() raised {type(exc).__name__}: {exc}")
            continue
        if len(paths) > left:
            found.notes.append(
                f"{name} reads more than {DECLARED_MAX:,} files: the rest leaves memory only when it is opened"
            )
        found.paths += paths[:left]
    return found
