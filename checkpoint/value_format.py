"""Tagged JSON for the non-tensor part of a state: exact round trips for what plain JSON cannot hold.

Plain: None, bool, str, int within 64 bits, finite float, list, dict with string keys that do not begin with `$`.
Tagged, as a one-key object: `$tuple`, `$int` (beyond 64 bits, in hex: decimal text has a length limit in Python),
`$float` (nan, inf), `$str` (text with lone surrogates, e.g. file names; base64), `$bytes`, `$bytearray` (base64),
`$dict` (pairs, for other keys), `$odict`, `$set`, `$fset`, `$deque`, `$counter`, `$complex`, and whatever the
caller's `encode_other` makes (`$leaf`, `$torch`, `$ndarray`, …; see the hook's object_tree.py).
"""

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import cast

import msgspec

from ..core.errors import CorruptDataError, StateTypeError

VALUES_SIZE_BYTES_MAX = 64 * 1024 * 1024
DEPTH_MAX = 100
"""Levels of containers. A level takes up to five Python frames here and in the decoder, of the 1000 that there are."""
_INT64 = range(-(2**63), 2**63)

_TYPE_HINT = (
    "write it as numbers, strings, lists or tensors in state_dict(), or give the object state_dict/load_state_dict; "
    "histories belong in run.log(...)"
)

EncodeOther = Callable[[str, object], object]
"""(path, object) -> JSON-able object with one `$tag` key, or NotImplemented when the object is unknown."""
DecodeOther = Callable[[str, object], object]
"""(tag, content) -> object, or NotImplemented when the tag is unknown.

TypeError, ValueError and LookupError that it raises mean malformed content and become CorruptDataError.
"""


def encode_value(value: object, path: str, encode_other: EncodeOther | None = None) -> object:
    """Return `value` as JSON-able data.

    Raises:
        StateTypeError: an object has no exact form; the message holds the path to it.
    """
    return _Encoder(encode_other).encode(value, path, 0)


def decode_value(data: object, decode_other: DecodeOther | None = None) -> object:
    """Return the value that `encode_value` was given. Raises CorruptDataError on anything else."""
    return _Decoder(decode_other).decode(data, 0)


def dump_values(document: object) -> bytes:
    """Return encoded values as JSON bytes; StateTypeError above 64 MiB."""
    data = _json(document)
    if len(data) > VALUES_SIZE_BYTES_MAX:
        raise StateTypeError(
            f"the non-tensor state takes {len(data)} bytes, more than {VALUES_SIZE_BYTES_MAX}",
            hint="keep large data in tensors or numpy arrays, histories in run.log(...)",
        )
    return data


def dump_part(document: object) -> msgspec.Raw:
    """Return part of a document as JSON that `dump_values` takes as it is: for what stays the same."""
    return msgspec.Raw(_json(document))


def _json(document: object) -> bytes:
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        raise not_utf8(error.object) from error


def not_utf8(name: str) -> StateTypeError:
    """Return what refuses a name, or a path that ends in one, that JSON cannot hold."""
    return StateTypeError(
        f"the name {name!r} has lone surrogates, which UTF-8 does not know, and cannot be saved",
        hint="rename the module, the tensor or the key",
    )


def load_values(data: bytes) -> object:
    """Return the document of `dump_values`; CorruptDataError when it is not JSON."""
    try:
        return cast("object", msgspec.json.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"the non-tensor state is not JSON: {error}") from error


def load_documents(data: bytes) -> dict[str, object]:
    """Return what a manifest's values hold of each component, by its name. Raises CorruptDataError on anything else."""
    documents = load_values(data)
    if not isinstance(documents, dict):
        raise CorruptDataError("the values of the checkpoint are not one document per component")
    return cast("dict[str, object]", documents)


class _Encoder:
    def __init__(self, encode_other: EncodeOther | None) -> None:
        self._other = encode_other

    def encode(self, value: object, path: str, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise StateTypeError(
                f"{path} is nested deeper than {DEPTH_MAX} levels", hint="does it contain itself?"
            )
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            text = cast("str", value)
            return text if is_utf8(text) else {"$str": _base64(text.encode("utf-8", "surrogatepass"))}
        if kind is int:
            number = cast("int", value)
            return number if number in _INT64 else {"$int": hex(number)}
        if kind is float:
            number = cast("float", value)
            return number if math.isfinite(number) else {"$float": repr(number)}
        if self._other is not None:
            made = self._other(path, value)
            if made is not NotImplemented:
                return made
        return self._container(value, path, depth + 1)

    def _container(self, value: object, path: str, depth: int) -> object:
        kind = type(value)
        if kind is list:
            return self._items(cast("list[object]", value), path, depth)
        if kind is tuple:
            return {"$tuple": self._items(list(cast("tuple[object, ...]", value)), path, depth)}
        if kind is dict:
            return self._dict(cast("dict[object, object]", value), path, depth)
        if kind is OrderedDict:
            return {"$odict": self._pairs(cast("dict[object, object]", value), path, depth)}
        if kind is Counter:
            return {"$counter": self._pairs(cast("dict[object, object]", value), path, depth)}
        if kind is bytes or kind is bytearray:
            return {f"${kind.__name__}": _base64(cast("bytes", value))}
        if kind is complex:
            number = cast("complex", value)
            return {"$complex": [repr(number.real), repr(number.imag)]}
        if kind is deque:
            items = cast("deque[object]", value)
            return {"$deque": [items.maxlen, self._items(list(items), path, depth)]}
        if kind is set or kind is frozenset:
            tag = "$set" if kind is set else "$fset"
            return {tag: self._items(sorted(cast("set[object]", value), key=repr), path, depth)}
        raise StateTypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved", hint=_TYPE_HINT
        )

    def _items(self, items: list[object], path: str, depth: int) -> list[object]:
        return [self.encode(item, f"{path}[{index}]", depth) for index, item in enumerate(items)]

    def _pairs(self, mapping: dict[object, object], path: str, depth: int) -> list[object]:
        return [
            [self.encode(key, f"{path} key {key!r}", depth), self.encode(item, f"{path}[{key!r}]", depth)]
            for key, item in mapping.items()
        ]

    def _dict(self, mapping: dict[object, object], path: str, depth: int) -> object:
        if all(type(key) is str and not key.startswith("$") and is_utf8(key) for key in mapping):
            return {
                cast("str", key): self.encode(item, f"{path}.{key}", depth) for key, item in mapping.items()
            }
        return {"$dict": self._pairs(mapping, path, depth)}


class _Decoder:
    def __init__(self, decode_other: DecodeOther | None) -> None:
        self._other = decode_other

    def decode(self, data: object, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise CorruptDataError(f"the non-tensor state is nested deeper than {DEPTH_MAX} levels")
        if isinstance(data, list):
            return self._items(cast("object", data), depth + 1)
        if not isinstance(data, dict):
            return data
        mapping = cast("dict[str, object]", data)
        if len(mapping) == 1:
            (tag, content), *_ = mapping.items()
            if tag.startswith("$"):
                return self._tagged(tag, content, depth + 1)
        return {key: self.decode(item, depth + 1) for key, item in mapping.items()}

    def _tagged(self, tag: str, content: object, depth: int) -> object:
        try:
            made = self._known(tag, content, depth)
            if made is NotImplemented and self._other is not None:
                made = self._other(tag, content)
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise CorruptDataError(
                f"the tag {tag} of the non-tensor state holds {content!r:.80}: {error}"
            ) from error
        if made is NotImplemented:
            raise CorruptDataError(
                f"unknown tag {tag} in the non-tensor state", hint="written by a newer version?"
            )
        return made

    def _known(self, tag: str, content: object, depth: int) -> object:
        scalar = _SCALARS.get(tag)
        if scalar is not None:
            return scalar(content)
        match tag:
            case "$tuple":
                return tuple(self._items(content, depth))
            case "$dict":
                return dict(self._pairs(content, depth))
            case "$odict":
                return OrderedDict(self._pairs(content, depth))
            case "$counter":
                return Counter(cast("dict[object, int]", dict(self._pairs(content, depth))))
            case "$deque":
                maxlen, items = _list(content)
                return deque(self._items(items, depth), maxlen=cast("int | None", maxlen))
            case "$set":
                return set(self._items(content, depth))
            case "$fset":
                return frozenset(self._items(content, depth))
            case _:
                return NotImplemented

    def _items(self, content: object, depth: int) -> list[object]:
        return [self.decode(item, depth) for item in _list(content)]

    def _pairs(self, content: object, depth: int) -> list[tuple[object, object]]:
        pairs: list[tuple[object, object]] = []
        for pair in _list(content):
            key, item = _list(pair)
            pairs.append((self.decode(key, depth), self.decode(item, depth)))
        return pairs


def _list(content: object) -> list[object]:
    if not isinstance(content, list):
        raise TypeError("expected a list")
    return cast("list[object]", content)


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise TypeError("expected a string")
    return content


def _bytes(content: object) -> bytes:
    return base64.b64decode(_text(content), validate=True)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def is_utf8(text: str) -> bool:
    """Tell whether a text has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _complex(content: object) -> complex:
    real, imag = _list(content)
    return complex(float(_text(real)), float(_text(imag)))


_SCALARS: dict[str, Callable[[object], object]] = {
    "$int": lambda content: int(_text(content), 16),
    "$float": lambda content: float(_text(content)),
    "$str": lambda content: _bytes(content).decode("utf-8", "surrogatepass"),
    "$bytes": _bytes,
    "$bytearray": lambda content: bytearray(_bytes(content)),
    "$complex": _complex,
}
