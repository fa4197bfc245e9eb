"""Any tree of Python values with tensors and arrays in it, taken apart into leaves and tagged JSON and back.

Tags beside those of value_format.py; `leaf` is a leaf's name:

    $leaf       leaf, or [leaf, device type] for a tensor that is not on the CPU
    $rawbytes   [leaf, "bytes" | "bytearray"], above 4 KiB
    $ndarray    {dtype, shape, order, data (base64) | leaf}
    $npscalar   [dtype | "str_" | "bytes_", base64]
    $npdtype    dtype
    $torch      ["dtype" | "device" | "size", …]
    $sparse_coo {indices, values, size, coalesced}, the tensors encoded; $sparse_csr {crow, col, values, size}
    $modulestate [pairs, metadata]: what nn.Module.state_dict() returns, an OrderedDict that carries `_metadata`
"""

import base64
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ..checkpoint.value_format import decode_value, encode_value
from ..core.errors import CorruptDataError, StateTypeError
from .state_protocol import Laziness, Sink
from .stored_state import StoredState, TensorMaker

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

INLINE_BYTES_MAX = 4096
"""Bytes and arrays above this become leaves of their own: the manifest, read whole at every start, stays small."""

_PLAIN_ARRAY_KINDS = "biufcmMSU"
_DIMENSIONS_MAX = 64
"""As in numpy."""
_CPU = torch.device("cpu")


def numpy_module() -> Any:  # the module, or None
    """Return numpy where somebody has imported it; a value cannot be one of its types before."""
    return sys.modules.get("numpy")


class TreeEncoder:
    """Encodes values of one component; their tensors and long byte strings go to the sink."""

    def __init__(self, sink: Sink, *, laziness: Laziness = Laziness.EAGER, replicas: int = 1) -> None:
        """Encode into `sink`; `laziness` and `replicas` are for the tensors that belong to the objects."""
        self._sink = sink
        self._laziness = laziness
        self._replicas = replicas

    def encode(self, value: object, path: str) -> object:
        """Return `value` as JSON-able data; leaves are named by their path, which begins with the component's name.

        Raises:
            StateTypeError: an object has no exact form; the message holds the path to it.
        """
        return encode_value(value, path, self._encode_other)

    def _encode_other(self, path: str, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        kind = type(value)
        if issubclass(kind, dict):
            _refuse_tensor_keys(path, cast("dict[object, object]", value))
        if (kind is bytes or kind is bytearray) and len(cast(bytes, value)) > INLINE_BYTES_MAX:
            data = torch.frombuffer(bytearray(cast(bytes, value)), dtype=torch.uint8)
            return {"$rawbytes": [self._leaf(path, data, Laziness.EAGER), kind.__name__]}
        if kind is OrderedDict and hasattr(value, "_metadata"):
            return self._module_state(path, cast("OrderedDict[object, object]", value))
        if isinstance(value, torch.dtype):
            return {"$torch": ["dtype", str(value).removeprefix("torch.")]}
        if isinstance(value, torch.device):
            return {"$torch": ["device", str(value)]}
        if isinstance(value, torch.Size):
            return {"$torch": ["size", list(value)]}
        return self._numpy(path, value)

    def _leaf(self, path: str, tensor: torch.Tensor, laziness: Laziness) -> str:
        name = self._sink.free_name(path)
        self._sink.leaf(name, tensor, laziness, replicas=self._replicas)
        return name

    def _tensor(self, path: str, tensor: torch.Tensor) -> object:
        if tensor.is_quantized or tensor.is_nested or tensor.layout is torch.strided:
            name = self._leaf(path, tensor, self._laziness)
            return {"$leaf": name if tensor.device == _CPU else [name, tensor.device.type]}
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            parts = {"indices": tensor._indices(), "values": tensor._values()}  # uncoalesced too
            return {"$sparse_coo": self._sparse(path, tensor, parts) | {"coalesced": tensor.is_coalesced()}}
        if tensor.layout is torch.sparse_csr:
            parts = {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
            return {"$sparse_csr": self._sparse(path, tensor, parts)}
        raise StateTypeError(
            f"{path} is a tensor of layout {tensor.layout}, which cannot be saved",
            hint="convert it with to_dense() or to_sparse() in state_dict()",
        )

    def _sparse(self, path: str, tensor: torch.Tensor, parts: dict[str, torch.Tensor]) -> dict[str, object]:
        """Indices and values as leaves. They may be replaced in place by anybody: always EAGER."""
        eager = TreeEncoder(self._sink, replicas=self._replicas)
        encoded = {part: eager.encode(found, f"{path}.{part}") for part, found in parts.items()}
        return {**encoded, "size": list(tensor.shape)}

    def _module_state(self, path: str, state: "OrderedDict[object, object]") -> object:
        metadata: object = getattr(state, "_metadata", None)
        pairs = [[self.encode(key, path), self.encode(item, f"{path}.{key}")] for key, item in state.items()]
        return {"$modulestate": [pairs, self.encode(metadata, f"{path}._metadata")]}

    def _numpy(self, path: str, value: object) -> object:
        numpy = numpy_module()
        if numpy is None:
            return NotImplemented
        if type(value) is numpy.ndarray:
            return {"$ndarray": self._array(path, cast("Array", value))}
        if isinstance(value, numpy.generic):
            if isinstance(value, str | bytes):  # numpy cuts trailing zeros off text in arrays
                octets = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                return {"$npscalar": [type(value).__name__, base64.b64encode(octets).decode()]}
            scalar = cast("np.generic", value)
            dtype = _plain_dtype(path, scalar.dtype)
            return {"$npscalar": [dtype, base64.b64encode(scalar.tobytes()).decode()]}
        if isinstance(value, numpy.dtype):
            return {"$npdtype": _plain_dtype(path, cast("np.dtype[Any]", value))}
        return NotImplemented

    def _array(self, path: str, array: "Array") -> dict[str, object]:
        """The array's elements in row-major order, or column-major where that is how they lie."""
        document: dict[str, object] = {"dtype": _plain_dtype(path, array.dtype), "shape": list(array.shape)}
        by_column = array.flags.f_contiguous and not array.flags.c_contiguous
        document["order"] = "F" if by_column else "C"
        if array.nbytes <= INLINE_BYTES_MAX:
            data = array.tobytes(order="F" if by_column else "C")
            return document | {"data": base64.b64encode(data).decode()}
        return document | {
            "leaf": self._leaf(path, _array_bytes(array.T if by_column else array), Laziness.EAGER)
        }


def _refuse_tensor_keys(path: str, mapping: "dict[object, object]") -> None:
    """A tensor is found by its identity, which no restore gives back: what it is the key of would be lost silently."""
    for key in mapping:
        if isinstance(key, torch.Tensor):
            raise StateTypeError(
                f"{path} has a tensor of shape {tuple(key.shape)} as a key, which no restored tensor equals",
                hint="an optimizer's own state belongs in state[parameter]; elsewhere use the parameter's name",
            )


def _array_bytes(array: "Array") -> torch.Tensor:
    """The array's memory as bytes, copied only where torch cannot look at it (holes, read-only)."""
    numpy = _numpy()
    dense = numpy.ascontiguousarray(array)
    if not dense.flags.writeable:
        dense = dense.copy()
    from_numpy = cast("Callable[[Array], torch.Tensor]", torch.from_numpy)
    return from_numpy(dense.reshape(-1).view(numpy.uint8))


def _plain_dtype(path: str, dtype: "np.dtype[Any]") -> str:
    if dtype.kind not in _PLAIN_ARRAY_KINDS:
        raise StateTypeError(
            f"{path} has the numpy dtype {dtype}, which cannot be saved",
            hint="keep records and objects as separate arrays of numbers or text",
        )
    return dtype.str


class TreeDecoder:
    """Makes the values again that a TreeEncoder took apart; tensors that shared memory share it again."""

    def __init__(
        self, stored: StoredState, *, device: torch.device | None = None, maker: TensorMaker | None = None
    ) -> None:
        """Read leaves from `stored`. Tensors of a `maker` share memory with those that it makes otherwise.

        `device` is for tensors that were not on the CPU; without it they go to the current device of their type,
        or to the CPU where this process has none.
        """
        self._stored = stored
        self._device = device
        self._maker = TensorMaker(stored) if maker is None else maker

    def decode(self, data: object) -> object:
        """Return the value.

        Raises:
            CorruptDataError: `data` is no encoded value.
            StateMismatchError: a leaf that it refers to is not in the checkpoint.
        """
        return decode_value(data, self._decode_other)

    def _decode_other(self, tag: str, content: object) -> object:
        match tag:
            case "$leaf":
                return self._tensor(content)
            case "$rawbytes":
                name, kind = cast(list[str], content)
                data = self._raw(name)
                return bytearray(data) if kind == "bytearray" else data
            case "$sparse_coo" | "$sparse_csr":
                return self._sparse(tag, cast(dict[str, object], content))
            case "$modulestate":
                pairs, metadata = cast(list[object], content)
                state = OrderedDict(
                    (self.decode(key), self.decode(item)) for key, item in cast(list[list[object]], pairs)
                )
                vars(state)["_metadata"] = self.decode(metadata)
                return state
            case "$torch":
                kind, found = cast(list[object], content)
                return decode_torch(kind, found)
            case "$ndarray":
                return self._array(cast(dict[str, object], content))
            case "$npscalar":
                dtype, text = cast(list[str], content)
                return decode_numpy_scalar(dtype, base64.b64decode(text, validate=True))
            case "$npdtype":
                return _numpy().dtype(content)
            case _:
                return NotImplemented

    def _tensor(self, content: object) -> torch.Tensor:
        if isinstance(content, str):
            return self._maker.make(content, _CPU)
        name, device_type = cast(list[str], content)
        if self._device is not None:
            return self._maker.make(name, self._device)
        here = device_type == "cuda" and torch.cuda.is_available()
        return self._maker.make(name, torch.device("cuda", torch.cuda.current_device()) if here else _CPU)

    def _sparse(self, tag: str, content: dict[str, Any]) -> torch.Tensor:
        size = torch.Size(content["size"])
        if tag == "$sparse_csr":
            parts = [self._part(content[key]) for key in ("crow", "col", "values")]
            make = cast(Callable[..., torch.Tensor], torch.sparse_csr_tensor)
            return make(*parts, size, device=parts[-1].device, check_invariants=True)
        parts = [self._part(content[key]) for key in ("indices", "values")]
        make = cast(Callable[..., torch.Tensor], torch.sparse_coo_tensor)
        whole = bool(content["coalesced"])
        return make(*parts, size, device=parts[-1].device, check_invariants=True, is_coalesced=whole)

    def _part(self, data: object) -> torch.Tensor:
        part = self.decode(data)
        if not isinstance(part, torch.Tensor):
            raise TypeError("a part of a sparse tensor is not a tensor")
        return part

    def _array(self, content: dict[str, Any]) -> "Array":
        data = (
            self._raw(content["leaf"])
            if "leaf" in content
            else base64.b64decode(content["data"], validate=True)
        )
        return decode_array(content["dtype"], tuple(content["shape"]), data, content["order"])

    def _raw(self, name: str) -> bytes:
        return self._stored.tensor(name).numpy().tobytes()


def leaf_names(data: object) -> list[str]:
    """Return the names of the leaves that encoded data refer to, without making any.

    Raises:
        CorruptDataError: one of them is no text.
    """
    found: list[str] = []
    pending = [data]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += cast(list[object], part)
        elif isinstance(part, dict):
            for key, item in cast(dict[str, object], part).items():
                leaf = _leaf_of(key, item)
                if leaf is None:
                    if isinstance(item, list | dict):
                        pending.append(cast(object, item))
                elif isinstance(leaf, str):
                    found.append(leaf)
                else:
                    raise CorruptDataError(f"the non-tensor state names a leaf by {leaf!r:.80}")
    return found


def _leaf_of(key: str, item: object) -> object:
    """Return the name of the leaf that a tag refers to, or what stands in its place; None where it refers to none."""
    if key in {"$leaf", "$rawbytes"}:
        return next(iter(cast(list[object], item)), False) if isinstance(item, list) else item
    if key == "$ndarray" and isinstance(item, dict):
        return cast(dict[str, object], item).get("leaf")
    return None


def decode_torch(kind: object, found: object) -> object:
    """Return the dtype, device or size that `$torch` holds; ValueError for anything else."""
    if kind == "dtype":
        dtype: object = getattr(torch, cast(str, found), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    elif kind == "device":
        try:
            return torch.device(cast(str, found))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    elif kind == "size":
        return torch.Size(cast(list[int], found))
    raise ValueError(f"torch has no {kind} {found}")


def _numpy() -> Any:  # the module
    try:
        import numpy as np  # noqa: PLC0415  # only a state that holds arrays needs it
    except ImportError as error:
        raise CorruptDataError("the state holds numpy arrays", hint="install numpy to restore it") from error
    return np


def decode_numpy_scalar(dtype: str, data: bytes) -> object:
    """Return the scalar that `$npscalar` holds."""
    if dtype == "str_":
        return _numpy().str_(data.decode("utf-8", "surrogatepass"))
    return _numpy().bytes_(data) if dtype == "bytes_" else decode_array(dtype, (), data, "C")[()]


def decode_array(dtype: str, shape: tuple[int, ...], data: bytes, order: str) -> "Array":
    """Return the array that `$ndarray` holds; ValueError where its bytes do not fill it."""
    numpy = _numpy()
    found = numpy.dtype(dtype)
    fits = len(shape) <= _DIMENSIONS_MAX and math.prod(shape) * found.itemsize == len(data)
    if found.kind not in _PLAIN_ARRAY_KINDS or not fits:
        raise ValueError(f"{len(data)} bytes are no array of {dtype} {list(shape[:_DIMENSIONS_MAX])}")
    return numpy.ndarray(shape, dtype=found, buffer=bytearray(data), order=order)
