"""Many copies by few calls of the CUDA driver, during which the GIL is free: cuMemcpyBatchAsync, since CUDA 12.8.

A call for each copy would take microseconds of a processor, a turn of the interpreter, and the driver's lock from
training. A driver without the batches gets them one by one.
"""

import functools
import logging
from array import array
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import cffi
import torch

from ..core.errors import NodeError

logger = logging.getLogger(__name__)

WORD = "Q"
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
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream);
int cuGetErrorName(int code, const char **name);
""")

_BATCH_VERSION = 12080
"""The CUDA version whose cuMemcpyBatchAsync is declared here; newer drivers keep it."""
_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream comes to them."""
_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by a copy engine."""


class Driver(Protocol):
    """What of libcuda is used."""

    def cuGetProcAddress_v2(self, name: bytes, function: object, *rest: object) -> int: ...  # noqa: N802  CUDA's names
    def cuStreamGetCtx(self, stream: object, context: object, /) -> int: ...  # noqa: N802
    def cuCtxPushCurrent_v2(self, context: object, /) -> int: ...  # noqa: N802
    def cuCtxPopCurrent_v2(self, context: object, /) -> int: ...  # noqa: N802
    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: object, /) -> int: ...  # noqa: N802
    def cuGetErrorName(self, code: int, name: object, /) -> int: ...  # noqa: N802


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies from address to address, sizes in bytes: arrays of equal length. None may depend on another."""

    targets: "array[int]"
    sources: "array[int]"
    sizes: "array[int]"

    def part(self, begin: int, end: int) -> "Copies":
        """Return some of them."""
        return Copies(self.targets[begin:end], self.sources[begin:end], self.sizes[begin:end])


class CudaMemcpy:
    """Enqueues copies; says once if the driver takes none together."""

    def __init__(self, driver: Driver) -> None:
        """Ask the driver for its batches."""
        self._driver = driver
        self._batch = self._find()

    def enqueue(self, copies: Copies, stream: int) -> None:
        """Enqueue the copies on a stream, by its handle; of any thread, whatever device it uses.

        Raises:
            NodeError: the driver refuses, or reports the failure of earlier work.
        """
        handle = _ffi.cast("void *", stream)
        with self._context_of(handle):
            if self._batch is None:
                self._one_by_one(copies, handle)
            elif code := self._together(copies, handle, self._batch):
                self._one_by_one(copies, handle)  # first: what fails here, too, is no fault of the batches
                self._batch = None
                logger.warning("cuda_batch_refused code=%s: tensors are copied one by one", self._name(code))

    def _find(self) -> Callable[..., int] | None:
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

    def _together(self, copies: Copies, stream: object, batch: Callable[..., int]) -> int:
        attributes, first, failed = _ffi.new("Attributes *"), _ffi.new("size_t *"), _ffi.new("size_t *")
        attributes.access_order, attributes.flags = _STREAM_ORDER, _OVERLAP
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
    return CudaMemcpy(cast("Driver", _ffi.dlopen("libcuda.so.1")))


def enqueue(copies: Copies, stream: torch.cuda.Stream) -> None:
    """Enqueue copies between a device's memory and any other, pinned or not. Raises NodeError as `CudaMemcpy` does."""
    _memcpy().enqueue(copies, stream.cuda_stream)
