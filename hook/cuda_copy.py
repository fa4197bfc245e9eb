"""Copies from CUDA tensors into the arena: on a side stream, ordered by events, never synchronising the device.

The side stream waits for an event of the compute stream (cuda_device.py). The compute stream waits for the end of the
eager part at once, so that nothing that follows can change it first; the lazy part is enqueued by the copy thread. The
guard lets the host wait until that is enqueued, and then the compute stream for the side stream.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from . import cuda_pinning
from .cuda_batch import CudaBatch
from .cuda_device import CudaDevice, Passage, event
from .cuda_pinning import Pinning
from .cuda_turns import Turns
from .mapped_arena import MappedArena
from .report import CostBook


class CudaCopies:
    """State per CUDA device used; costs nothing until the first CUDA tensor comes."""

    def __init__(self, costs: CostBook, *, device_first: bool = True) -> None:
        """`costs` hears what the copies took; without `device_first` they take no memory of devices."""
        self._costs, self._device_first = costs, device_first
        self._devices: dict[torch.device, CudaDevice] = {}
        self._passages: dict[torch.device, Passage] = {}
        """Of the newest snapshot."""
        self._is_guarded = False
        self._unread = deque[dict[torch.device, Passage]]()
        """Of each snapshot whose guard was passed, until all of it has happened: a host may be ahead of several."""
        self._streams: list[torch.cuda.Stream] = []
        """On which the newest snapshot's copies were enqueued."""
        self._untold_s = 0.0
        self._pinnings: dict[int, Pinning] = {}
        """By the arena's address: the next daemon's arenas may have the numbers of this one's."""

    def register(self, arena: MappedArena) -> None:
        """Begin to pin the arena for this process once CUDA is in use. Again is nothing."""
        if arena.address not in self._pinnings and cuda_pinning.is_in_use():
            self._pinnings[arena.address] = Pinning(arena)

    def is_pinning(self, arena: MappedArena) -> bool:
        """Tell whether the arena is being pinned: copies into it would have to wait."""
        pinning = self._pinnings.get(arena.address)
        return pinning is not None and not pinning.is_over

    def wait_pinned(self, arena: MappedArena, deadline_s: float) -> None:
        """Wait until it is pinned, or cannot be, or for so long."""
        if (pinning := self._pinnings.get(arena.address)) is not None:
            pinning.wait(deadline_s)

    def unregister(self, arena: MappedArena) -> None:
        """Unpin before the arena is unmapped."""
        if (pinning := self._pinnings.pop(arena.address, None)) is not None:
            pinning.undo()

    def copy(self, *, eager: Sequence[CudaBatch], lazy: Sequence[CudaBatch]) -> "CudaCopy":
        """Enqueue a snapshot's eager copies, and begin the others; what is returned enqueues them and waits.

        The caller keeps the memory of all tensors until that has waited.
        """
        self._learn()
        self._streams, self._passages, self._is_guarded = [], {}, False
        ends: list[torch.cuda.Event] = []
        for batch in eager:
            device = self._device(batch.device)
            self._streams.append(device.stream)
            ends.append(device.copy_at_once(batch))
        late: list[tuple[CudaDevice, CudaBatch, Passage]] = []
        for batch in lazy:
            device = self._device(batch.device)
            self._streams.append(device.stream)
            passage = self._passages[batch.device] = device.begin(batch.size_bytes)
            late.append((device, batch, passage))
        self._tell(on_device=any(passage.clone is not None for passage in self._passages.values()))
        return CudaCopy(late, ends)

    def finish(self) -> None:
        """Return when the newest snapshot's copies have ended, however far its enqueuing came: it has failed."""
        for stream in self._streams:
            event(stream).synchronize()
        self._streams, self._passages = [], {}

    def guard(self) -> None:
        """Make the current streams wait until lazy tensors may be written; the host goes on.

        Each writer's: several optimizers may run on streams of their own.
        """
        for device, passage in self._passages.items():
            passage.guard(torch.cuda.current_stream(device))
        guarded = {device: each for device, each in self._passages.items() if each.guarded is not None}
        if guarded and not self._is_guarded:
            self._unread.append(guarded)
            self._is_guarded = True

    def has_work_before_guard(self) -> bool:
        """Tell whether no device has come to where training waits for the newest copy yet; does not wait."""
        guarded = [passage.guarded for passage in self._passages.values()]
        return (
            bool(guarded)
            and not is_capturing()
            and all(each is not None and not each.query() for each in guarded)
        )

    def windows(self, numbers: Iterable[int]) -> "CudaWindows":
        """Begin a snapshot through a ring, from the devices of these numbers; -1: from host memory."""
        devices = [torch.device("cuda", number) for number in sorted({*numbers}) if number >= 0]
        return CudaWindows({device: self._device(device).turns for device in devices})

    def _device(self, device: torch.device) -> CudaDevice:
        if device not in self._devices:
            self._devices[device] = CudaDevice(device, device_first=self._device_first)
        return self._devices[device]

    def take_wait_s(self) -> float:
        """Return how long devices have waited for copies, as far as that is known and was not told; does not wait."""
        self._learn()
        waited_s, self._untold_s = self._untold_s, 0.0
        return waited_s

    def _learn(self) -> None:
        """Take what earlier snapshots' copies took. A device that is far behind has not come to their end yet."""
        while self._unread and all(passage.is_over for passage in self._unread[0].values()):
            passages = self._unread.popleft()
            waited_s = max(passage.waited_s for passage in passages.values())
            self._costs.cuda_wait_s += waited_s
            self._untold_s += waited_s
            for device, passage in passages.items():
                self._devices[device].learn(passage)

    def _tell(self, *, on_device: bool) -> None:
        reasons = {device: each.reason for device, each in self._devices.items() if each.reason}
        texts = [f"{device}: {reason}" for device, reason in reasons.items()]
        self._costs.cuda_copies = "; ".join(texts if len(self._devices) > 1 else reasons.values())
        self._costs.device_first += on_device


class CudaCopy:
    """The copies of one snapshot. Used by the copy thread, whatever has happened."""

    def __init__(
        self,
        late: Sequence[tuple[CudaDevice, CudaBatch, Passage]],
        ends: Sequence[torch.cuda.Event],
    ) -> None:
        """Made at the boundary. `late`: what has begun and is not enqueued; `ends` of what was enqueued there."""
        self._late, self._ends = late, ends
        self._device = cuda_pinning.device_in_use()

    def enqueue(self) -> None:
        """Enqueue what may wait; the tensors may then be written behind their passages' guards."""
        if self._late or self._ends:
            cuda_pinning.enter(self._device)  # as it waits, too
        for device, batch, passage in self._late:
            device.enqueue(batch, passage)

    def wait(self) -> None:
        """Return when all copies have ended, also where enqueuing them has failed; lets memory of the devices go."""
        try:
            for each in self._ends:
                each.synchronize()
            for device, _, passage in self._late:
                (passage.ended or event(device.stream)).synchronize()
        finally:
            for _, _, passage in self._late:
                passage.clone = None
            self._late, self._ends = (), ()


class CudaWindows:
    """Copies of one snapshot through a ring, made by the copy thread, which waits for each window's.

    The host stands in the guard until the last one has ended, so that no event is needed there.
    """

    def __init__(self, turns: Mapping[torch.device, Turns]) -> None:
        """Begin at a boundary, on the training thread: what it enqueues afterwards is not waited for."""
        self._turns, self._device = turns, cuda_pinning.device_in_use()
        for device, each in turns.items():
            each.main.wait_event(event(torch.cuda.current_stream(device)))

    def copy(self, batches: Iterable[CudaBatch]) -> None:
        """Make some copies; return when they have ended, also where one has failed."""
        cuda_pinning.enter(self._device)
        try:
            for batch in batches:
                batch.to_host(self._turns[batch.device])
        finally:
            for each in self._turns.values():
                event(each.main).synchronize()


def is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured: what is enqueued then does not run, and must not wait for a copy."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
