"""What fsspec's HTTP file system hides: the pages that it could not list, and why an object was not described."""

from collections.abc import Mapping
from typing import Any

PROTOCOLS = ("http", "https")
_GONE = (404, 410)


def linked_objects(system: Any, prefix: str) -> dict[str, Mapping[str, object]]:
    """Return all that a page and the pages below it link to, without sizes; raises if one of them does not answer.

    `find` of fsspec leaves out what a page links to that broke the connection.
    """
    found: dict[str, Mapping[str, object]] = {}
    pages, known = [prefix], {prefix.rstrip("/")}
    while pages:
        for each in system.ls(pages.pop(), detail=True):
            name = str(each["name"])
            if each["type"] != "directory":
                found[name] = each
            elif name.rstrip("/") not in known:
                known.add(name.rstrip("/"))
                pages.append(name)
    return found or {prefix: {}}


def reason_of(error: FileNotFoundError) -> Exception:
    """Return why `info` failed: fsspec says of any failure there that there is no such file."""
    cause = error.__cause__
    is_gone = getattr(cause, "status", None) in _GONE
    return cause if isinstance(cause, Exception) and not is_gone else error
