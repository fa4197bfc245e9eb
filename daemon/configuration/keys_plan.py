"""The keys of a configuration, read from its structs: nothing here knows which keys there are. Pure.

A key is a path of names: `("memory", "reserve_bytes")`. A table with free names (`[devices]`) has one key that ends
with `FREE`, for all of them.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import msgspec

KeyPath = tuple[str, ...]
FREE = "*"
"""Stands for any name."""

_KIND_TEXTS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    list[str]: "a list of texts",
    type(None): "nothing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key."""

    path: KeyPath
    kind: Any
    """The type of its value."""
    default: object
    """What it is when nobody gives it; None also for free names."""

    def fits(self, value: object) -> bool:
        """Tell whether a value is of its type."""
        try:
            msgspec.convert(value, self.kind)
        except (msgspec.ValidationError, ValueError, TypeError):
            return False
        return True

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        texts = [_KIND_TEXTS.get(kind, str(kind)) for kind in kinds if kind is not type(None)]
        return " or ".join(texts)


def key_text(path: KeyPath) -> str:
    """Return a key as people write it."""
    return ".".join(path)


def keys_of(struct: type[msgspec.Struct], above: KeyPath = ()) -> dict[KeyPath, Key]:
    """Return every key of a struct and of those in it."""
    found: dict[KeyPath, Key] = {}
    for field in msgspec.structs.fields(struct):
        path, kind = (*above, field.encode_name), field.type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found |= keys_of(kind, path)
        elif get_origin(kind) is dict:
            free = (*path, FREE)
            found[free] = Key(path=free, kind=get_args(kind)[1], default=None)
        else:
            found[path] = Key(path=path, kind=kind, default=_default(field))
    return found


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return None if field.default_factory is msgspec.NODEFAULT else cast(object, field.default_factory())


def find_key(keys: Mapping[KeyPath, Key], path: KeyPath) -> Key | None:
    """Return the key of a path, also of one with a free name; None: there is none."""
    return keys.get(path) or keys.get((*path[:-1], FREE))


def tables_of(keys: Iterable[KeyPath]) -> set[KeyPath]:
    """Return every path that holds keys, the root among them."""
    return {path[:length] for path in keys for length in range(len(path))}


def nearest(keys: Iterable[KeyPath], path: KeyPath) -> str:
    """Return what a path that is no key was meant to be; empty: nothing is near.

    The table's own keys come first, then a key of this name that stands elsewhere.
    """
    paths = list(keys)
    depth = len(path)
    beside = {each[depth - 1] for each in paths if len(each) >= depth and each[: depth - 1] == path[:-1]}
    close = difflib.get_close_matches(path[-1], sorted(beside - {FREE}), n=1)
    if close:
        return close[0]
    elsewhere = [key_text(each) for each in paths if each[-1] == path[-1]]
    if elsewhere:
        return elsewhere[0]
    whole = difflib.get_close_matches(key_text(path), [key_text(each) for each in paths], n=1, cutoff=0.8)
    return whole[0] if whole else ""


def values_in(tree: object, struct: type[msgspec.Struct]) -> dict[KeyPath, object]:
    """Return the value of every key of a configuration, the defaults among them."""
    found: dict[KeyPath, object] = {}
    keys = keys_of(struct)
    for path in keys:
        holder: Any = tree
        for name in path[:-1]:
            holder = getattr(holder, name)
        if path[-1] == FREE:
            found |= {(*path[:-1], name): value for name, value in holder.items()}
        else:
            found[path] = getattr(holder, path[-1])
    return found
