"""Layers of a configuration on top of each other, each value with where it is from; what is wrong is named. Pure.

Defaults < file < environment < flags: a later layer wins, key by key.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import msgspec

from ...core.errors import ConfigError
from .keys_plan import FREE, Key, KeyPath, find_key, key_text, keys_of, nearest, tables_of
from .toml_format import key_lines, place_of, shown, value_text

DOCUMENT = "docs/configuration.md"
DEFAULT = "default"
"""Where a value is from that nobody gives."""

_AT_LINE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$")

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    place: str
    """`node.toml:12`, `EVERSTEP_IO__ENGINE`, `--set io.engine`."""
    key: str
    """Dotted; empty: it is about the whole."""
    message: str
    hint: str

    def error(self) -> ConfigError:
        """Return it as an error."""
        return ConfigError(f"{self.place}: {self.message}", hint=self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one source gives."""

    values: Mapping[KeyPath, object] = field(default_factory=dict[KeyPath, object])
    places: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Where each value stands."""
    tables: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Where each table stands, for what is said of a table as a whole."""
    problems: Sequence[Problem] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[ConfigT]):
    """All layers together."""

    config: ConfigT | None
    """None: something is wrong."""
    origins: Mapping[KeyPath, str]
    """Where each value that was given is from."""
    problems: Sequence[Problem]

    def taken(self) -> ConfigT:
        """Return the configuration; ConfigError with the first problem, and how many more there are."""
        if self.config is not None:
            return self.config
        first = self.problems[0]
        more = len(self.problems) - 1
        if not more:
            raise first.error()
        raise ConfigError(
            f"{first.place}: {first.message}",
            hint=f"{first.hint}; {more} more: `everstep config check`",
        )


def file_layer(text: str, name: str, struct: type[msgspec.Struct]) -> Layer:
    """Return what a TOML file of this name gives."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return Layer(problems=[_syntax_problem(str(error), name)])
    keys, lines = keys_of(struct), key_lines(text)

    def place(path: KeyPath) -> str:
        line = place_of(lines, path)
        return name if line is None else f"{name}:{line}"

    flat = _Flattening(keys, place)
    flat.take(tree)
    tables = {path: place(path) for path in tables_of(keys) if path}
    places = {path: place(path) for path in flat.values}
    return Layer(values=flat.values, places=places, tables=tables, problems=flat.problems)


def _syntax_problem(said: str, name: str) -> Problem:
    found = _AT_LINE.search(said)
    what = _AT_LINE.sub("", said)
    place = f"{name}:{found[1]}" if found and found[1] else name
    where = f" (column {found[2]})" if found and found[2] else ""
    return Problem(
        place=place, key="", message=f"not TOML: {what}{where}", hint=f"texts need quotes; see {DOCUMENT}"
    )


class _Flattening:
    """Takes the values out of a file's tables; what is no key, or no table, is a problem."""

    def __init__(self, keys: Mapping[KeyPath, Key], place: Callable[[KeyPath], str]) -> None:
        self._keys, self._tables, self._place = keys, tables_of(keys), place
        self.values: dict[KeyPath, object] = {}
        self.problems: list[Problem] = []

    def take(self, tree: Mapping[str, object], above: KeyPath = ()) -> None:
        """Take a table."""
        for name, value in tree.items():
            path = (*above, name)
            if path in self._tables:
                self._take_table(path, value)
            elif find_key(self._keys, path) is not None:
                self.values[path] = value
            else:
                self.problems.append(unknown_key(self._keys, path, self._place(path)))

    def _take_table(self, path: KeyPath, value: object) -> None:
        if isinstance(value, dict):
            self.take(cast(dict[str, object], value), path)
            return
        key = key_text(path)
        self.problems.append(
            Problem(
                place=self._place(path),
                key=key,
                message=f"{key} is {_value(path, value)}, expected a table",
                hint=f"write [{key}], and its keys below",
            )
        )


def unknown_key(keys: Mapping[KeyPath, Key], path: KeyPath, place: str) -> Problem:
    """Return what is said of a key that is none."""
    meant = nearest(keys, path)
    hint = f"did you mean {meant}?" if meant else f"see {DOCUMENT} for the keys"
    return Problem(place=place, key=key_text(path), message=f"there is no key {key_text(path)}", hint=hint)


def resolve(struct: type[ConfigT], layers: Sequence[Layer]) -> Resolved[ConfigT]:
    """Return the layers on top of each other."""
    keys = keys_of(struct)
    values: dict[KeyPath, object] = {}
    places: dict[KeyPath, str] = {}
    problems = [problem for layer in layers for problem in layer.problems]
    for layer in layers:
        values |= layer.values
        places |= layer.places
    for path, value in values.items():
        key = find_key(keys, path)
        assert key is not None, f"{path} is not a key: its layer must say so"
        if not key.fits(value):
            said = f"{key_text(path)} is {_value(path, value)}, expected {key.expected}"
            problems.append(
                Problem(place=places[path], key=key_text(path), message=said, hint=f"see {DOCUMENT}")
            )
    if problems:
        return Resolved(config=None, origins=places, problems=problems)
    try:
        config = msgspec.convert(_tree(values), struct)
    except ConfigError as error:
        return Resolved(config=None, origins=places, problems=[_placed(error, keys, places, layers)])
    except msgspec.ValidationError as error:  # a check that a struct makes as a whole
        problem = _placed(ConfigError(str(error)), keys, places, layers)
        return Resolved(config=None, origins=places, problems=[problem])
    return Resolved(config=config, origins=places, problems=())


def _placed(
    error: ConfigError, keys: Mapping[KeyPath, Key], places: Mapping[KeyPath, str], layers: Sequence[Layer]
) -> Problem:
    """Return an error with the place of the key, or of the table, that its message begins with."""
    path = _path_in(error.message, [*keys, *places, *tables_of(keys)])
    place = places.get(path, "")
    tables = [layer.tables[path[:1]] for layer in layers if path[:1] in layer.tables]
    inside = [place for key, place in places.items() if key[: len(path)] == path]
    place = place or (inside[-1] if inside else "") or (tables[-1] if tables else DEFAULT)
    return Problem(place=place, key=key_text(path), message=error.message, hint=error.hint)


def _path_in(message: str, paths: Sequence[KeyPath]) -> KeyPath:
    """Return the longest key or table that a message begins with: `io.engine is …`, `[io]: …`."""
    text = message.removeprefix("[")
    fitting = [
        path
        for path in paths
        if path and FREE not in path and re.match(rf"{re.escape(key_text(path))}(?![\w-])", text)
    ]
    return max(fitting, key=len, default=())


def _tree(values: Mapping[KeyPath, object]) -> dict[str, object]:
    root: dict[str, object] = {}
    for path, value in values.items():
        table = root
        for name in path[:-1]:
            table = cast(dict[str, object], table.setdefault(name, {}))
        table[path[-1]] = value
    return root


def _value(path: KeyPath, value: object) -> str:
    """Return a value as it may be said."""
    seen = shown(path, value)
    try:
        return repr(seen) if isinstance(seen, str) else value_text(seen)
    except TypeError:  # a date
        return str(seen)
