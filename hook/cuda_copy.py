"""Copies from CUDA tensors into the arena: on a side stream, ordered by events, never synchronising the device.

The eager part is enqueued on the compute stream itself, so it is read before anything that follows can change it;
the lazy part on a side stream that waits for an event of the compute stream. The guard makes the compute stream,
not the host, wait for the side stream. No GPU has run this yet: tests/hook/test_cuda_copy.py does where there is one.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, SupportsInt, cast

import cffi
import torch

from .mapped_arena import MappedArena

logger = logging.getLogger(__name__)

_ffi = cffi.FFI()
_ffi.cdef("int cudaGetLastError(void);")


class _CudaRuntime(Protocol):
    """What of torch's binding of the CUDA runtime is used here; torch itself gives it no types."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> SupportsInt: ...  # noqa: N802  CUDA's name
    def cudaHostUnregister(self, pointer: int, /) -> SupportsInt: ...  # noqa: N802


class _LastError(Protocol):
    def cudaGetLastError(self) -> int: ...  # noqa: N802


def _cuda_runtime() -> _CudaRuntime:
    return cast("_CudaRuntime", torch.cuda.cudart())


def _clear_last_error() -> None:
    """Take back the runtime's last error: torch would raise it at its next, innocent kernel launch.

    torch binds no cudaGetLastError, so it is called in the runtime library that torch has loaded.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "libcudart" in line:
            cast("_LastError", _ffi.dlopen(line[line.index("/") :])).cudaGetLastError()
            return
    logger.warning("cuda_error_not_cleared: libcudart is not mapped by name")


class CudaCopies:
    """State per CUDA device used; costs nothing until the first CUDA tensor comes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._used: set[torch.device] = set()
        self._eager: set[torch.device] = set()
        self._done: list[tuple[torch.device, torch.cuda.Event]] = []
        self._registered: set[int] = set()

    def register(self, arena: MappedArena) -> None:
        """Pin the arena for this process when CUDA is in use; unpinned memory works, slower, and is said.

        In one call, so that no copy crosses from one registration into another.
        """
        if not torch.cuda.is_initialized():
            return
        code = int(_cuda_runtime().cudaHostRegister(arena.address, arena.size_bytes, 0))
        if code == 0:
            self._registered.add(arena.number)
            return
        _clear_last_error()
        logger.warning("arena_not_pinned code=%d size_bytes=%d", code, arena.size_bytes)

    def unregister(self, arena: MappedArena) -> None:
        """Unpin before the arena is unmapped."""
        if arena.number in self._registered:
            self._registered.discard(arena.number)
            _cuda_runtime().cudaHostUnregister(arena.address)

    def copy(self, target: memoryview, tensor: torch.Tensor, offset_bytes: int, *, eager: bool) -> None:
        """Enqueue the copy of the bytes of a dense CUDA tensor from `offset_bytes` on that fill `target`."""
        if not target:  # an empty tensor: torch makes no tensor of an empty buffer
            return
        device = tensor.device
        stream = torch.cuda.current_stream(device) if eager else self._side_stream(device)
        (self._eager if eager else self._used).add(device)
        _enqueue(target, tensor, offset_bytes, stream)
        if not eager:
            tensor.record_stream(stream)

    def record(self) -> Callable[[], None]:
        """Mark the end of a snapshot's copies; the returned call blocks (a thread) until they have ended."""
        ends = [_event(device, torch.cuda.current_stream(device)) for device in self._eager]
        self._done = [(device, _event(device, self._streams[device])) for device in self._used]
        ends += [event for _, event in self._done]
        self._eager, self._used = set(), set()

        def wait() -> None:
            for event in ends:
                event.synchronize()

        return wait

    def guard(self) -> None:
        """Make the compute streams wait for the lazy copies; the host goes on."""
        for device, event in self._done:
            torch.cuda.current_stream(device).wait_event(event)
        self._done = []

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        if device not in self._used:
            stream.wait_event(_event(device, torch.cuda.current_stream(device)))
        return stream


class CudaWindows:
    """Copies of one snapshot through a ring, made by the copy thread, which waits for each window's.

    The host stands in the guard until the last one has ended, so that no event is needed there.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Begin at a boundary, on the training thread: what it enqueues afterwards is not waited for."""
        self._streams = {device: torch.cuda.Stream(device) for device in set(devices)}
        for device, stream in self._streams.items():
            stream.wait_event(_event(device, torch.cuda.current_stream(device)))

    def copy(self, target: memoryview, tensor: torch.Tensor, offset_bytes: int) -> None:
        """Enqueue the copy of the bytes of a dense CUDA tensor from `offset_bytes` on that fill `target`."""
        if target:
            _enqueue(target, tensor, offset_bytes, self._streams[tensor.device])

    def wait(self) -> None:
        """Return when all copies enqueued so far have ended."""
        for device, stream in self._streams.items():
            _event(device, stream).synchronize()


def _enqueue(target: memoryview, tensor: torch.Tensor, offset_bytes: int, stream: torch.cuda.Stream) -> None:
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)
    with torch.cuda.stream(stream):
        to = torch.frombuffer(target, dtype=torch.uint8)
        to.copy_(flat[offset_bytes : offset_bytes + len(target)], non_blocking=True)


def _event(device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return the end of what a stream has to do so far; who waits for it sleeps, and does not spin beside training."""
    with torch.cuda.device(device):
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
    return event
