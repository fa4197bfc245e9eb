"""Many copies by few calls of the CUDA driver, during which the GIL is free: cuMemcpyBatchAsync, since CUDA 12.8.

A call for each copy would take microseconds of a processor, a turn of the interpreter, and the driver's lock from
training. Where batches cannot be had the copies are made one by one; $EVERSTEP_CUDA_BATCHES=off asks for that.
"""

import functools
import logging
import os
from array import array
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import cffi
import torch

from ..core.errors import NodeError

logger = logging.getLogger(__name__)

SWITCH_VARIABLE = "EVERSTEP_CUDA_BATCHES"
COPIES_MAX = 64
"""In one call: some 50 µs of the driver's lock, for which training's kernels wait, until the first of them begins."""

_ffi: Any = cffi.FFI()
_ffi.cdef("""
typedef struct {
    int access_order;
    int source_location[2], target_location[2];
    unsigned int flags;
} Attributes;
typedef int (*Batch)(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, Attributes *attributes,
                     size_t *first_copies, size_t attribute_count, size_t *failed, void *stream);
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);
int cuStreamGetCtx(void *stream, void **context);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuCtxGetDevice(int *device);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream);
int cuGetErrorName(int code, const char **name);
""")

_BATCH_VERSION = 12080
"""The CUDA version whose cuMemcpyBatchAsync is declared here; newer drivers keep it."""
_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to them."""
_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by a copy engine."""
_HOST_ADDRESSES = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: where it cannot (WSL), a batch would fault."""
_REFUSALS = (1, 800, 801)
"""CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED. After others, such as that the stream
is being captured, copies one by one would do harm."""


class Driver(Protocol):
    """What of libcuda is used."""

    def cuGetProcAddress_v2(self, name: bytes, function: object, *rest: object) -> int: ...  # noqa: N802  CUDA's names
    def cuStreamGetCtx(self, stream: object, context: object, /) -> int: ...  # noqa: N802
    def cuCtxPushCurrent_v2(self, context: object, /) -> int: ...  # noqa: N802
    def cuCtxPopCurrent_v2(self, context: object, /) -> int: ...  # noqa: N802
    def cuCtxGetDevice(self, device: object, /) -> int: ...  # noqa: N802
    def cuDeviceGetAttribute(self, value: object, attribute: int, device: int, /) -> int: ...  # noqa: N802
    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: object, /) -> int: ...  # noqa: N802
    def cuGetErrorName(self, code: int, name: object, /) -> int: ...  # noqa: N802


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies from address to address, sizes in bytes: arrays of equal length. None may depend on another."""

    targets: "array[int]"
    sources: "array[int]"
    sizes: "array[int]"

    def part(self, begin: int, end: int) -> "Copies":
        """Return some of them."""
        return Copies(
            targets=self.targets[begin:end], sources=self.sources[begin:end], sizes=self.sizes[begin:end]
        )


class CudaMemcpy:
    """Enqueues copies; says once if the driver takes none together."""

    def __init__(self, driver: Driver) -> None:
        """Ask the driver for its batches."""
        self._driver = driver
        self._batch = self._find()
        self._takes_host_addresses: dict[int, bool] = {}
        """By device."""

    def enqueue(self, copies: Copies, stream: int, *, beside_kernels: bool = True) -> None:
        """Enqueue the copies on a stream, by its handle; of any thread, whatever device it uses.

        `beside_kernels`: by a copy engine, though that may take longer.

        Raises:
            NodeError: the driver refuses, or reports the failure of earlier work.
        """
        handle = _ffi.cast("void *", stream)
        with self._context_of(handle):
            batch = self._batch
            if batch is None or not self._may_batch():
                self._one_by_one(copies, handle)
                return
            code = self._together(copies, handle, batch, flags=_OVERLAP if beside_kernels else 0)
            if code in _REFUSALS:
                self._one_by_one(copies, handle)  # first: what it refuses, too, is no fault of the batches
                self._batch = None
                logger.warning("cuda_batch_refused code=%s: tensors are copied one by one", self._name(code))
            else:
                self._check(code, "cuMemcpyBatchAsync")

    def _may_batch(self) -> bool:
        """Tell whether the current device takes the addresses of registered memory as they are."""
        device, value = _ffi.new("int *"), _ffi.new("int *")
        self._check(self._driver.cuCtxGetDevice(device), "cuCtxGetDevice")
        number = int(device[0])
        if number not in self._takes_host_addresses:
            code = self._driver.cuDeviceGetAttribute(value, _HOST_ADDRESSES, number)
            self._takes_host_addresses[number] = code == 0 and bool(value[0])
        return self._takes_host_addresses[number]

    def _find(self) -> Callable[..., int] | None:
        if os.environ.get(SWITCH_VARIABLE) == "off":
            return None
        found = _ffi.new("void **")
        code = self._driver.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", found, _BATCH_VERSION, 0, _ffi.new("int *")
        )
        if code or found[0] == _ffi.NULL:
            logger.info(
                "cuda_batch_missing: tensors are copied one by one; drivers for CUDA 12.8 take many at once"
            )
            return None
        return cast("Callable[..., int]", _ffi.cast("Batch", found[0]))

    @contextmanager
    def _context_of(self, stream: object) -> Generator[None]:
        """Make the stream's context current: a thread that has used no CUDA has none."""
        context = _ffi.new("void **")
        self._check(self._driver.cuStreamGetCtx(stream, context), "cuStreamGetCtx")
        self._check(self._driver.cuCtxPushCurrent_v2(context[0]), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(context)

    def _together(self, copies: Copies, stream: object, batch: Callable[..., int], *, flags: int) -> int:
        attributes, first, failed = _ffi.new("Attributes *"), _ffi.new("size_t *"), _ffi.new("size_t *")
        attributes.access_order, attributes.flags = _STREAM_ORDER, flags
        targets, sources, sizes = (
            _ffi.from_buffer(f"{kind}[]", words)
            for kind, words in (
                ("uint64_t", copies.targets),
                ("uint64_t", copies.sources),
                ("size_t", copies.sizes),
            )
        )
        for begin in range(0, len(sizes), COPIES_MAX):
            count = min(COPIES_MAX, len(sizes) - begin)
            arrays = (targets + begin, sources + begin, sizes + begin)
            if code := batch(*arrays, count, attributes, first, 1, failed, stream):
                return code
        return 0

    def _one_by_one(self, copies: Copies, stream: object) -> None:
        for target, source, size in zip(copies.targets, copies.sources, copies.sizes, strict=True):
            self._check(self._driver.cuMemcpyAsync(target, source, size, stream), "cuMemcpyAsync")

    def _check(self, code: int, call: str) -> None:
        if code:
            raise NodeError(f"{call} failed: {self._name(code)}")

    def _name(self, code: int) -> str:
        name = _ffi.new("const char **")
        if self._driver.cuGetErrorName(code, name):
            return str(code)
        return cast("bytes", _ffi.string(name[0])).decode()


@functools.cache
def _memcpy() -> CudaMemcpy:
    try:
        return CudaMemcpy(cast("Driver", _ffi.dlopen("libcuda.so.1")))
    except (OSError, AttributeError) as error:
        raise NodeError(
            f"the CUDA driver cannot be used: {error}",
            hint="everstep copies from NVIDIA GPUs, by libcuda.so.1 of a driver for CUDA 12 or newer",
        ) from error


def enqueue(copies: Copies, stream: torch.cuda.Stream, *, beside_kernels: bool = True) -> None:
    """Enqueue copies between a device's memory and any other, pinned or not. See `CudaMemcpy.enqueue`."""
    _memcpy().enqueue(copies, stream.cuda_stream, beside_kernels=beside_kernels)
