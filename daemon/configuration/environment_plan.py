"""Values from the environment and from flags: `EVERSTEP_IO__QUEUE_DEPTH=64`, `--set io.queue_depth=64`. Pure.

Two underscores stand between table and key. Variables of one underscore are other things (`EVERSTEP_SOCKET`, and what
Kubernetes makes of a service named everstep), so they are left alone unless they are a key written with one too few.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...core.paths import is_utf_8
from .keys_plan import FREE, Key, KeyPath, find_key, key_text, keys_of, nearest
from .layers_plan import DOCUMENT, Layer, Problem, unknown_key

PREFIX = "EVERSTEP_"
BETWEEN = "__"

SHORT_NAMES: Mapping[str, KeyPath] = {
    "EVERSTEP_LINGER_S": ("daemon", "linger_s"),
    "EVERSTEP_METRICS_PORT": ("metrics", "port"),
}
"""What a private daemon takes besides; `EVERSTEP_CACHE_<KEY>` are the keys of `[cache]`."""
SHORT_CACHE = "EVERSTEP_CACHE_"


def variable(path: KeyPath) -> str:
    """Return the name of the variable that overrides a key."""
    return PREFIX + BETWEEN.join(path).upper()


def environment_layer(environment: Mapping[str, str], struct: type[msgspec.Struct]) -> Layer:
    """Return what the variables give. An empty one gives nothing."""
    keys = keys_of(struct)
    found: list[tuple[str, KeyPath, str]] = []
    problems: list[Problem] = []
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or not text:
            continue
        if BETWEEN not in name.removeprefix(PREFIX):
            meant = _one_underscore_short(name, keys)
            if meant:
                problems.append(_unknown_variable(name, meant))
            continue
        path = tuple(name.removeprefix(PREFIX).lower().split(BETWEEN))
        if not is_utf_8(name + text):
            problems.append(_not_utf_8(name))
        elif find_key(keys, path) is None:
            problems.append(_unknown_variable(name, _nearest_variable(name, keys)))
        else:
            found.append((name, path, text))
    return _layer(found, keys, problems)


def private_layer(environment: Mapping[str, str], struct: type[msgspec.Struct]) -> Layer:
    """Return what a private daemon is besides its defaults: the short names, and metrics only if a port is given."""
    keys = keys_of(struct)
    found = [
        (name, path, environment[name]) for name, path in SHORT_NAMES.items() if _given(environment, name)
    ]
    for name in sorted(environment):
        if name.startswith(SHORT_CACHE) and _given(environment, name) and BETWEEN not in name:
            path = ("cache", name.removeprefix(SHORT_CACHE).lower())
            if path in keys:
                found.append((name, path, environment[name]))
    layer = _layer(found, keys, [])
    is_served = ("metrics", "port") in layer.values
    switch: KeyPath = ("metrics", "enabled")
    origin = "EVERSTEP_METRICS_PORT" if is_served else "default of a private daemon"
    return Layer(
        values={switch: is_served} | dict(layer.values), places={switch: origin} | dict(layer.places)
    )


def _given(environment: Mapping[str, str], name: str) -> bool:
    """Tell whether somebody meant it: Kubernetes sets EVERSTEP_METRICS_PORT for a service of that name."""
    return bool(environment.get(name)) and not environment[name].startswith("tcp://")


def flags_layer(flags: Sequence[str], struct: type[msgspec.Struct]) -> Layer:
    """Return what `--set KEY=VALUE` gives."""
    keys = keys_of(struct)
    found: list[tuple[str, KeyPath, str]] = []
    problems: list[Problem] = []
    for flag in flags:
        name, separator, text = flag.partition("=")
        path = tuple(name.strip().split("."))
        place = f"--set {name}"
        if not separator:
            problems.append(
                Problem(
                    place="--set",
                    key="",
                    message=f"{flag!r} gives no value",
                    hint="write KEY=VALUE, such as io.queue_depth=64",
                )
            )
        elif find_key(keys, path) is None or "" in path:
            problems.append(unknown_key(keys, path, place))
        else:
            found.append((place, path, text))
    return _layer(found, keys, problems)


def _layer(
    found: Sequence[tuple[str, KeyPath, str]], keys: Mapping[KeyPath, Key], problems: Sequence[Problem]
) -> Layer:
    values: dict[KeyPath, object] = {}
    for _, path, text in found:
        key = find_key(keys, path)
        assert key is not None
        values[path] = parse_value(text, key)
    return Layer(values=values, places={path: name for name, path, _ in found}, problems=problems)


def parse_value(text: str, key: Key) -> object:
    """Return a text as a value of a key's type; the text itself where it is none.

    A text stays as it is, a list of texts has commas between, all else is written as in TOML.
    """
    if key.fits(text):
        return text
    if key.kind == list[str] and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        read: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        read = text
    if key.fits(read):
        return read
    try:
        return msgspec.convert(text, key.kind, strict=False)  # `True`, `1` for true
    except msgspec.ValidationError:
        return read


def _not_utf_8(name: str) -> Problem:
    shown_name = ascii(name).strip("'")
    hint = "no answer of the control API could carry it: write it in UTF-8"
    return Problem(place=shown_name, key="", message=f"{shown_name} is not UTF-8", hint=hint)


def _one_underscore_short(name: str, keys: Mapping[KeyPath, Key]) -> str:
    if name in SHORT_NAMES or name.startswith(SHORT_CACHE):
        return ""
    meant = {"_".join((PREFIX[:-1], *path)).upper(): path for path in keys if FREE not in path}
    return variable(meant[name]) if name in meant else ""


def _nearest_variable(name: str, keys: Mapping[KeyPath, Key]) -> str:
    path = tuple(name.removeprefix(PREFIX).lower().split(BETWEEN))
    names = [variable(each).removeprefix(PREFIX) for each in keys if FREE not in each]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=0.75)
    if close:
        return PREFIX + close[0]
    same = [each for each in keys if key_text(each) == nearest(keys, path)]
    return variable(same[0]) if same else ""


def _unknown_variable(name: str, meant: str) -> Problem:
    hint = f"did you mean {meant}?" if meant else f"see {DOCUMENT} for the keys; unset it if it is not ours"
    return Problem(place=name, key="", message=f"{name} overrides no key", hint=hint)
