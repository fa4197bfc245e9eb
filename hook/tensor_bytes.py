"""Tensors as bytes: dtype names, addresses, dense memory, copies that release the GIL."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, cast

import cffi
import torch

from ..checkpoint.dtype_format import itemsize_bytes
from ..checkpoint.leaf import LeafSpec, contiguous_strides
from ..checkpoint.shard_rules_plan import is_dense
from ..core.advice import address_of
from ..core.errors import MemoryRefusedError, StateTypeError
from . import copies

COPY_PIECE_BYTES = 4 * 1024 * 1024
"""At most this much per call, so that a copy can be stopped or paced between two calls."""

_ffi = cffi.FFI()
# Addresses are declared as integers, which every 64-bit ABI passes as pointers: no cast object per call.
_ffi.cdef("void *memmove(uintptr_t to, uintptr_t from, size_t size);")


class _Libc(Protocol):
    def memmove(self, to: int, source: int, size_bytes: int, /) -> object: ...


_libc = cast("_Libc", _ffi.dlopen(None))

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_DEVICE_TYPES = ("cpu", "cuda")


_OCTETS = _ffi.typeof("char[]")
"""Parsed here: half a millisecond, at the first use of a text."""


class BufferPin:
    """The address of a readable buffer, which cannot be closed or resized until `release()`."""

    def __init__(self, buffer: memoryview) -> None:
        """Pin a C-contiguous buffer (memoryview of an mmap, bytes, bytearray); it may be read-only."""
        # What it is a view of is held, not the view: CPython 3.11 crashes where it collects a pinned one in a cycle.
        self._handle = _ffi.from_buffer(_OCTETS, buffer.obj)
        self.address = address_of(buffer)
        self.size_bytes = buffer.nbytes

    def release(self) -> None:
        """Let the buffer go; its address must not be used any more."""
        _ffi.release(self._handle)
        self.address = 0
        self.size_bytes = 0


def copy_bytes(to_address: int, from_address: int, size_bytes: int) -> None:
    """Copy bytes between two places of this process; the GIL is free meanwhile."""
    if abs(to_address - from_address) < size_bytes:
        _libc.memmove(to_address, from_address, size_bytes)  # by pieces it would read what it has written
        return
    copy = _libc.memmove if copies.COPIES is None else copies.COPIES.everstep_copy
    for offset in range(0, size_bytes, COPY_PIECE_BYTES):
        piece = min(COPY_PIECE_BYTES, size_bytes - offset)
        copy(to_address + offset, from_address + offset, piece)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return format v1's name of a dtype. Raises StateTypeError where the format has none (quantised, bits)."""
    name = str(dtype).removeprefix("torch.")
    itemsize_bytes(name)
    return name


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises StateTypeError when the format or this torch does not know it."""
    itemsize_bytes(name)
    dtype: object = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateTypeError(
            f"dtype {name!r} is not known to torch {torch.__version__}", hint="restore with a newer torch"
        )
    return dtype


def require_plain(tensor: torch.Tensor, path: str) -> None:
    """Return if the tensor's bytes can be read at its address.

    Raises:
        StateTypeError: meta, sparse, quantised, nested, not initialised, sharded or of another device type; the
            message names the path and says what to do.
    """
    strided = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    if strided and type(tensor) in _PLAIN_TYPES and tensor.device.type in _DEVICE_TYPES:
        return
    reason = _refusal(tensor)
    if reason is not None:
        what, hint = reason
        raise StateTypeError(f"{path} is {what}, which cannot be saved", hint=hint)


def reach_of(tensor: torch.Tensor) -> int:
    """Return how many elements of memory a strided tensor spans, from its first element to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def require_dtype(tensor: torch.Tensor, path: str) -> None:
    """Return if the format knows a tensor's dtype.

    Raises:
        StateTypeError: it does not; the message names the path.
    """
    try:
        dtype_name(tensor.dtype)
    except StateTypeError as error:
        raise StateTypeError(f"{path}: {error.message}", hint=error.hint) from error


def require_memory(tensor: torch.Tensor, path: str) -> None:
    """Return if a plain tensor's storage has memory for all its elements.

    Raises:
        StateTypeError: it has not; the message names the path.
    """
    if not tensor.numel():
        return
    needed_bytes = (tensor.storage_offset() + reach_of(tensor)) * tensor.element_size()
    has_bytes = tensor.untyped_storage().nbytes()
    if has_bytes < needed_bytes:
        raise StateTypeError(
            f"{path} needs {needed_bytes} bytes of memory and its storage has {has_bytes}",
            hint="give the storage back what was taken from it before run.step(), as where weights are offloaded",
        )


def _refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter without a shape yet", "run one forward pass before attach()"
    if tensor.is_meta:
        return "on the meta device", "materialise it (to_empty and initialise) before attach()"
    if _dispatch_of(type(tensor)) != _dispatch_of(torch.Tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"a {kind}", "save its inner tensors from state_dict() of an object of your own"
    if tensor.is_quantized:
        return "a quantised tensor", "save int_repr(), scale and zero point from state_dict() of an object"
    if tensor.is_nested:
        return "a nested tensor", "save its values() and offsets() instead"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}", "convert it with to_dense(), or save its parts"
    if tensor.device.type not in _DEVICE_TYPES:
        return f"on device {tensor.device}", f"supported device types are {', '.join(_DEVICE_TYPES)}"
    return None


def _dispatch_of(kind: type) -> object:
    """A class with a dispatch of its own keeps its elements elsewhere: DTensor, FakeTensor, quantised weights."""
    return getattr(kind, "__torch_dispatch__", None)


def dense_or_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return a tensor whose elements fill consecutive memory, and whether it is a copy made now.

    Raises:
        MemoryRefusedError: its device has no memory for that.
    """
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor, False
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        lazy = tensor.is_conj() or tensor.is_neg()
        if not lazy and is_dense(tensor.shape, tensor.stride()):
            return tensor, False
        try:
            return plain.contiguous(), True
        except torch.OutOfMemoryError as error:
            raise MemoryRefusedError(
                f"no memory on {tensor.device} for a copy of a tensor with holes, {plain.nbytes} bytes",
                hint="make it contiguous in the model, or leave more memory there",
            ) from error


def normal_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with those that place no element made to follow one rule.

    torch leaves the stride of a dimension of size 1 to chance. Here it is what row-major order would give it from
    its right neighbour, so that equal memory has equal strides and a row-major leaf is known as one.
    """
    if 0 in shape:
        return contiguous_strides(shape)
    found = list(strides)
    following = 1
    for index in range(len(shape) - 1, -1, -1):
        if shape[index] == 1:
            found[index] = following
        following = found[index] * shape[index]
    return tuple(found)


def describe(name: str, tensor: torch.Tensor, *, replicas: int = 1) -> LeafSpec:
    """Return the spec of a dense, unsharded tensor."""
    shape = tuple(tensor.shape)
    return LeafSpec(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=shape,
        strides=normal_strides(shape, tensor.stride()),
        replicas=replicas,
        global_shape=shape,
        global_offset=(0,) * len(shape),
    )


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address, size in bytes) of a dense tensor's elements."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def copy_bits(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copy every element's bits into a tensor of the same dtype and shape, whatever the strides and devices.

    An expanded target is written once per element of memory.
    """
    with torch.no_grad():
        target = to.detach()
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        if not (target.is_conj() or target.is_neg()):  # else copy_ turns the values back
            target, source = _as_integers(target), _as_integers(source)
        target.copy_(source)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one dtype and shape have the same bits, wherever they are."""
    with torch.no_grad():
        plain = [each.detach().resolve_conj().resolve_neg().cpu() for each in (one, other)]
        return torch.equal(*map(_as_integers, plain))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: every dtype can be copied so, and no NaN is made quiet on the way."""
    integers = _INTEGERS.get(tensor.element_size())
    return tensor.view(integers) if integers is not None else torch.view_as_real(tensor).view(torch.int64)


@contextmanager
def pinned(tensor: torch.Tensor) -> Generator[memoryview]:
    """Give the bytes of a contiguous CPU tensor, without a copy; they must not be used afterwards."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        yield memoryview(b"")
        return
    cdata = _ffi.cast("char *", tensor.data_ptr())
    with memoryview(_ffi.buffer(cdata, size_bytes)) as view:
        yield view
