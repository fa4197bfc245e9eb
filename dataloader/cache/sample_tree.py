"""Prepared samples and their bytes: tensors and numpy arrays as the leaves of tree_format.py."""

import math
from typing import Final, cast

import numpy as np
import torch

from .tree_format import Leaf, decode_tree, encode_tree

Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
"""Of any type: which one is said beside it."""

_NUMPY_KINDS: Final = frozenset("biufcSUmM")
"""bool, integers, floats, complex, fixed bytes and text, times: what holds its bytes itself."""

_TORCH_TYPES: Final = {
    str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)
}


def encode_sample(sample: object) -> list[bytes | memoryview]:
    """Return the bytes of a prepared sample in pieces; nothing is copied that is contiguous.

    Raises:
        StateTypeError: it names the path to what is no tensor, array, number, string, bytes, or tree of them.
    """
    return encode_tree(sample, _to_leaf)


def decode_sample(data: bytearray) -> object:
    """Return the sample; its tensors and arrays are writable and share the memory of `data`, which is theirs now.

    Raises:
        CorruptDataError: these are not the bytes of a sample.
    """
    return decode_tree(memoryview(data), _from_leaf)


def _to_leaf(value: object) -> Leaf | None:
    if type(value) is bytes:
        return Leaf("bytes", "", (len(value),), memoryview(value))
    if type(value) is torch.Tensor:
        return _tensor_leaf(value)
    kind = "array" if type(value) is np.ndarray else "scalar" if isinstance(value, np.generic) else ""
    if kind:
        array = cast(Array, np.asarray(cast(object, value)))
        if array.dtype.kind in _NUMPY_KINDS:
            return Leaf(kind, array.dtype.str, array.shape, _octets(array))
    return None


def _tensor_leaf(tensor: torch.Tensor) -> Leaf | None:
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.requires_grad:
        return None
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    octets = cast(Array, flat.view(torch.uint8).numpy())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Leaf("tensor", dtype, tuple(tensor.shape), _octets(octets))


def _octets(array: Array) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(cast(bytes, flat))


def _from_leaf(leaf: Leaf) -> object:
    if leaf.kind == "bytes":
        return bytes(leaf.data)
    if leaf.kind == "tensor":
        return _tensor(leaf)
    if leaf.kind not in {"array", "scalar"}:
        raise ValueError(f"a leaf of kind {leaf.kind!r}")
    dtype = np.dtype(leaf.dtype)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"arrays of {leaf.dtype!r}")
    array = np.frombuffer(leaf.data, dtype=dtype).reshape(leaf.shape)
    return array if leaf.kind == "array" else cast(object, array[()])


def _tensor(leaf: Leaf) -> torch.Tensor:
    dtype = _TORCH_TYPES.get(leaf.dtype)
    if dtype is None:
        raise ValueError(f"tensors of {leaf.dtype!r}")
    if math.prod(leaf.shape) * dtype.itemsize != leaf.data.nbytes:
        raise ValueError(f"{leaf.data.nbytes} bytes for a tensor of shape {leaf.shape}")
    if not leaf.data.nbytes:
        return torch.empty(leaf.shape, dtype=dtype)
    return torch.frombuffer(leaf.data, dtype=dtype).reshape(leaf.shape)
