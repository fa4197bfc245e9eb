"""Copies from the CUDA tensors of one device, enqueued together; what of them stays the same is made once per slot.

A view of a slot for each leaf takes microseconds with the GIL, and so does a copy by itself. Here a leaf that is copied
whole costs a look-up at a boundary; the copies of all are one call, which releases the GIL. None of it asks where the
tensors are, so that tests and bench/boundary.py run it over host memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from ..checkpoint.dtype_format import itemsize_bytes
from ..checkpoint.leaf import LeafSpec
from .capture import StateCapture
from .copy_plan import SLOTS_KNOWN_MAX, Placed, picker
from .state_protocol import TensorLeaf
from .tensor_bytes import slot_view

_torch = cast("Any", torch)  # that it has these at all is not in its annotations
_plainly = cast("Callable[[], AbstractContextManager[object]]", _torch._C.DisableTorchFunctionSubclass)
_copy_all = cast("Callable[..., None]", _torch._foreach_copy_)

SPAN_BYTES = 32 * 1024**2
"""A slot is pinned, and copied to, in spans of this: no copy crosses from one into the next (ADR 0087).

A millisecond of copying: what training reads back itself would wait behind a copy of gigabytes.
"""

View = Callable[[int, int], memoryview]
"""Shows so many bytes of the arena, or of a slot, from an offset."""


@dataclass(frozen=True, slots=True)
class CudaPiece:
    """Bytes [offset_in_leaf, +size) of a dense CUDA tensor go to an offset of what a `View` shows."""

    tensor: torch.Tensor
    offset_in_leaf_bytes: int
    size_bytes: int
    arena_offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaBatch:
    """Copies from tensors of one device. Whoever enqueues it keeps their memory until the copies have ended."""

    device: torch.device
    size_bytes: int
    pieces: Sequence[CudaPiece]
    """Copied one by one."""
    whole: Sequence[torch.Tensor] = ()
    """Row-major tensors that are copied in one piece each, by one call."""
    targets: Callable[[View], Sequence[torch.Tensor]] = lambda _: ()
    """Return theirs in host memory; made at the first call for a slot."""
    offsets_bytes: Sequence[int] = ()
    """Theirs in the slot; and the slot's in what a `View` shows."""
    slot_offset_bytes: int = 0

    def to_host(self, view: View) -> None:
        """Enqueue the copies on the current stream."""
        if self.whole:
            with torch.no_grad(), _plainly():
                _copy_all(self.targets(view), self.whole, non_blocking=True)
        for piece in self.pieces:
            self.copy_out(view, piece.arena_offset_bytes, octets(piece))

    def copy_out(self, view: View, offset_bytes: int, source: torch.Tensor) -> None:
        """Enqueue the copy of bytes to an offset of what `view` shows, on the current stream."""
        size_bytes = source.numel()
        target = torch.frombuffer(view(offset_bytes, size_bytes), dtype=torch.uint8)
        for begin, end in spans(offset_bytes - self.slot_offset_bytes, size_bytes):
            target[begin:end].copy_(source[begin:end], non_blocking=True)

    def in_pieces(self) -> list[CudaPiece]:
        """Return all of it as pieces, in the order of their places."""
        whole = [
            CudaPiece(tensor, 0, tensor.numel() * tensor.element_size(), self.slot_offset_bytes + offset)
            for tensor, offset in zip(self.whole, self.offsets_bytes, strict=True)
        ]
        return sorted([*whole, *self.pieces], key=lambda piece: piece.arena_offset_bytes)


class CudaPlan:
    """Where the leaves of CUDA devices go in a slot: made once per layout and placement on devices."""

    def __init__(self, placed: Iterable[Placed], capture: StateCapture) -> None:
        """Plan the copies of these places; empty ones need none, and torch makes no tensor of an empty buffer."""
        found: dict[int, list[Placed]] = {}
        for place in placed:
            if place.size_bytes:
                found.setdefault(capture.devices[place.leaf], []).append(place)
        self._devices = [_DevicePlan(places, capture.specs) for places in found.values()]

    def at(self, leaves: Sequence[TensorLeaf], base: int, offset_bytes: int = 0) -> list[CudaBatch]:
        """Return the copies of a capture's leaves into the slot at the address `base`, one batch for each device.

        `offset_bytes`: of the slot in what the `View` shows that they will be enqueued with.
        """
        return [plan.at(leaves, base, offset_bytes) for plan in self._devices]


class _DevicePlan:
    def __init__(self, places: Sequence[Placed], specs: Sequence[LeafSpec]) -> None:
        self._whole = [place for place in places if _is_whole(place, specs[place.leaf])]
        self._cut = [place for place in places if not _is_whole(place, specs[place.leaf])]
        self._specs = [specs[place.leaf] for place in self._whole]
        self._pick = picker([place.leaf for place in self._whole])
        self._first = places[0].leaf
        self._size_bytes = sum(place.size_bytes for place in places)
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._offsets = [place.slot_offset_bytes for place in self._whole]

    def at(self, leaves: Sequence[TensorLeaf], base: int, offset_bytes: int) -> CudaBatch:
        return CudaBatch(
            device=leaves[self._first].tensor.device,
            size_bytes=self._size_bytes,
            pieces=[
                CudaPiece(
                    leaves[place.leaf].tensor,
                    place.offset_in_leaf_bytes,
                    place.size_bytes,
                    offset_bytes + place.slot_offset_bytes,
                )
                for place in self._cut
            ],
            whole=[leaf.tensor for leaf in self._pick(leaves)],
            targets=partial(self._targets_at, base, offset_bytes),
            offsets_bytes=self._offsets,
            slot_offset_bytes=offset_bytes,
        )

    def _targets_at(self, base: int, offset_bytes: int, view: View) -> Sequence[torch.Tensor]:
        """The same slots come again and again; those of an arena that is gone are forgotten some time, and own none."""
        if base not in self._targets:
            if len(self._targets) == SLOTS_KNOWN_MAX:
                self._targets.clear()
            first = min(self._offsets)
            last = max(place.slot_offset_bytes + place.size_bytes for place in self._whole)
            slot = view(offset_bytes + first, last - first)
            self._targets[base] = [
                slot_view(slot, offset - first, spec)
                for offset, spec in zip(self._offsets, self._specs, strict=True)
            ]
        return self._targets[base]


def _is_whole(place: Placed, spec: LeafSpec) -> bool:
    return (
        place.size_bytes == spec.size_bytes
        and place.slot_offset_bytes % SPAN_BYTES + place.size_bytes <= SPAN_BYTES
        and spec.is_contiguous
        and place.slot_offset_bytes % itemsize_bytes(spec.dtype) == 0
    )


def spans(offset_bytes: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut bytes [offset, +size) of a slot where its spans end; yield begin and end of each part, from 0 on."""
    begin = 0
    while begin < size_bytes:
        end = min(size_bytes, begin + SPAN_BYTES - (offset_bytes + begin) % SPAN_BYTES)
        yield begin, end
        begin = end


def octets(piece: CudaPiece) -> torch.Tensor:
    """Return a piece's bytes on its device."""
    flat = torch.as_strided(piece.tensor.detach(), (piece.tensor.numel(),), (1,)).view(torch.uint8)
    return flat[piece.offset_in_leaf_bytes : piece.offset_in_leaf_bytes + piece.size_bytes]
