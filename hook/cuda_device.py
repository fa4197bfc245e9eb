"""One CUDA device's lazy copies: on a side stream, at once to the host or on the device first, and what they took.

No GPU has run this yet: tests/hook/test_cuda_copy.py does where there is one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .copy_plan import merged
from .cuda_room import CudaRoom
from .device_first_machine import CopyTimes, DeviceFirstMachine, Way

logger = logging.getLogger(__name__)

COPY_BYTES_MAX = 32 * 1024**2
"""In one piece, to the host: a millisecond. What training reads back itself would wait behind one of gigabytes."""

View = Callable[[int, int], memoryview]
"""Shows so many bytes of the arena, or of a slot, from an offset."""


@dataclass(frozen=True, slots=True)
class CudaPiece:
    """Bytes [offset_in_leaf, +size) of a dense CUDA tensor go to an offset of what a `View` shows."""

    tensor: torch.Tensor
    offset_in_leaf_bytes: int
    size_bytes: int
    arena_offset_bytes: int


@dataclass(slots=True, kw_only=True)
class Passage:
    """Events of one snapshot on one device: `boundary`, `copied` and `ended` in this order, `guarded` at any time."""

    way: Way
    boundary: torch.cuda.Event
    """On the compute stream."""
    copied: torch.cuda.Event
    """The tensors have been read, and may be written."""
    ended: torch.cuda.Event
    """All bytes are in the arena."""
    guarded: torch.cuda.Event | None = None
    """On the compute stream, before it waits for `copied`: as soon as training could have written."""

    def guard(self, compute: torch.cuda.Stream) -> None:
        """Let a writer's stream wait until the tensors may be written; the host goes on. The first one's is timed."""
        if self.guarded is None:
            self.guarded = event(compute)
        compute.wait_event(self.copied)

    @property
    def is_over(self) -> bool:
        """Tell whether all of it has happened; does not wait."""
        return self.guarded is not None and self.guarded.query() and self.ended.query()

    @property
    def times(self) -> CopyTimes:
        """Return how long the copy to the host took, and how long it may take; only once it is over."""
        begin = self.boundary if self.way is Way.HOST else self.copied
        return CopyTimes(copy_s=_seconds(begin, self.ended), window_s=self._window_s)

    @property
    def waited_s(self) -> float:
        """Return how long the compute stream stood still; only once it is over."""
        return max(0.0, _seconds(self.boundary, self.copied) - self._window_s)

    @property
    def _window_s(self) -> float:
        assert self.guarded is not None
        return _seconds(self.boundary, self.guarded)


class CudaDevice:
    """The side stream of one device, and the choice between the two ways. Used by the training thread."""

    def __init__(self, device: torch.device, *, device_first: bool) -> None:
        """`device_first`: memory of the device may be taken."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._room = CudaRoom(device, self._stream)
        self._machine = DeviceFirstMachine()
        # Other allocators do not count what the room goes by.
        self._may_choose = device_first and torch.cuda.get_allocator_backend() == "native"

    @property
    def stream(self) -> torch.cuda.Stream:
        """The side stream."""
        return self._stream

    @property
    def reason(self) -> str:
        """Return why copies go the way they do, for people; empty: there is nothing to say."""
        return self._machine.reason if self._may_choose else ""

    def copy(self, view: View, pieces: Sequence[CudaPiece], *, hold: list[torch.Tensor]) -> Passage:
        """Enqueue the copy of some pieces as the compute stream leaves them.

        If it takes memory of the device, that is put in `hold`, the only reference to it: until the copy has ended.
        """
        boundary = event(torch.cuda.current_stream(self._device))
        self._stream.wait_event(boundary)
        for piece in pieces:
            piece.tensor.record_stream(
                self._stream
            )  # freed meanwhile, its memory must not be used again too soon
        clone = self._choose(sum(piece.size_bytes for piece in pieces))
        if clone is None:
            to_host(view, pieces, self._stream)
            copied = ended = event(self._stream)
        else:
            hold.append(clone)
            ordered = sorted(pieces, key=lambda piece: piece.arena_offset_bytes)
            copied = self._to_clone(clone, ordered)
            ended = self._from_clone(view, clone, ordered)
        return Passage(way=self._machine.way, boundary=boundary, copied=copied, ended=ended)

    def learn(self, passage: Passage) -> None:
        """Take what a passage that is over took."""
        self._machine.measured(passage.times)

    def _choose(self, size_bytes: int) -> torch.Tensor | None:
        """Return memory for a copy on the device first; None: at once to the host."""
        if not self._may_choose:
            return None
        machine, was = self._machine, self._machine.way
        if self._room.became_short():
            self._refused(size_bytes)
        free_bytes = self._room.free_bytes(size_bytes) if machine.wants_room else 0
        clone = None
        if machine.choose(needed_bytes=size_bytes, free_bytes=free_bytes) is Way.DEVICE:
            clone = self._room.take(size_bytes)
            if clone is None:
                self._refused(size_bytes)
        if machine.way is not was:
            why = machine.reason or "copies to the host fit between boundary and optimizer step"
            logger.info("cuda_copies device=%s way=%s: %s", self._device, machine.way.value, why)
        return clone

    def _refused(self, size_bytes: int) -> None:
        self._machine.refused()
        logger.warning("cuda_memory_short device=%s needed_bytes=%d", self._device, size_bytes)

    def _to_clone(self, clone: torch.Tensor, pieces: Sequence[CudaPiece]) -> torch.cuda.Event:
        begin = 0
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                clone[begin : begin + piece.size_bytes].copy_(_octets(piece), non_blocking=True)
                begin += piece.size_bytes
        return event(self._stream)

    def _from_clone(self, view: View, clone: torch.Tensor, pieces: Sequence[CudaPiece]) -> torch.cuda.Event:
        """Pieces that lie side by side in the arena do so in the clone: they are one copy."""
        begin = 0
        with torch.cuda.stream(self._stream):
            for offset, size in merged((piece.arena_offset_bytes, piece.size_bytes) for piece in pieces):
                _copy_out(view(offset, size), clone[begin : begin + size])
                begin += size
        return event(self._stream)


def to_host(view: View, pieces: Sequence[CudaPiece], stream: torch.cuda.Stream) -> None:
    """Enqueue the copies of some pieces on a stream of their device."""
    with torch.cuda.stream(stream):
        for piece in pieces:
            _copy_out(view(piece.arena_offset_bytes, piece.size_bytes), _octets(piece))


def event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return the end of what a stream has to do so far; who waits for it sleeps, and does not spin beside training."""
    with torch.cuda.device(stream.device):
        made = torch.cuda.Event(enable_timing=True, blocking=True)
        made.record(stream)
    return made


def _octets(piece: CudaPiece) -> torch.Tensor:
    flat = torch.as_strided(piece.tensor.detach(), (piece.tensor.numel(),), (1,)).view(torch.uint8)
    return flat[piece.offset_in_leaf_bytes : piece.offset_in_leaf_bytes + piece.size_bytes]


def _copy_out(target: memoryview, source: torch.Tensor) -> None:
    """Enqueue a copy to the host on the current stream."""
    into = torch.frombuffer(target, dtype=torch.uint8)
    for begin in range(0, len(target), COPY_BYTES_MAX):
        end = begin + COPY_BYTES_MAX
        into[begin:end].copy_(source[begin:end], non_blocking=True)


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return begin.elapsed_time(end) / 1000
