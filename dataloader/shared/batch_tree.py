"""Batches as trees of tensors, numbers, strings and bytes: to bytes, back, and compared leaf by leaf.

Containers are dict, list, tuple and named tuples, of exactly these classes; leaves are dense CPU tensors, bool, int,
float, str, bytes and None. Anything else is refused with the path to it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ...core.errors import CorruptDataError, UsageError
from ..order_plan import Ids
from .batch_format import (
    Branch,
    BytesLeaf,
    Node,
    Plain,
    TensorLeaf,
    aligned,
    encode_header,
    parse_header,
)

Octets = npt.NDArray[np.uint8]
Classes = Mapping[str, type]
"""Named tuples by name, as this job's own first batch had them: no class is ever looked up by a received name."""

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_HINT = "let collate_fn return dict, list or tuple of dense CPU tensors, numbers, strings and bytes"
_LEAVES_MAX = 4096
"""Compared one by one; what is beyond is compared as a whole."""


@dataclass(slots=True)
class _Packing:
    """The leaves of a batch on their way into bytes."""

    parts: list[tuple[int, Octets]] = field(default_factory=list[tuple[int, Octets]])
    size_bytes: int = 0

    def add(self, octets: Octets) -> int:
        offset_bytes = self.size_bytes
        self.parts.append((offset_bytes, octets))
        self.size_bytes = aligned(offset_bytes + octets.size)
        return offset_bytes


class EncodedBatch:
    """A batch as header and leaves, which still lie where the batch has them."""

    def __init__(self, ids: Ids, data: object) -> None:
        """Walk the batch; UsageError with the path to what cannot be encoded."""
        packing = _Packing()
        packing.add(np.ascontiguousarray(ids, dtype=np.int64).view(np.uint8))
        self._header = encode_header(int(ids.size), _to_node(data, "batch", packing))
        self._parts = packing.parts
        self.size_bytes = len(self._header) + packing.size_bytes

    def write(self, target: memoryview) -> None:
        """Copy it to the begin of `target`, which has at least `size_bytes`."""
        target[: len(self._header)] = self._header
        octets = np.frombuffer(target, dtype=np.uint8)[len(self._header) :]
        for offset_bytes, part in self._parts:
            octets[offset_bytes : offset_bytes + part.size] = part
            octets[offset_bytes + part.size : aligned(offset_bytes + part.size)] = 0

    def to_bytes(self) -> bytearray:
        """Return it as bytes of its own."""
        data = bytearray(self.size_bytes)
        self.write(memoryview(data))
        return data


def decode_batch(data: memoryview, classes: Classes, *, pin_memory: bool = False) -> tuple[Ids, Any]:
    """Return ids and batch; tensors have memory of their own, nothing refers to `data` any more.

    Raises:
        CorruptDataError: these bytes are no batch.
    """
    header = parse_header(data)
    octets = np.frombuffer(data, dtype=np.uint8)[header.data_offset_bytes :]
    try:
        ids = octets[: 8 * header.id_count].view(np.int64).copy()
        return ids, _from_node(header.tree, octets, classes, pin_memory)
    except (ValueError, RuntimeError, KeyError, TypeError, OverflowError) as error:
        raise CorruptDataError(f"a prepared batch cannot be read: {error}") from error


def named_classes(data: object) -> dict[str, type]:
    """Return the named tuples that a batch holds, by name."""
    return {_class_name(type(each)): type(each) for _, each in _walk(data, "batch") if _is_named(each)}


def leaf_digests(data: object) -> list[tuple[str, str, str]]:
    """Return (path, kind, digest) of every leaf, in the order of the batch, some thousand at most."""
    found: list[tuple[str, str, str]] = []
    rest = xxhash.xxh3_128()
    for path, value in _walk(data, "batch"):
        kind, octets = _described(value)
        if len(found) < _LEAVES_MAX:
            found.append((path, kind, xxhash.xxh3_128_hexdigest(octets)))
        else:
            rest.update(f"{path}\0{kind}\0".encode())
            rest.update(octets)
    return [*found, ("(all that follows)", "leaves", rest.hexdigest())]


def _walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield every container and leaf with its path."""
    yield path, value
    if type(value) is dict:
        for key, item in cast(dict[object, object], value).items():
            yield from _walk(item, f"{path}[{key!r}]")
    elif type(value) in {list, tuple} or _is_named(value):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _walk(item, f"{path}[{index}]")


def _described(value: object) -> tuple[str, bytes | memoryview]:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}", _octets(value).data
    if isinstance(value, bytes):
        return f"bytes of length {len(value)}", value
    if type(value) is dict:
        return "dict", repr(list(cast(dict[object, object], value))).encode()
    if isinstance(value, list | tuple):
        return type(cast(object, value)).__name__, str(len(cast("list[object]", value))).encode()
    return type(value).__name__, repr(value).encode("utf-8", "surrogatepass")


def _to_node(value: object, path: str, packing: _Packing) -> Node:
    kind = type(value)
    if value is None or kind in {bool, int, float, str}:
        return cast(Plain, value)
    if kind is bytes:
        octets = np.frombuffer(cast(bytes, value), dtype=np.uint8)
        return BytesLeaf(offset_bytes=packing.add(octets), size_bytes=octets.size)
    if kind is torch.Tensor:
        return _tensor_node(cast(torch.Tensor, value), path, packing)
    if kind is dict:
        return _dict_node(cast(dict[object, object], value), path, packing)
    if kind in {list, tuple} or _is_named(value):
        items = tuple(
            _to_node(item, f"{path}[{index}]", packing)
            for index, item in enumerate(cast("list[object]", value))
        )
        if _is_named(value):
            return Branch(kind="named", class_name=_class_name(kind), items=items)
        return Branch(kind=kind.__name__, items=items)
    raise UsageError(f"{path} is a {kind.__name__}: it cannot be shared between jobs", hint=_HINT)


def _tensor_node(tensor: torch.Tensor, path: str, packing: _Packing) -> TensorLeaf:
    dtype = str(tensor.dtype).removeprefix("torch.")
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    if not is_plain or dtype not in _DTYPES:
        gradient = ", with gradient" if tensor.requires_grad else ""
        raise UsageError(
            f"{path} is a tensor of {tensor.layout}, {tensor.dtype} on {tensor.device}{gradient}: "
            "it cannot be shared between jobs",
            hint=_HINT,
        )
    octets = _octets(tensor)
    offset_bytes = packing.add(octets)
    return TensorLeaf(
        dtype=dtype, shape=tuple(tensor.shape), offset_bytes=offset_bytes, size_bytes=octets.size
    )


def _dict_node(value: dict[object, object], path: str, packing: _Packing) -> Branch:
    for key in value:
        if key is not None and type(key) not in {bool, int, float, str}:
            raise UsageError(
                f"{path} has the key {key!r}, a {type(key).__name__}: it cannot be shared between jobs",
                hint="keys are strings or numbers",
            )
    items = tuple(_to_node(item, f"{path}[{key!r}]", packing) for key, item in value.items())
    return Branch(kind="dict", keys=tuple(cast(list[Plain], list(value))), items=items)


def _from_node(node: Node, octets: Octets, classes: Classes, pin_memory: bool) -> object:
    match node:
        case TensorLeaf():
            return _tensor(node, octets, pin_memory)
        case BytesLeaf():
            return octets[node.offset_bytes : node.offset_bytes + node.size_bytes].tobytes()
        case Branch():
            items = [_from_node(item, octets, classes, pin_memory) for item in node.items]
            if node.kind == "dict":
                return dict(zip(node.keys, items, strict=True))
            if node.kind == "named":
                return cast(Any, classes[node.class_name])(*items)
            return items if node.kind == "list" else tuple(items)
        case _:
            return node


def _tensor(leaf: TensorLeaf, octets: Octets, pin_memory: bool) -> torch.Tensor:
    dtype = _DTYPES[leaf.dtype]
    if math.prod(leaf.shape) * dtype.itemsize != leaf.size_bytes:
        raise ValueError(f"{leaf.shape} of {leaf.dtype} in {leaf.size_bytes} bytes")
    tensor = torch.empty(leaf.shape, dtype=dtype, pin_memory=pin_memory)
    if leaf.size_bytes:
        np.copyto(_octets(tensor), octets[leaf.offset_bytes : leaf.offset_bytes + leaf.size_bytes])
    return tensor


def _octets(tensor: torch.Tensor) -> Octets:
    """Return a tensor's bytes, in row-major order; no copy where it is contiguous already."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg()  # views that torch computes only when they are read
    flat = plain.contiguous().reshape(-1).view(torch.uint8)
    return cast(Octets, flat.numpy())  # pyright: ignore[reportUnknownMemberType]


def _is_named(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(cast(object, value), "_fields")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


__all__ = ["EncodedBatch", "decode_batch", "leaf_digests", "named_classes"]
