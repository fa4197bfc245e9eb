"""Memory that leaves arrive in. What is known to be needed is mapped ahead, beside whoever still reads what goes there.

A kernel takes longer to find and clear a page than to copy one, and finds them one at a time, at their first touch.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping

import torch

from ..checkpoint.leaf import LeafSpec
from ..core import advice
from .tensor_bytes import byte_range, torch_dtype

_PAGE_BYTES = 4096
_LEAST_BYTES = 64 * 1024
"""Smaller leaves lie together, where memory is mapped already or soon is."""
_GAP_BYTES = 2 * _PAGE_BYTES
"""What an allocator keeps between two large pieces at most; of both one range is made."""
_CALL_BYTES = 4 * 1024 * 1024
"""At most this much per call, some 2 ms: so long wait `stop`, and whoever needs memory mapped meanwhile."""


class NewMemory:
    """Memory of leaves, by name; made when it is asked for or before. For several threads."""

    def __init__(self, specs: Mapping[str, LeafSpec], ahead: Iterable[str] = ()) -> None:
        """Know what each leaf looks like; begin to map the memory of those in `ahead`."""
        self._specs = specs
        self._lock = threading.Lock()
        self._stopped = False
        self._tensors = {leaf: self._new(leaf) for leaf in ahead}
        pieces = [byte_range(tensor) for tensor in self._tensors.values() if tensor.nbytes >= _LEAST_BYTES]
        self._thread = (
            threading.Thread(target=self._map, args=(pieces,), name="everstep-map") if pieces else None
        )
        if self._thread is not None:
            self._thread.start()

    def of(self, leaf: str) -> torch.Tensor:
        """Return the memory of a leaf: a tensor on the CPU that looks like it, of any content."""
        with self._lock:
            if leaf not in self._tensors:
                self._tensors[leaf] = self._new(leaf)
            return self._tensors[leaf]

    def stop(self) -> None:
        """Return when nothing more is mapped ahead."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Let go of what nobody else holds."""
        self.stop()
        self._tensors.clear()

    def _new(self, leaf: str) -> torch.Tensor:
        spec = self._specs[leaf]
        return torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device="cpu")

    def _map(self, pieces: list[tuple[int, int]]) -> None:
        for begin, end in page_ranges(pieces):
            for part in range(begin, end, _CALL_BYTES):
                size_bytes = min(_CALL_BYTES, end - part)
                # A kernel that cannot, or a hole between two pieces: they are mapped at their first touch, as ever.
                if self._stopped or not advice.madvise(part, size_bytes, advice.POPULATE_WRITE):
                    return


def page_ranges(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the whole pages that pieces of memory, each (address, bytes), lie in; neighbours as one."""
    found: tuple[int, int] | None = None
    for address, size_bytes in sorted(pieces):
        begin = address // _PAGE_BYTES * _PAGE_BYTES
        end = -(-(address + size_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        if found is not None and begin - found[1] <= _GAP_BYTES:
            found = found[0], max(found[1], end)
            continue
        if found is not None:
            yield found
        found = begin, end
    if found is not None:
        yield found
