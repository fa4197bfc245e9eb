"""One CUDA device's copies: on a side stream, at once to the host or on the device first, and what lazy ones took."""

import logging
from dataclasses import dataclass

import torch

from .cuda_batch import CudaBatch
from .cuda_room import CudaRoom
from .cuda_turns import Turns
from .device_first_machine import CopyTimes, DeviceFirstMachine, Way

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Passage:
    """Events of one snapshot on one device: `boundary`, `copied` and `ended` in this order, `guarded` at any time."""

    way: Way
    boundary: torch.cuda.Event
    """On the compute stream."""
    clone: torch.Tensor | None = None
    """Memory of the device that the copy goes by; let go when it has ended."""
    copied: torch.cuda.Event | None = None
    """The tensors have been read, and may be written; None until all has been enqueued."""
    ended: torch.cuda.Event | None = None
    """All bytes are in the arena."""
    guarded: torch.cuda.Event | None = None
    """On the compute stream, before it waits for `copied`: as soon as training could have written."""

    def guard(self, compute: torch.cuda.Stream) -> None:
        """Let a writer's stream wait until the tensors may be written; the host goes on. The first one's is timed.

        Of one whose enqueuing has failed nothing is waited for: nobody wants what it has copied.
        """
        if self.copied is None:
            return
        if self.guarded is None:
            self.guarded = event(compute)
        compute.wait_event(self.copied)

    @property
    def is_over(self) -> bool:
        """Tell whether all of it has happened; does not wait."""
        guarded, ended = self.guarded, self.ended
        return guarded is not None and ended is not None and guarded.query() and ended.query()

    @property
    def times(self) -> CopyTimes:
        """Return how long the copy to the host took, and how long it may take; only once it is over."""
        begin = self.boundary if self.way is Way.HOST else self.copied
        assert begin is not None
        assert self.ended is not None
        return CopyTimes(copy_s=_seconds(begin, self.ended), window_s=self._window_s)

    @property
    def waited_s(self) -> float:
        """Return how long the compute stream stood still; only once it is over."""
        assert self.copied is not None
        return max(0.0, _seconds(self.boundary, self.copied) - self._window_s)

    @property
    def _window_s(self) -> float:
        assert self.guarded is not None
        return _seconds(self.boundary, self.guarded)


class CudaDevice:
    """The side streams of one device, and the choice between the two ways.

    Used by the training thread, but for `enqueue`.
    """

    def __init__(self, device: torch.device, *, device_first: bool) -> None:
        """`device_first`: memory of the device may be taken."""
        self._device = device
        self.turns = Turns(device)
        self._stream = self.turns.main
        self._room = CudaRoom(device, self._stream)
        self._machine = DeviceFirstMachine()
        # Other allocators do not count what the room goes by.
        self._may_choose = device_first and torch.cuda.get_allocator_backend() == "native"

    @property
    def stream(self) -> torch.cuda.Stream:
        """The side stream that others wait for."""
        return self._stream

    @property
    def reason(self) -> str:
        """Return why copies go the way they do, for people; empty: there is nothing to say."""
        return self._machine.reason if self._may_choose else ""

    def copy_at_once(self, batch: CudaBatch) -> torch.cuda.Event:
        """Enqueue copies that the training thread's stream waits for before it changes anything; return their end."""
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_event(event(compute))
        batch.to_host(self.turns)
        end = event(self._stream)
        compute.wait_event(end)
        return end

    def begin(self, size_bytes: int) -> Passage:
        """Begin the copy of so many bytes, on the training thread: they are read as its stream leaves them now."""
        boundary = event(torch.cuda.current_stream(self._device))
        self._stream.wait_event(boundary)
        clone = self._choose(size_bytes)
        return Passage(way=self._machine.way, boundary=boundary, clone=clone)

    def enqueue(self, batch: CudaBatch, passage: Passage) -> None:
        """Enqueue the copies of a passage; on any thread.

        Whoever waits for it keeps the tensors' memory until then, so that it is not used again too soon.
        """
        if passage.clone is None:
            batch.to_host(self.turns)
            passage.ended = passage.copied = event(self._stream)
        else:
            clone = passage.clone.data_ptr()
            batch.to_clone(clone, self._stream)
            copied = event(self._stream)
            batch.from_clone(clone, self.turns)
            passage.ended = event(self._stream)
            passage.copied = copied

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


def event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return the end of what a stream has to do so far; who waits for it sleeps, and does not spin beside training."""
    with torch.cuda.device(stream.device):
        made = torch.cuda.Event(enable_timing=True, blocking=True)
        made.record(stream)
    return made


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return begin.elapsed_time(end) / 1000
