"""Leaves that arrive piece by piece: straight into the tensors that claimed them, else into memory of their own."""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import torch
from msgspec import Struct

from ..checkpoint.leaf_runs_plan import LeafRun
from ..checkpoint.manifest_types import Manifest
from ..core.errors import IncompleteError
from .new_memory import NewMemory
from .tensor_bytes import byte_range, copy_bytes

_COPY_THREADS_MAX = 4
"""Copying 5 GB/s each: enough for the drives of a node, and few beside the other ranks' of it."""


def copy_thread_count() -> int:
    """Return how many threads take the chunks of a shard."""
    return min(_COPY_THREADS_MAX, os.cpu_count() or 1)


class _Extent(Struct, frozen=True, gc=False):
    """Bytes [begin, end) of a segment file, and where in a leaf they belong."""

    begin: int
    end: int
    leaf: str
    offset_in_leaf_bytes: int


class ReceivedLeaves:
    """The `LeafBytes` of a shard whose chunks come in any order, from several threads, in one pass or more.

    A pass is `expect`, every chunk by `receive`, `check_received`; a leaf can be read once its pass is over.
    """

    def __init__(
        self,
        manifest: Manifest,
        runs: Mapping[str, Sequence[LeafRun]],
        memory: NewMemory | None = None,
    ) -> None:
        """Plan where each byte goes, by the runs of each leaf (`leaf_runs`); `memory` is for what nobody claims."""
        self._sizes = {leaf.name: leaf.size_bytes for leaf in manifest.leaves}
        self._holders = {name: name for name in self._sizes} | {
            alias.name: alias.of for alias in manifest.aliases
        }
        self._extents = _extents(manifest, runs)
        self._claimed: dict[str, torch.Tensor] = {}
        self._storages: set[int] = set()
        self._memory = memory or NewMemory({leaf.name: leaf for leaf in manifest.leaves})
        self._handed_over: set[str] = set()
        self._expected: set[str] = set()
        self._missing_bytes = 0
        self._complete: set[str] = set()
        self._lock = threading.Lock()

    @property
    def has_claims(self) -> bool:
        """Tell whether anything arrives straight in a tensor of the caller."""
        return bool(self._claimed)

    def claim(self, leaf: str, tensor: torch.Tensor) -> None:
        """Let a leaf that is still to come arrive in this CPU tensor, whose memory has its size and order.

        Of several in one storage only the first: tensors that overlap here and did not when they were saved must
        be written in the order of their owners, which come later.
        """
        storage = tensor.untyped_storage().data_ptr()
        is_open = leaf not in self._complete and leaf not in self._claimed
        if self._sizes[leaf] and is_open and storage not in self._storages:
            self._storages.add(storage)
            self._claimed[leaf] = tensor

    def has(self, leaf: str) -> bool:
        """Tell whether a leaf can be read."""
        return leaf in self._complete

    def expect(
        self, components: Sequence[str] | None = None, *, claimed_only: bool = False
    ) -> list[tuple[int, int, int]]:
        """Begin a pass for the leaves and aliases of these components, or for all that are left; return where they lie.

        Each as (segment, begin, end) in its file. Of leaves that nobody claims `claimed_only` expects none.
        """
        known = self._claimed if claimed_only else self._holders
        wanted = known if components is None else of_components(components, known)
        self._expected = {self._holders[name] for name in wanted} - self._complete
        self._missing_bytes = sum(self._sizes[leaf] for leaf in self._expected)
        return [
            (segment, extent.begin, extent.end)
            for segment, extents in self._extents.items()
            for extent in extents
            if extent.leaf in self._expected
        ]

    def receive(self, segment: int, file_offset_bytes: int, from_address: int, size_bytes: int) -> None:
        """Copy from a chunk of a segment file what is expected to where it belongs; headers belong nowhere."""
        extents = self._extents[segment]
        end = file_offset_bytes + size_bytes
        first = max(0, bisect_right(extents, file_offset_bytes, key=lambda extent: extent.begin) - 1)
        received_bytes = 0
        for extent in extents[first:]:
            if extent.begin >= end:
                break
            begin, stop = max(extent.begin, file_offset_bytes), min(extent.end, end)
            if begin < stop and extent.leaf in self._expected:
                target = self._address(extent.leaf) + extent.offset_in_leaf_bytes + begin - extent.begin
                copy_bytes(target, from_address + begin - file_offset_bytes, stop - begin)
                received_bytes += stop - begin
        with self._lock:
            self._missing_bytes -= received_bytes

    def check_received(self) -> None:
        """End the pass. Raises IncompleteError unless every byte that was expected has come."""
        if self._missing_bytes:
            raise IncompleteError(f"{self._missing_bytes} bytes of the checkpoint were not received")
        self._complete |= self._expected
        self._expected = set()
        self._memory.stop()

    def read(self, leaf: str, begin: int, end: int, to_address: int) -> None:
        """See LeafBytes."""
        self._check_complete(leaf)
        source = self._address(leaf) + begin
        if source != to_address:
            copy_bytes(to_address, source, end - begin)

    def hand_over(self, leaf: str) -> torch.Tensor | None:
        """See LeafBytes: once for each leaf that arrived in memory of its own."""
        self._check_complete(leaf)
        if leaf in self._claimed or leaf in self._handed_over:
            return None
        self._handed_over.add(leaf)
        return self._memory.of(leaf)

    def close(self) -> None:
        """See LeafBytes."""
        self._claimed.clear()
        self._memory.close()
        self._complete.clear()

    def _check_complete(self, leaf: str) -> None:
        if leaf not in self._complete:
            raise IncompleteError(f"leaf {leaf!r} has not been received")

    def _address(self, leaf: str) -> int:
        claimed = self._claimed.get(leaf)
        return byte_range(claimed)[0] if claimed is not None else self._memory.of(leaf).data_ptr()


def of_components(components: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that belong to these components: `<component>`, or `<component>.` and more."""
    inside = tuple(f"{component}." for component in components)
    return [name for name in names if name in components or name.startswith(inside)]


def _extents(manifest: Manifest, runs_of: Mapping[str, Sequence[LeafRun]]) -> dict[int, list[_Extent]]:
    """Return the extents of each segment, in the order of the file."""
    extents: dict[int, list[_Extent]] = {record.segment: [] for record in manifest.segments}
    for leaf, runs in runs_of.items():
        for run in runs:
            if run.begin == run.end:
                continue
            end = run.file_offset_bytes + run.end - run.begin
            extents[run.segment].append(_Extent(run.file_offset_bytes, end, leaf, run.begin))
    for found in extents.values():
        found.sort(key=lambda extent: extent.begin)
    return extents
