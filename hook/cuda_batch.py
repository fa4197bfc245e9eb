"""Copies from the CUDA tensors of one device, enqueued together; what of them stays the same is made once per slot.

A boundary fills in the tensors' addresses, where they have changed. None of it asks where the tensors are, so that
tests and bench/boundary.py run it over host memory.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import torch

from . import cuda_memcpy
from .capture import StateCapture
from .copy_plan import SLOTS_KNOWN_MAX, WORD, Picker, Placed, merged
from .cuda_memcpy import Copies
from .cuda_turns import Turns

SPAN_BYTES = 16 * 1024**2
"""A slot is pinned, and copied to, in spans of this: no copy crosses from one into the next (ADR 0087)."""
TURN_BYTES = 16 * 1024**2
"""Copies of so many bytes are a turn (ADR 0088): a third of a millisecond."""
TURNS_MAX = 128
"""Of a larger state turns are larger: a stream takes some thousand operations before whoever enqueues has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBatch:
    """Copies from one device into a slot. Whoever enqueues it keeps the tensors' memory until they have ended."""

    device: torch.device
    base: int
    """The slot's address."""
    copies: Copies
    """In the order of their targets."""
    turns: Sequence[tuple[int, int]]
    """Where the copies of each begin and end."""
    size_bytes: int

    def to_host(self, turns: Turns) -> None:
        """Enqueue the copies."""
        turns.copy(self.copies.part(*turn) for turn in self.turns)

    def to_clone(self, clone: int, stream: torch.cuda.Stream) -> None:
        """Enqueue copies of the same bytes to an address, one behind the other."""
        targets = array(WORD, accumulate(self.copies.sizes[:-1], initial=clone))
        copies = Copies(targets=targets, sources=self.copies.sources, sizes=self.copies.sizes)
        cuda_memcpy.enqueue(copies, stream, beside_kernels=False)

    def from_clone(self, clone: int, turns: Turns) -> None:
        """Enqueue the copies from there: what lies side by side in the slot does so in the clone, and is one."""
        found: list[tuple[int, int, int]] = []
        for target, size in merged(zip(self.copies.targets, self.copies.sizes, strict=True)):
            for begin, end in spans(target - self.base, size):
                found.append((target + begin, clone, end - begin))
                clone += end - begin
        targets, sources, sizes = (array(WORD, words) for words in zip(*found, strict=True))
        copies = Copies(targets=targets, sources=sources, sizes=sizes)
        turns.copy(copies.part(*turn) for turn in in_turns(sizes))


class CudaPlan:
    """Where the leaves of CUDA devices go in a slot: made once per layout and placement on devices."""

    def __init__(self, placed: Iterable[Placed], capture: StateCapture) -> None:
        """Plan the copies of these places; empty ones need none."""
        found: dict[int, list[Placed]] = {}
        for place in placed:
            if place.size_bytes:
                found.setdefault(capture.devices[place.leaf], []).append(place)
        self._devices = [_DevicePlan(device, places) for device, places in found.items()]

    def at(self, addresses: tuple[int, ...], base: int) -> list[CudaBatch]:
        """Return the copies of leaves at these addresses into the slot at `base`, one batch for each device."""
        return [plan.at(addresses, base) for plan in self._devices]


class _DevicePlan:
    def __init__(self, device: int, places: Sequence[Placed]) -> None:
        self._device = torch.device("cuda", device)
        cuts = [
            (place.leaf, place.offset_in_leaf_bytes + begin, place.slot_offset_bytes + begin, end - begin)
            for place in sorted(places, key=lambda place: place.slot_offset_bytes)
            for begin, end in spans(place.slot_offset_bytes, place.size_bytes)
        ]
        leaves, self._offsets_in_leaf, self._offsets, sizes = zip(*cuts, strict=True)
        self._pick = Picker(leaves)
        self._sizes, self._turns = array(WORD, sizes), in_turns(sizes)
        self._size_bytes = sum(sizes)
        self._picked: tuple[int, ...] = ()
        self._sources = array(WORD)
        self._targets: dict[int, array[int]] = {}

    def at(self, addresses: tuple[int, ...], base: int) -> CudaBatch:
        picked = self._pick(addresses)
        if picked is not self._picked:
            sources = array(WORD, map(add, picked, self._offsets_in_leaf))
            self._picked, self._sources = picked, sources
        copies = Copies(targets=self._targets_at(base), sources=self._sources, sizes=self._sizes)
        return CudaBatch(
            device=self._device, base=base, copies=copies, turns=self._turns, size_bytes=self._size_bytes
        )

    def _targets_at(self, base: int) -> "array[int]":
        """The same slots come again and again; those of an arena that is gone are forgotten some time."""
        if base not in self._targets:
            if len(self._targets) == SLOTS_KNOWN_MAX:
                self._targets.clear()
            self._targets[base] = array(WORD, [base + offset for offset in self._offsets])
        return self._targets[base]


def spans(offset_bytes: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut bytes [offset, +size) of a slot where its spans end; yield begin and end of each part, from 0 on."""
    begin = 0
    while begin < size_bytes:
        end = min(size_bytes, begin + SPAN_BYTES - (offset_bytes + begin) % SPAN_BYTES)
        yield begin, end
        begin = end


def in_turns(sizes_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each turn begins and ends, of copies of these sizes: none longer than it has to be."""
    turn_bytes = max(TURN_BYTES, sum(sizes_bytes) // TURNS_MAX)
    found: list[tuple[int, int]] = []
    begin = left_bytes = 0
    for index, size in enumerate(sizes_bytes):
        if size > left_bytes:
            if index:
                found.append((begin, index))
            begin, left_bytes = index, turn_bytes
        left_bytes -= size
    return [*found, (begin, len(sizes_bytes))] if sizes_bytes else found
