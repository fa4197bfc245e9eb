"""Trees of plain values and typed buffers as bytes, without pickle: prepared samples, prepared batches. Pure.

    0     4 bytes, little-endian: length of the header
    4     header: msgpack, {name of a tree: value, …}
    …     buffers in the order of the trees, each at a multiple of 64

In the header a value is itself where msgpack has it (None, bool, float, str, int of 64 bits); anything else is a list
whose first element says what it is: `["int", decimal]`, `["list", values]`, `["tuple", values]`,
`["named", class, values]` (a named tuple), `["dict", [[key, value], …]]`,
`["leaf", kind, dtype, shape, size_bytes]`. What a leaf's kind and dtype mean is for whoever makes leaves
(tensor_tree.py). A class is never looked up by the name that stands there: the reader says which it knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec

from ..core.errors import CorruptDataError, StateTypeError

_ALIGN: Final = 64
_DEPTH_MAX: Final = 64
_DIMENSIONS_MAX: Final = 64
_HEADER_BYTES_MAX: Final = (1 << 32) - 1
_KEYS: Final = (str, int, bool, float, type(None))
_NO_CLASSES: Final[Mapping[str, type]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Leaf:
    """A typed buffer, in C order."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUse:
    """What trees are written for."""

    verb: str
    """What cannot be done with anything else: "cached"."""
    hint: str
    to_leaf: Callable[[object], "Leaf | str"]
    """Returns a value as a leaf, or what it is where it cannot be one."""
    has_named_tuples: bool = False


class EncodedTrees:
    """The bytes of trees, in pieces that still lie where the trees have them."""

    def __init__(self, trees: Mapping[str, object], use: TreeUse) -> None:
        """Walk the trees.

        Raises:
            StateTypeError: it names the path to a value that is neither plain nor a leaf, or to what is too deep.
        """
        writer = _Writer(use)
        specs = {name: writer.spec(value, name, 0) for name, value in trees.items()}
        try:
            header = msgspec.msgpack.encode(specs)
        except UnicodeEncodeError as error:
            raise StateTypeError(f"a text cannot be {use.verb}: {error}", hint="use bytes") from error
        if len(header) > _HEADER_BYTES_MAX:
            raise StateTypeError(f"values take {len(header)} bytes beside the arrays", hint="use arrays")
        self.classes = writer.classes
        """Named tuples in the trees, by name."""
        self.pieces: list[bytes | memoryview] = [len(header).to_bytes(4, "little"), header]
        self.size_bytes = 4 + len(header)
        for buffer in writer.buffers:
            padding = -self.size_bytes % _ALIGN
            self.pieces += [bytes(padding), buffer]
            self.size_bytes += padding + buffer.nbytes


def decode_trees(
    data: memoryview, from_leaf: Callable[[Leaf], object], classes: Mapping[str, type] = _NO_CLASSES
) -> dict[str, object]:
    """Return the trees by name; `from_leaf` makes each leaf's value, over the bytes of `data` if it likes.

    Raises:
        CorruptDataError: these bytes are no trees, or hold a named tuple that is not one of `classes`.
    """
    size = int.from_bytes(data[:4], "little")
    try:
        header: object = msgspec.msgpack.decode(data[4 : 4 + size])
        if not isinstance(header, dict):
            raise TypeError("the header is no map")
        reader = _Reader(data, 4 + size, from_leaf, classes)
        return {str(name): reader.value(spec) for name, spec in cast("dict[object, object]", header).items()}
    except (
        msgspec.DecodeError,
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        SyntaxError,
        RuntimeError,
    ) as error:
        raise CorruptDataError(f"what was prepared cannot be read: {error}") from error


def is_named_tuple(kind: type) -> bool:
    """Tell whether a class is one of named tuples."""
    return hasattr(kind, "_fields") and issubclass(kind, tuple)


class _Writer:
    def __init__(self, use: TreeUse) -> None:
        self.buffers: list[memoryview] = []
        self.classes: dict[str, type] = {}
        self._use = use

    def spec(self, value: object, path: str, depth: int) -> object:
        kind = type(value)
        if kind in {str, float, bool, type(None)}:
            return value
        if kind is int:
            return value if -(1 << 63) <= cast(int, value) < 1 << 64 else ["int", str(value)]
        if depth >= _DEPTH_MAX:
            raise StateTypeError(f"{path} is more than {_DEPTH_MAX} levels deep", hint=self._use.hint)
        if kind in {list, tuple}:
            return [kind.__name__, self._items(cast("list[object]", value), path, depth)]
        if kind is dict:
            return ["dict", self._pairs(cast("dict[object, object]", value), path, depth)]
        if self._use.has_named_tuples and is_named_tuple(kind):
            name = f"{kind.__module__}.{kind.__qualname__}"
            self.classes[name] = kind
            return ["named", name, self._items(cast("list[object]", value), path, depth)]
        leaf = self._use.to_leaf(value)
        if isinstance(leaf, str):
            raise StateTypeError(f"{path} is a {leaf}: it cannot be {self._use.verb}", hint=self._use.hint)
        self.buffers.append(leaf.data)
        return ["leaf", leaf.kind, leaf.dtype, list(leaf.shape), leaf.data.nbytes]

    def _items(self, values: list[object], path: str, depth: int) -> list[object]:
        return [self.spec(each, f"{path}[{number}]", depth + 1) for number, each in enumerate(values)]

    def _pairs(self, value: dict[object, object], path: str, depth: int) -> list[list[object]]:
        pairs: list[list[object]] = []
        for key, each in value.items():
            if type(key) not in _KEYS:
                raise StateTypeError(
                    f"{path} has the key {key!r}, a {type(key).__qualname__}: it cannot be {self._use.verb}",
                    hint="use strings or numbers as keys",
                )
            pairs.append([self.spec(key, path, depth + 1), self.spec(each, f"{path}[{key!r}]", depth + 1)])
        return pairs


class _Reader:
    def __init__(
        self, data: memoryview, at: int, from_leaf: Callable[[Leaf], object], classes: Mapping[str, type]
    ) -> None:
        self._data, self._at, self._from_leaf, self._classes = data, at, from_leaf, classes

    def value(self, spec: object) -> object:
        if spec is None or isinstance(spec, str | int | float):
            return spec
        match _listed(spec):
            case ["int", str(text)]:
                return int(text)
            case ["list", values]:
                return self._values(values)
            case ["tuple", values]:
                return tuple(self._values(values))
            case ["named", str(name), values]:
                return cast(Any, self._classes[name])(*self._values(values))
            case ["dict", pairs]:
                return dict(self._pair(each) for each in _listed(pairs))
            case ["leaf", str(kind), str(dtype), shape, int(size_bytes)]:
                return self._leaf(kind, dtype, _listed(shape), size_bytes)
            case _:
                raise ValueError("a list that is no value")

    def _values(self, values: object) -> list[object]:
        return [self.value(each) for each in _listed(values)]

    def _pair(self, pair: object) -> tuple[object, object]:
        key, value = _listed(pair)
        return self.value(key), self.value(value)

    def _leaf(self, kind: str, dtype: str, shape: list[object], size_bytes: int) -> object:
        sizes = tuple(each for each in shape if isinstance(each, int) and each >= 0)
        begin = self._at + -self._at % _ALIGN
        if len(sizes) != len(shape) or len(shape) > _DIMENSIONS_MAX:
            raise ValueError("no shape of an array")
        if not 0 <= size_bytes <= len(self._data) - begin:
            raise ValueError("a buffer that is not there")
        self._at = begin + size_bytes
        return self._from_leaf(Leaf(kind, dtype, sizes, self._data[begin : self._at]))


def _listed(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    return cast("list[object]", value)
