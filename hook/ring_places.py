"""Where the leaves of a state go that is larger than its slot: through windows, and what must not wait beside them."""

from ..checkpoint.layout_plan import Layout
from ..checkpoint.ring_layout_plan import least_ring_bytes, plan_ring
from .capture import StateCapture
from .copy_plan import CopyPlan, Moves, Placed
from .cuda_batch import CudaPlan
from .slot_places import Places

STAGED_ALIGNMENT_BYTES = 64


class Staging:
    """Room behind the windows for what is copied at the boundary: its windows come later."""

    def __init__(self, capture: StateCapture) -> None:
        """Give each eager leaf its place, from 0 on."""
        self.offsets_bytes: dict[int, int] = {}
        self.size_bytes = 0
        for index, at_once in enumerate(capture.at_once):
            if at_once:
                self.offsets_bytes[index] = self.size_bytes
                size_bytes = capture.specs[index].size_bytes
                self.size_bytes += -(-size_bytes // STAGED_ALIGNMENT_BYTES) * STAGED_ALIGNMENT_BYTES


def ring_size_bytes(layout: Layout, capture: StateCapture) -> int:
    """Return the size of the smallest ring that a state streams through."""
    return least_ring_bytes(layout, Staging(capture).size_bytes)


class RingPlaces(Places):
    """Places in a ring: eager leaves are staged, then all go to their windows, segment by segment."""

    def __init__(
        self, whole: Layout, capture: StateCapture, *, slot_size_bytes: int, device_count: int
    ) -> None:
        """Plan all copies through a slot of this size.

        Raises:
            MemoryRefusedError: the slot is too small for that.
        """
        staging = Staging(capture)
        ring = plan_ring(
            whole,
            slot_size_bytes=slot_size_bytes,
            staged_bytes=staging.size_bytes,
            device_count=device_count,
        )
        super().__init__(ring, capture)
        self._whole = whole
        self._staged = {leaf: ring.slot_size_bytes + at for leaf, at in staging.offsets_bytes.items()}
        on_cuda = [device >= 0 for device in capture.devices]
        staged = [
            Placed(leaf, 0, whole.leaves[leaf].size_bytes, offset, segment=0)
            for leaf, offset in self._staged.items()
        ]
        self.eager = CopyPlan(place for place in staged if not on_cuda[place.leaf])
        on_devices = [place for place in staged if on_cuda[place.leaf]]
        self.cuda_eager, self.cuda_lazy = CudaPlan(on_devices, capture), CudaPlan((), capture)
        self.cuda_segments = {place.segment for place in on_devices}
        late: dict[int, list[Placed]] = {}
        for place in self.placed:
            if on_cuda[place.leaf] and place.leaf not in self._staged:
                late.setdefault(place.segment, []).append(place)
        self.cuda_windows = {segment: CudaPlan(places, capture) for segment, places in late.items()}
        """By segment: these have no moves, and are copied by `CudaWindows`."""
        self.lazy = CopyPlan(
            place for place in self.placed if not on_cuda[place.leaf] or place.leaf in self._staged
        )

    def lazy_moves(self, addresses: tuple[int, ...], base: int) -> tuple[Moves, ...]:
        """Return the moves of every segment, even of none; eager leaves come from where they are staged."""
        sources = list(addresses)
        for leaf, offset in self._staged.items():
            sources[leaf] = base + offset
        made = {moves.segment: moves for moves in self.lazy.at(tuple(sources), base)}
        return tuple(
            made.get(segment, Moves(segment, (), ())) for segment in range(len(self.layout.segments))
        )

    def serve(self, layout: Layout, capture: StateCapture) -> bool:
        """Tell whether they are right for a capture of a state whose whole layout is `layout`."""
        return self._whole is layout and super().serve(self.layout, capture)
