"""A prepared sample as bytes, without pickle: a tree of plain values and typed buffers. Pure.

    0     4 bytes, little-endian: length of the header
    4     header: msgpack
    …     buffers in the order of the tree, each at a multiple of 16

In the header a value is itself where msgpack has it (None, bool, float, str, int of 64 bits); anything else is a list
whose first element says what it is: `["int", decimal]`, `["list", values]`, `["tuple", values]`,
`["dict", [[key, value], …]]`, `["leaf", kind, dtype, shape, size_bytes]`. What a leaf's kind and dtype mean is for
whoever makes leaves (sample_tree.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from ...core.errors import CorruptDataError, StateTypeError

_ALIGN: Final = 16
_DEPTH_MAX: Final = 64
_HEADER_BYTES_MAX: Final = (1 << 32) - 1
_KEYS: Final = (str, int, bool, float, type(None))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A typed buffer, in C order."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


Encoder = Callable[[object], "Leaf | None"]
"""Returns a value as a leaf; None: it is none."""


def encode_tree(value: object, to_leaf: Encoder) -> list[bytes | memoryview]:
    """Return the bytes of a tree in pieces, to be joined.

    Raises:
        StateTypeError: it names the path to a value that is neither plain nor a leaf, or to a tree that is too deep.
    """
    buffers: list[memoryview] = []
    header = msgspec.msgpack.encode(_spec(value, "sample", to_leaf, buffers, 0))
    if len(header) > _HEADER_BYTES_MAX:
        raise StateTypeError(f"the values of a sample take {len(header)} bytes", hint="use arrays")
    pieces: list[bytes | memoryview] = [len(header).to_bytes(4, "little"), header]
    at = 4 + len(header)
    for buffer in buffers:
        padding = -at % _ALIGN
        pieces += [bytes(padding), buffer]
        at += padding + buffer.nbytes
    return pieces


def _spec(value: object, path: str, to_leaf: Encoder, buffers: list[memoryview], depth: int) -> object:
    kind = type(value)
    if kind in {str, float, bool, type(None)}:
        return value
    if kind is int:
        return value if -(1 << 63) <= cast(int, value) < 1 << 64 else ["int", str(value)]
    if depth >= _DEPTH_MAX:
        raise StateTypeError(
            f"{path} is more than {_DEPTH_MAX} levels deep", hint="a sample is a shallow tree"
        )
    if kind in {list, tuple}:
        items = [
            _spec(each, f"{path}[{number}]", to_leaf, buffers, depth + 1)
            for number, each in enumerate(cast("list[object]", value))
        ]
        return [kind.__name__, items]
    if kind is dict:
        return ["dict", _pairs(cast("dict[object, object]", value), path, to_leaf, buffers, depth)]
    leaf = to_leaf(value)
    if leaf is None:
        raise StateTypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be cached",
            hint="a prepared sample is a tree (dict, list, tuple) of tensors, numpy arrays, numbers, strings and bytes",
        )
    buffers.append(leaf.data)
    return ["leaf", leaf.kind, leaf.dtype, list(leaf.shape), leaf.data.nbytes]


def _pairs(
    value: dict[object, object], path: str, to_leaf: Encoder, buffers: list[memoryview], depth: int
) -> list[list[object]]:
    pairs: list[list[object]] = []
    for key, each in value.items():
        if type(key) not in _KEYS:
            raise StateTypeError(
                f"{path} has a key of type {type(key).__qualname__}", hint="use strings or numbers as keys"
            )
        pairs.append(
            [
                _spec(key, path, to_leaf, buffers, depth + 1),
                _spec(each, f"{path}[{key!r}]", to_leaf, buffers, depth + 1),
            ]
        )
    return pairs


def decode_tree(data: memoryview, from_leaf: Callable[[Leaf], object]) -> object:
    """Return the tree; `from_leaf` makes each leaf's value, over the bytes of `data` if it likes.

    Raises:
        CorruptDataError: it is no tree.
    """
    size = int.from_bytes(data[:4], "little")
    try:
        header = msgspec.msgpack.decode(data[4 : 4 + size])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"a prepared sample has no readable header: {error}") from error
    reader = _Reader(data, 4 + size, from_leaf)
    try:
        return reader.value(header)
    except (ValueError, TypeError, IndexError, OverflowError, SyntaxError, RecursionError) as error:
        raise CorruptDataError(f"a prepared sample cannot be read: {error}") from error


class _Reader:
    def __init__(self, data: memoryview, at: int, from_leaf: Callable[[Leaf], object]) -> None:
        self._data, self._at, self._from_leaf = data, at, from_leaf

    def value(self, spec: object) -> object:
        if spec is None or isinstance(spec, str | int | float):
            return spec
        tag, *rest = _listed(spec)
        if tag == "int" and isinstance(rest[0], str):
            return int(rest[0])
        if tag == "list":
            return [self.value(each) for each in _listed(rest[0])]
        if tag == "tuple":
            return tuple(self.value(each) for each in _listed(rest[0]))
        if tag == "dict":
            return dict(self._pair(each) for each in _listed(rest[0]))
        if tag == "leaf":
            return self._leaf(*rest)
        raise ValueError("a list that is no value")

    def _pair(self, pair: object) -> tuple[object, object]:
        key, value = _listed(pair)
        return self.value(key), self.value(value)

    def _leaf(self, kind: object, dtype: object, shape: object, size_bytes: object) -> object:
        sizes = tuple(each for each in _listed(shape) if isinstance(each, int) and each >= 0)
        begin = self._at + -self._at % _ALIGN
        if not (isinstance(kind, str) and isinstance(dtype, str) and isinstance(size_bytes, int)):
            raise TypeError("a leaf with other fields")
        if len(sizes) != len(_listed(shape)) or not 0 <= size_bytes <= len(self._data) - begin:
            raise ValueError("a buffer that is not there")
        self._at = begin + size_bytes
        return self._from_leaf(Leaf(kind, dtype, sizes, self._data[begin : self._at]))


def _listed(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    return cast("list[object]", value)
