"""Page-locked arenas: cudaHostRegister on a thread of its own, since it touches and locks each page of them."""

import functools
import logging
import threading
import time
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from typing import Protocol, SupportsInt, cast

import cffi
import torch

from .cuda_batch import spans
from .mapped_arena import MappedArena

logger = logging.getLogger(__name__)

_ffi = cffi.FFI()
_ffi.cdef("""
int cudaGetLastError(void);
int cudaThreadExchangeStreamCaptureMode(int *mode);
""")
REST = 1.0
"""Times as long as a call took: so much of the driver's lock is training's."""
_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal"""


class _CudaRuntime(Protocol):
    """What of torch's binding of the CUDA runtime is used here; torch itself gives it no types."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> SupportsInt: ...  # noqa: N802  CUDA's name
    def cudaHostUnregister(self, pointer: int, /) -> SupportsInt: ...  # noqa: N802


class _CudaLibrary(Protocol):
    """What torch does not bind."""

    def cudaGetLastError(self) -> int: ...  # noqa: N802
    def cudaThreadExchangeStreamCaptureMode(self, mode: object, /) -> int: ...  # noqa: N802


def cuda_runtime() -> _CudaRuntime:
    """Return the CUDA runtime, as torch binds it."""
    return cast("_CudaRuntime", torch.cuda.cudart())


@functools.cache
def _cuda_library() -> _CudaLibrary | None:
    """The runtime library that torch has loaded."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libcudart" in line:
            return cast("_CudaLibrary", _ffi.dlopen(line[line.index("/") :]))
    return None


def is_in_use() -> bool:
    """Tell whether this process uses CUDA."""
    return torch.cuda.is_initialized()


def device_in_use() -> int | None:
    """Return the device of the thread that trains, for `enter`; None where CUDA is not in use."""
    return torch.cuda.current_device() if is_in_use() else None


def enter(device: int | None) -> None:
    """Let this thread work beside the one that trains, on its device: a thread begins on the first one, and would make
    a context there, of half a GiB, for each rank.

    It goes on while another one captures a graph: what it calls would else end the capture.
    """
    if device is not None:
        torch.cuda.set_device(device)
    if (library := _cuda_library()) is not None:
        library.cudaThreadExchangeStreamCaptureMode(_ffi.new("int *", _THREAD_LOCAL))


def _clear_last_error() -> None:
    """Take back this thread's last error: torch would raise it at its next, innocent kernel launch."""
    if (library := _cuda_library()) is not None:
        library.cudaGetLastError()
    else:
        logger.warning("cuda_error_not_cleared: libcudart is not mapped by name")


class Pinning:
    """Of one arena, in spans that no copy crosses, each in a short call: training's own wait for one (ADR 0087).

    Unpinned memory works, slower, and is said. Begun and undone on the training thread.
    """

    def __init__(self, arena: MappedArena) -> None:
        """Begin."""
        self._arena = arena
        self._pinned: list[int] = []
        """Addresses."""
        self._undone = threading.Event()
        self._device = device_in_use()
        self._thread = threading.Thread(target=self._work, name="everstep-pinning", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Tell whether the arena is pinned, or cannot be."""
        return not self._thread.is_alive()

    def wait(self, deadline_s: float | None = None) -> None:
        """Wait until it is over, or for so long."""
        self._thread.join(deadline_s)

    def undo(self) -> None:
        """Unpin, or end what is not over."""
        self._undone.set()
        self._thread.join()
        while self._pinned:
            cuda_runtime().cudaHostUnregister(self._pinned.pop())

    def _work(self) -> None:
        enter(self._device)
        for offset_bytes, size_bytes in _ranges(self._arena):
            took_s = self._pin(offset_bytes, size_bytes)
            if took_s is None or self._undone.wait(REST * took_s):
                return

    def _pin(self, offset_bytes: int, size_bytes: int) -> float | None:
        """Return how long the driver took; None: it cannot be pinned."""
        arena = self._arena
        arena.populate(offset_bytes, size_bytes)
        began_s = time.monotonic()
        code = int(cuda_runtime().cudaHostRegister(arena.address + offset_bytes, size_bytes, 0))
        if code == 0:
            self._pinned.append(arena.address + offset_bytes)
            return time.monotonic() - began_s
        _clear_last_error()
        logger.warning(
            "arena_not_pinned code=%d size_bytes=%d pinned_bytes=%d", code, arena.size_bytes, offset_bytes
        )
        return None


def _ranges(arena: MappedArena) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of what is pinned by itself; two never share a page."""
    if arena.slot_size_bytes % PAGESIZE:  # slots are aligned for 4 KiB, and pages may be of 64
        yield 0, arena.size_bytes
        return
    for slot in range(arena.slot_count):
        for begin, end in spans(0, arena.slot_size_bytes):
            yield slot * arena.slot_size_bytes + begin, end - begin
