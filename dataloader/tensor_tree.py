"""Prepared samples and batches as bytes: tensors and numpy arrays as the leaves of tree_format.py.

A sample of a cache is a tree (dict, list, tuple) of tensors, numpy arrays and scalars, numbers, strings and bytes; a
batch that jobs share has named tuples, too, and no arrays. Anything else is refused with the path to it.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import torch

from ..core.errors import CorruptDataError
from .order_plan import Ids
from .tree_format import EncodedTrees, Leaf, TreeUse, decode_trees

Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
"""Of any type: which one is said beside it."""

Classes = Mapping[str, type]
"""Named tuples by name, as this process knows them."""

_NUMPY_KINDS: Final = frozenset("biufcSUmM")
"""bool, integers, floats, complex, fixed bytes and text, times: what holds its bytes itself."""

_TORCH_TYPES: Final = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}


def encode_sample(sample: object) -> bytes:
    """Return the bytes of a prepared sample.

    Raises:
        StateTypeError: it names the path to what is no tensor, array, number, string, bytes, or tree of them.
    """
    return b"".join(EncodedTrees({"sample": sample}, _SAMPLES).pieces)


def decode_sample(data: bytearray) -> object:
    """Return the sample; its tensors and arrays are writable and share the memory of `data`, which is theirs now.

    Raises:
        CorruptDataError: these are not the bytes of a sample.
    """
    return decode_trees(memoryview(data), _from_leaf).get("sample")


def encode_batch(ids: Ids, data: object) -> EncodedTrees:
    """Return the bytes of a batch and of the ids of its samples; nothing is copied yet that is contiguous.

    Raises:
        StateTypeError: it names the path to what is no tensor, number, string, bytes, or tree of them.
    """
    own = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))  # pyright: ignore[reportUnknownMemberType]
    return EncodedTrees({"ids": own, "batch": data}, _BATCHES)


def decode_batch(
    data: memoryview, classes: Classes, *, is_ours: bool = False, pin_memory: bool = False
) -> tuple[list[int], Any]:
    """Return ids and batch. Each tensor has memory of its own, unless the memory of `data` is theirs now (`is_ours`).

    Raises:
        CorruptDataError: these bytes are no batch.
    """

    def own(leaf: Leaf) -> object:
        if leaf.kind != "tensor" or (is_ours and not pin_memory):
            return _from_leaf(leaf)
        tensor = torch.empty(leaf.shape, dtype=_dtype_of(leaf), pin_memory=pin_memory)
        if leaf.data.nbytes:
            np.copyto(octets_of(tensor), np.frombuffer(leaf.data, dtype=np.uint8))
        return tensor

    trees = decode_trees(data, own, classes)
    ids = trees.get("ids")
    if not isinstance(ids, torch.Tensor) or ids.dtype is not torch.int64 or ids.dim() != 1:
        raise CorruptDataError("a prepared batch without the ids of its samples")
    return cast(list[int], ids.tolist()), trees.get("batch")  # pyright: ignore[reportUnknownMemberType]


def octets_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's bytes, in row-major order; no copy where it is contiguous already."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg()  # views that torch computes only when they are read
    return cast(Array, plain.contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportUnknownMemberType]


def _leaf_of_batch(value: object) -> Leaf | str:
    if type(value) is bytes:
        return Leaf("bytes", "", (len(value),), memoryview(value))
    return _tensor_leaf(value) if type(value) is torch.Tensor else _type_name(value)


def _leaf_of_sample(value: object) -> Leaf | str:
    plain: object = value
    kind = "array" if type(value) is np.ndarray else "scalar" if isinstance(value, np.generic) else ""
    if not kind:
        return _leaf_of_batch(plain)
    array = cast(Array, np.asarray(plain))
    if array.dtype.kind not in _NUMPY_KINDS:
        return f"{_type_name(plain)} of {array.dtype}"
    return Leaf(kind, array.dtype.str, array.shape, _view(np.ascontiguousarray(array)))


def _tensor_leaf(tensor: torch.Tensor) -> Leaf | str:
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad:
        gradient = ", with gradient" if tensor.requires_grad else ""
        return f"torch.Tensor of {tensor.layout}, {tensor.dtype} on {tensor.device}{gradient}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Leaf("tensor", dtype, tuple(tensor.shape), _view(octets_of(tensor)))


def _view(array: Array) -> memoryview:
    return memoryview(cast(bytes, array.reshape(-1).view(np.uint8)))


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _from_leaf(leaf: Leaf) -> object:
    if leaf.kind == "bytes":
        return bytes(leaf.data)
    if leaf.kind == "tensor":
        dtype = _dtype_of(leaf)
        if not leaf.data.nbytes:
            return torch.empty(leaf.shape, dtype=dtype)
        return torch.frombuffer(leaf.data, dtype=dtype).reshape(leaf.shape)
    if leaf.kind not in {"array", "scalar"}:
        raise ValueError(f"a leaf of kind {leaf.kind!r}")
    numpy_type = np.dtype(leaf.dtype)
    if numpy_type.kind not in _NUMPY_KINDS:
        raise ValueError(f"arrays of {leaf.dtype!r}")
    array = np.frombuffer(leaf.data, dtype=numpy_type).reshape(leaf.shape)
    return array if leaf.kind == "array" else cast(object, array[()])


def _dtype_of(leaf: Leaf) -> torch.dtype:
    """Return the type of a tensor whose bytes are as many as its shape says."""
    dtype = _TORCH_TYPES.get(leaf.dtype)
    if dtype is None:
        raise ValueError(f"tensors of {leaf.dtype!r}")
    if math.prod(leaf.shape) * dtype.itemsize != leaf.data.nbytes:
        raise ValueError(f"{leaf.data.nbytes} bytes for a tensor of shape {leaf.shape}")
    return dtype


_SAMPLES: Final = TreeUse(
    verb="cached",
    hint="a prepared sample is a tree (dict, list, tuple) of tensors, numpy arrays, numbers, strings and bytes",
    to_leaf=_leaf_of_sample,
)
_BATCHES: Final = TreeUse(
    verb="shared between jobs",
    hint="let collate_fn return dict, list or tuple of dense CPU tensors, numbers, strings and bytes",
    to_leaf=_leaf_of_batch,
    has_named_tuples=True,
)
