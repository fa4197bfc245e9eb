"""A verified checkpoint of one rank as the hook reads it: leaves from a buffer, values from the manifest."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import torch

from ..checkpoint.leaf import LeafSpec
from ..checkpoint.manifest_types import Manifest, Piece, SegmentRecord
from ..checkpoint.segment_format import header_size_of, parse_header
from ..checkpoint.shard_rules_plan import is_dense
from ..checkpoint.value_format import load_values
from ..core.errors import CorruptDataError, IncompleteError, StateMismatchError
from .tensor_bytes import BufferPin, byte_range, copy_bits, describe, memmove, torch_dtype


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive bytes of a leaf and where they lie in the buffer."""

    begin: int
    end: int
    buffer_offset: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Which bytes of which leaf a name stands for: all of it, or an alias's part."""

    spec: LeafSpec
    holder: str
    offset_bytes: int


class StoredState:
    """The leaves and values of one rank's shard of a checkpoint.

    The buffer holds whole segment files whose checksums were verified; it may be read-only, and it cannot be closed
    before `close()`. Every offset is checked again before memory is read. Not for several threads at once.
    """

    def __init__(self, manifest: Manifest, buffer: memoryview, segment_offsets: Mapping[int, int]) -> None:
        """Read the segment headers of a verified checkpoint.

        Args:
            manifest: of this rank.
            buffer: a C-contiguous readable buffer (the slot's mapping, or whatever the files were read into).
            segment_offsets: number of each segment -> offset in the buffer of its file's first byte.

        Raises:
            CorruptDataError: a header, a piece or the values do not fit the manifest.
            IncompleteError: a segment has no place in the buffer.
        """
        self.manifest = manifest
        self._documents = _documents(manifest.values)
        entries = {
            record.segment: _entry_offsets(record, buffer, segment_offsets) for record in manifest.segments
        }
        self._runs = _runs(manifest, entries)
        self._places = {leaf.name: _Place(_dense(leaf), leaf.name, 0) for leaf in manifest.leaves}
        self._places.update(_alias_places(manifest))
        self._pin: BufferPin = BufferPin(buffer)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that the checkpoint has."""
        return tuple(self._documents)

    def values(self, component: str) -> object:
        """Return the JSON document of a component. Raises StateMismatchError when the checkpoint has none of it."""
        if component not in self._documents:
            raise StateMismatchError(
                f"checkpoint {self.manifest.checkpoint} has no state of {component!r}",
                hint=f"it has {', '.join(self._documents) or 'none at all'}: attach the same objects",
            )
        return self._documents[component]

    def __contains__(self, name: str) -> bool:
        """Tell whether a leaf or alias of this name was stored."""
        return name in self._places

    def names(self, prefix: str) -> list[str]:
        """Return the names of the leaves and aliases that begin with `prefix`, leaves first."""
        return [name for name in self._places if name.startswith(prefix)]

    def spec(self, name: str) -> LeafSpec:
        """Return what a leaf or alias looks like. Raises StateMismatchError when there is none of that name."""
        return self._place(name).spec

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the dtype and shape of a leaf, so that `copy_to` may write into it."""
        spec = self._place(name).spec
        plain = tensor.layout is torch.strided
        return plain and tuple(tensor.shape) == spec.shape and tensor.dtype == torch_dtype(spec.dtype)

    def copy_to(self, name: str, tensor: torch.Tensor) -> None:
        """Write a leaf into an existing tensor's memory, bit for bit.

        Raises:
            StateMismatchError: no such leaf, or another dtype or shape.
        """
        place = self._place(name)
        spec = place.spec
        if not self.fits(name, tensor):
            raise StateMismatchError(
                f"{name} is {spec.dtype} {list(spec.shape)} in the checkpoint,"
                f" {str(tensor.dtype)[6:]} {list(tensor.shape)} here",
                hint="build the objects as they were when the checkpoint was made",
            )
        if _same_memory_order(tensor, spec):
            self._read(place, byte_range(tensor)[0])
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return
        copy_bits(self.tensor(name), to=tensor)

    def tensor(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Return a new tensor with the stored bytes, dtype, shape and strides, on the CPU or `device`.

        Raises:
            StateMismatchError: no such leaf.
        """
        place = self._place(name)
        spec = place.spec
        made = torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device="cpu")
        self._read(place, made.data_ptr())
        return made if device is None else made.to(device)

    def holder_of(self, name: str) -> tuple[str, int]:
        """Return (leaf, offset in bytes) of the bytes that a name stands for; a leaf holds its own at 0."""
        place = self._place(name)
        return place.holder, place.offset_bytes

    def holder_bytes(self, holder: str) -> torch.Tensor:
        """Return all bytes of a leaf as a new CPU tensor of uint8."""
        place = self._place(holder)
        made = torch.empty(place.spec.size_bytes, dtype=torch.uint8, device="cpu")
        self._read(place, made.data_ptr())
        return made

    def close(self) -> None:
        """Let the buffer go; only `values`, `names` and `spec` work afterwards."""
        self._pin.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise StateMismatchError(
                f"checkpoint {self.manifest.checkpoint} has no leaf {name!r}",
                hint="build the objects as they were when the checkpoint was made",
            )
        return place

    def _read(self, place: _Place, to_address: int) -> None:
        """Copy the bytes of a place to consecutive memory."""
        begin, end = place.offset_bytes, place.offset_bytes + place.spec.size_bytes
        if begin == end:
            return
        runs = self._runs[place.holder]
        for run in runs[bisect_right(runs, begin, key=lambda run: run.begin) - 1 :]:
            if run.begin >= end:
                break
            first, last = max(begin, run.begin), min(end, run.end)
            source = run.buffer_offset + first - run.begin
            if source + last - first > self._pin.size_bytes:
                raise CorruptDataError(f"leaf {place.holder!r} lies outside of the buffer, or it was closed")
            memmove(to_address + first - begin, self._pin.address + source, last - first)


class TensorMaker:
    """Makes new tensors from a stored state; those that shared memory when saved share it again."""

    def __init__(self, stored: StoredState) -> None:
        """Make a family of tensors; sharing is kept among the tensors of one maker and device."""
        self._stored = stored
        self._shared = {alias.of for alias in stored.manifest.aliases}
        self._bytes: dict[tuple[str, torch.device], torch.Tensor] = {}

    def make(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a new tensor with the stored bytes, dtype, shape and strides."""
        holder, offset_bytes = self._stored.holder_of(name)
        spec = self._stored.spec(name)
        dtype = torch_dtype(spec.dtype)
        if holder not in self._shared or offset_bytes % dtype.itemsize or not spec.size_bytes:
            return self._stored.tensor(name, device)
        key = (holder, device)
        if key not in self._bytes:
            self._bytes[key] = self._stored.holder_bytes(holder).to(device)
        part = self._bytes[key][offset_bytes : offset_bytes + spec.size_bytes].view(dtype)
        return part.as_strided(spec.shape, spec.strides)


def _documents(values: bytes) -> dict[str, object]:
    documents = load_values(values)
    if not isinstance(documents, dict):
        raise CorruptDataError("the values of the checkpoint are not one document per component")
    return cast(dict[str, object], documents)


def _entry_offsets(
    record: SegmentRecord, buffer: memoryview, segment_offsets: Mapping[int, int]
) -> dict[str, _Run]:
    """Return where each entry of a segment lies in the buffer, by its own header."""
    offset = segment_offsets.get(record.segment)
    if offset is None:
        raise IncompleteError(f"segment {record.segment} of the checkpoint was not read")
    data = memoryview(buffer).cast("B")[offset : offset + record.file_size_bytes]
    if offset < 0 or len(data) != record.file_size_bytes:
        raise CorruptDataError(f"segment {record.segment} ends outside of the buffer")
    header_bytes = header_size_of(bytes(data[:8]), record.file_size_bytes)
    _, entries = parse_header(bytes(data[:header_bytes]), record.file_size_bytes)
    begin = offset + header_bytes
    return {entry.key: _Run(0, entry.end - entry.begin, begin + entry.begin) for entry in entries}


def _runs(manifest: Manifest, entries: Mapping[int, Mapping[str, _Run]]) -> dict[str, list[_Run]]:
    """Return the runs of each leaf in order, after checking that they cover it exactly."""
    runs: dict[str, list[_Run]] = {leaf.name: [] for leaf in manifest.leaves}
    for piece in sorted(manifest.pieces, key=lambda piece: piece.offset_in_leaf_bytes):
        if piece.leaf not in runs:
            raise CorruptDataError(f"piece {piece.key!r} belongs to no leaf")
        runs[piece.leaf].append(_run(piece, entries))
    for leaf in manifest.leaves:
        end = 0
        for run in runs[leaf.name]:
            if run.begin != end:
                raise CorruptDataError(f"leaf {leaf.name!r} has no piece at byte {end}")
            end = run.end
        if end != leaf.size_bytes:
            raise CorruptDataError(f"the pieces of leaf {leaf.name!r} hold {end} of {leaf.size_bytes} bytes")
    return runs


def _run(piece: Piece, entries: Mapping[int, Mapping[str, _Run]]) -> _Run:
    entry = entries.get(piece.segment, {}).get(piece.key)
    if entry is None or entry.end != piece.size_bytes:
        raise CorruptDataError(
            f"segment {piece.segment} has no entry {piece.key!r} of {piece.size_bytes} bytes"
        )
    begin = piece.offset_in_leaf_bytes
    return _Run(begin, begin + piece.size_bytes, entry.buffer_offset)


def _alias_places(manifest: Manifest) -> Iterator[tuple[str, _Place]]:
    sizes = {leaf.name: leaf for leaf in manifest.leaves}
    for alias in manifest.aliases:
        holder = sizes.get(alias.of)
        if holder is None:
            raise CorruptDataError(f"alias {alias.name!r} stands for the unknown leaf {alias.of!r}")
        spec = LeafSpec(
            name=alias.name,
            dtype=alias.dtype,
            shape=alias.shape,
            strides=alias.strides,
            replicas=holder.replicas,
            global_shape=alias.shape,
            global_offset=(0,) * len(alias.shape),
        )
        if alias.offset_bytes < 0 or alias.offset_bytes + spec.size_bytes > holder.size_bytes:
            raise CorruptDataError(f"alias {alias.name!r} reaches beyond leaf {alias.of!r}")
        yield alias.name, _Place(_dense(spec), alias.of, alias.offset_bytes)


def _dense(spec: LeafSpec) -> LeafSpec:
    """The spec again; bytes are moved to memory of exactly this shape and strides, which must have room for them."""
    if not is_dense(spec.shape, spec.strides):
        raise CorruptDataError(f"leaf {spec.name!r} has the strides {list(spec.strides)}, which leave holes")
    return spec


def _same_memory_order(tensor: torch.Tensor, spec: LeafSpec) -> bool:
    """Tell whether the stored bytes are the tensor's memory as it lies, so that a memmove is the whole copy."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    return spec.size_bytes == 0 or describe(spec.name, tensor).strides == spec.strides
