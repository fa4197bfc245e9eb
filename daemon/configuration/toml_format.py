"""TOML as people see it: on which line a key stands, and values written so that they can be read again. Pure."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from .keys_plan import KeyPath

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")
_SECRET_WORDS = ("password", "secret", "token", "credential", "api_key", "passphrase")
HIDDEN = "***"
COMMENT_COLUMN = 44


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, on which each key and each table of a TOML text begins.

    A text with an error is read up to it.
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    chunk, begin = "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not chunk:
            begin = number
        chunk += line + "\n"
        try:
            read = tomllib.loads(chunk)
        except tomllib.TOMLDecodeError:
            continue  # a value of several lines, or an error
        if chunk.lstrip().startswith("["):
            table = _only_path(read)
            found.setdefault(table, begin)
        else:
            for path in _paths(read):
                found.setdefault((*table, *path), begin)
        chunk = ""
    return found


def _only_path(tree: object) -> KeyPath:
    """Return the path of a header alone."""
    path: tuple[str, ...] = ()
    while isinstance(tree, dict | list) and tree:
        if isinstance(tree, list):
            tree = cast(list[object], tree)[0]
        else:
            ((name, tree),) = cast(dict[str, object], tree).items()
            path += (name,)
    return path


def _paths(tree: Mapping[str, object]) -> Iterable[KeyPath]:
    """Yield the path of each value and of each inline table."""
    for name, value in tree.items():
        yield (name,)
        if isinstance(value, dict):
            for path in _paths(cast(dict[str, object], value)):
                yield (name, *path)


def place_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """Return the line of a key, else that of the table around it."""
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)


def value_text(value: object) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else repr(value).removeprefix("+")
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(each) for each in cast(list[object], value)) + "]"
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return "{" + ", ".join(f"{name_text(name)} = {value_text(each)}" for name, each in pairs) + "}"
    raise TypeError(f"TOML has nothing for {type(value).__name__}")


def name_text(name: str) -> str:
    """Return a name as TOML: quoted where it must be."""
    return name if _BARE.fullmatch(name) else value_text(name)


def shown(path: KeyPath, value: object) -> object:
    """Return a value without what others must not see: passwords in URLs, and what a key calls secret.

    The path of a file with a secret is shown.
    """
    if isinstance(value, str):
        is_secret = any(word in path[-1] for word in _SECRET_WORDS) and not path[-1].endswith(("_file", "_s"))
        return HIDDEN if is_secret and value else _CREDENTIALS.sub(f"{HIDDEN}@", value)
    if isinstance(value, list | tuple):
        return [shown(path, each) for each in cast(list[object], value)]
    if isinstance(value, msgspec.Struct):  # a table of tables: `[control.clients]`
        return shown(path, msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return {name: shown((*path, name), each) for name, each in pairs}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A key's value, as it may be shown."""

    path: KeyPath
    text: str
    """As TOML, without secrets; empty: it is not set."""
    origin: str
    """Where it is from."""


def values_shown(
    values: Mapping[KeyPath, object], origins: Mapping[KeyPath, str], otherwise: str
) -> tuple[Value, ...]:
    """Return values as they may be shown; `otherwise` is the origin of what nobody gave."""
    return tuple(
        Value(
            path=path,
            text="" if value is None else _text(path, value),
            origin=origins.get(path, otherwise),
        )
        for path, value in values.items()
    )


def _text(path: KeyPath, value: object) -> str:
    if path[-1].endswith("_mode") and isinstance(value, int):
        return f"{value:#o}"
    return value_text(shown(path, value))


def document(values: Iterable[Value], *, with_origin: bool) -> str:
    """Return values as a TOML file, table by table; a key that is not set becomes a comment."""
    tables: dict[KeyPath, list[str]] = {}
    for value in values:
        name = name_text(value.path[-1])
        given = f"{name} = {value.text}" if value.text else f"# {name} is not set"
        line = f"{given:<{COMMENT_COLUMN - 1}} # {value.origin}" if with_origin else given
        tables.setdefault(value.path[:-1], []).append(line)
    parts = [
        "\n".join([f"[{'.'.join(name_text(name) for name in table)}]", *lines] if table else lines)
        for table, lines in sorted(tables.items(), key=lambda item: bool(item[0]))
    ]
    return "\n\n".join(parts) + "\n"
