"""The bytes of a prepared batch, `ESB1`: a header in JSON, then the raw bytes of its leaves. No pickle.

    "ESB1" | header length, 4 bytes little-endian | header | zeros to a multiple of 64 | leaves, each aligned to 64

The header is {"ids": number of sample ids, "tree": node}; the ids come first, as int64. A node is

    null, true, 1, 1.5, "text"                                  itself (NaN and Infinity as Python's JSON has them)
    ["list", [node …]], ["tuple", [node …]]
    ["named", "module.Class", [node …]]                         a named tuple
    ["dict", [[key, node] …]]                                   keys are plain values
    ["bytes", offset, length]                                   offsets count from the first leaf
    ["tensor", "float32", [shape …], offset, length]
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ...core.errors import CorruptDataError

MAGIC = b"ESB1"
ALIGN_BYTES = 64
HEADER_SIZE_BYTES_MAX = 64 << 20
_BEGIN = struct.Struct("<4sI")

Plain = bool | int | float | str | None
Json = Plain | list["Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLeaf:
    """Where a dense tensor lies, in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesLeaf:
    """Where bytes lie."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A container: `kind` is list, tuple, named or dict; `keys` are a dict's, `class_name` a named tuple's."""

    kind: str
    items: tuple["Node", ...]
    keys: tuple[Plain, ...] = ()
    class_name: str = ""


Node = TensorLeaf | BytesLeaf | Branch | Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHeader:
    """What stands before the leaves."""

    id_count: int
    tree: Node
    data_offset_bytes: int
    """Of the first leaf, from the begin."""


def aligned(size_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def encode_header(id_count: int, tree: Node) -> bytes:
    """Return all bytes before the first leaf."""
    text = json.dumps({"ids": id_count, "tree": _to_json(tree)}, separators=(",", ":")).encode()
    if len(text) > HEADER_SIZE_BYTES_MAX:
        raise ValueError(f"the header takes {len(text)} bytes, at most {HEADER_SIZE_BYTES_MAX}")
    return (_BEGIN.pack(MAGIC, len(text)) + text).ljust(aligned(_BEGIN.size + len(text)), b"\0")


def parse_header(data: memoryview) -> BatchHeader:
    """Return what a batch's bytes hold, every leaf inside of them; CorruptDataError for any other bytes."""
    try:
        magic, length = _BEGIN.unpack_from(data)
        if magic != MAGIC or length > min(HEADER_SIZE_BYTES_MAX, len(data) - _BEGIN.size):
            raise ValueError("no batch")
        top = _mapping(json.loads(bytes(data[_BEGIN.size : _BEGIN.size + length])))
        begin = aligned(_BEGIN.size + length)
        room = len(data) - begin
        id_count = _count(top.get("ids"))
        if 8 * id_count > room:
            raise ValueError("ids outside")
        return BatchHeader(id_count=id_count, tree=_from_json(top.get("tree"), room), data_offset_bytes=begin)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise CorruptDataError(f"these bytes are no prepared batch: {error}") from error


def _to_json(node: Node) -> Json:
    match node:
        case TensorLeaf():
            return ["tensor", node.dtype, list(node.shape), node.offset_bytes, node.size_bytes]
        case BytesLeaf():
            return ["bytes", node.offset_bytes, node.size_bytes]
        case Branch(kind="dict"):
            return ["dict", [[key, _to_json(item)] for key, item in zip(node.keys, node.items, strict=True)]]
        case Branch(kind="named"):
            return ["named", node.class_name, [_to_json(item) for item in node.items]]
        case Branch():
            return [node.kind, [_to_json(item) for item in node.items]]
        case _:
            return node


def _from_json(value: object, room: int) -> Node:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    match _list(value):
        case ["tensor", str(dtype), shape, offset, length]:
            sizes = tuple(_count(each) for each in _list(shape))
            begin, size = _span(offset, length, room)
            return TensorLeaf(dtype=dtype, shape=sizes, offset_bytes=begin, size_bytes=size)
        case ["bytes", offset, length]:
            begin, size = _span(offset, length, room)
            return BytesLeaf(offset_bytes=begin, size_bytes=size)
        case ["dict", pairs]:
            keys: list[Plain] = []
            items: list[Node] = []
            for key, item in (_list(pair) for pair in _list(pairs)):
                keys.append(_plain(key))
                items.append(_from_json(item, room))
            return Branch(kind="dict", keys=tuple(keys), items=tuple(items))
        case ["named", str(class_name), parts]:
            return Branch(kind="named", class_name=class_name, items=_nodes(_list(parts), room))
        case ["list" | "tuple" as kind, parts]:
            return Branch(kind=str(kind), items=_nodes(_list(parts), room))
        case _:
            raise ValueError("unknown node")


def _nodes(values: Sequence[object], room: int) -> tuple[Node, ...]:
    return tuple(_from_json(each, room) for each in values)


def _span(offset: object, length: object, room: int) -> tuple[int, int]:
    begin, size = _count(offset), _count(length)
    if begin % ALIGN_BYTES or begin + size > room:
        raise ValueError("a leaf lies outside")
    return begin, size


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return cast(list[object], value)


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError("not a key")


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError("no object")
    return cast(dict[str, object], value)
