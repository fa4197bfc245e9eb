"""Where the leaves of a capture go in a slot, and when each may be copied."""

from ..checkpoint.draft_format import DraftEncoder
from ..checkpoint.layout_plan import Layout
from .capture import StateCapture
from .copy_plan import CopyPlan, Moves, Placed
from .cuda_batch import CudaPlan


class Places:
    """Where the leaves of a layout go, and when each may be copied; made anew when one of these changes."""

    def __init__(self, layout: Layout, capture: StateCapture) -> None:
        """Plan all copies: some microseconds for each leaf, so that a boundary needs none."""
        self.layout, self._at_once, self._devices = layout, capture.at_once, capture.devices
        self.encoder = DraftEncoder()
        placed = _places(layout)
        self.placed = placed
        is_eager = capture.at_once
        on_cuda = [place for place in placed if capture.devices[place.leaf] >= 0]
        self.cuda_eager = CudaPlan((place for place in on_cuda if is_eager[place.leaf]), capture)
        self.cuda_lazy = CudaPlan((place for place in on_cuda if not is_eager[place.leaf]), capture)
        self.cuda_segments = {place.segment for place in on_cuda}
        on_host = [place for place in placed if capture.devices[place.leaf] < 0]
        self.eager = CopyPlan(place for place in on_host if is_eager[place.leaf])
        self.lazy = CopyPlan(place for place in on_host if not is_eager[place.leaf])
        eager = [place for place in placed if is_eager[place.leaf]]
        self.eager_bytes = sum(place.size_bytes for place in eager)
        largest = max(eager, key=lambda place: place.size_bytes, default=None)
        self.largest_eager_leaf = layout.leaves[largest.leaf].name if largest is not None else ""
        self.all_lazy = [place for place in placed if not is_eager[place.leaf]]

    def lazy_moves(self, addresses: tuple[int, ...], base: int) -> tuple[Moves, ...]:
        """Return the moves of what may wait, in the order of the segments."""
        return self.lazy.at(addresses, base)

    def serve(self, layout: Layout, capture: StateCapture) -> bool:
        """Tell whether they are right for a capture."""
        known, found = (self._at_once, self._devices), (capture.at_once, capture.devices)
        return (
            self.layout is layout and known == found
        )  # in tuples, so that what is the same is not looked through


def _places(layout: Layout) -> list[Placed]:
    """Return where each piece goes in a slot, in the order of the segments."""
    number = {leaf.name: index for index, leaf in enumerate(layout.leaves)}
    begins = {
        (plan.segment, entry.key): plan.slot_offset_bytes + plan.header_size_bytes + entry.begin
        for plan in layout.segments
        for entry in plan.entries
    }
    return [
        Placed(
            number[piece.leaf],
            piece.offset_in_leaf_bytes,
            piece.size_bytes,
            begins[piece.segment, piece.key],
            piece.segment,
        )
        for piece in sorted(layout.pieces, key=lambda piece: piece.segment)
    ]
