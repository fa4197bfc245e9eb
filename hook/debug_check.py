"""The debug mode: does a slot hold what the tensors held at the boundary, whoever wrote to them since, and however?"""

from collections.abc import Callable, Iterable, Sequence

import torch

from ..checkpoint.checksum import block_checksums
from ..core.errors import UsageError
from .copy_plan import Placed
from .state_protocol import TensorLeaf
from .tensor_bytes import pinned


class SlotCheck:
    """Checksums of the lazy pieces, taken at the boundary on the training thread, which waits for them."""

    def __init__(self, leaves: Sequence[TensorLeaf], lazy: Iterable[Placed]) -> None:
        """Read all pieces; CUDA tensors are brought over for it."""
        self._expected = [(leaves[place.leaf].spec.name, place, _checksums(leaves, place)) for place in lazy]

    def compare(self, view: Callable[[int, int], memoryview], segment: int | None = None) -> None:
        """Return if the slot holds the same bytes, in one segment or in all; `view` shows so many from an offset.

        Raises:
            UsageError: a leaf differs; the message names it.
        """
        for name, place, expected in self._expected:
            if segment not in (None, place.segment):
                continue
            with view(place.slot_offset_bytes, place.size_bytes) as found:  # else it keeps the arena mapped
                is_same = block_checksums(found, place.size_bytes) == expected
            if not is_same:
                raise UsageError(
                    f"{name} was written to while its snapshot was being copied, though its version did not move; "
                    "the snapshot was dropped",
                    hint="wrap code that writes to it outside an optimizer in `with run.mutating():`",
                )


def _checksums(leaves: Sequence[TensorLeaf], place: Placed) -> tuple[int, ...]:
    tensor = leaves[place.leaf].tensor.detach()
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,)).cpu()
    with pinned(flat) as octets:
        piece = octets[place.offset_in_leaf_bytes :][: place.size_bytes]
        return block_checksums(piece, place.size_bytes)
