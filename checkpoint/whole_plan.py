"""Which bytes of which shard make up each tensor of a checkpoint, its ranks put together. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import IncompleteError, NotFoundError
from .leaf import LeafSpec
from .manifest_types import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor, as one rank has it: `spec` of its bytes in storage order, in a leaf that holds them."""

    rank: int
    holder: str
    """The leaf whose bytes these are; the tensor's own name unless it is an alias."""
    offset_bytes: int
    """Where they begin in the holder."""
    spec: LeafSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensor:
    """One tensor of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of all parts together."""
    parts: tuple[Part, ...]
    """One unless it is sharded; then they fill the shape without overlapping."""

    @property
    def only_part(self) -> Part | None:
        """The part that is all of it, unless there are several."""
        return self.parts[0] if len(self.parts) == 1 and self.parts[0].spec.shape == self.shape else None

    @property
    def alias_of(self) -> str:
        """The leaf that holds its bytes, if that is another one."""
        part = self.only_part
        return part.holder if part is not None and part.holder != self.name else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeState:
    """All tensors of a checkpoint, from the point of view of one rank."""

    tensors: tuple[WholeTensor, ...]
    """In the order of the ranks' manifests, leaves before aliases."""
    left_out: tuple[str, ...]
    """Tensors that other ranks have of their own under a name that this rank has, too."""


def put_together(manifests: Mapping[int, Manifest], rank: int) -> WholeState:
    """Return the tensors of all ranks' shards.

    Where a leaf's global shape is larger than its own, the parts of all ranks make one tensor. Else it is taken from
    `rank`, or from the lowest rank that has it; what others have under the same name without being replicas of it is
    left out, and said.

    Raises:
        NotFoundError: there is no such rank.
        IncompleteError: the parts of a sharded tensor do not fill it.
    """
    if rank not in manifests:
        known = ", ".join(map(str, sorted(manifests)))
        raise NotFoundError(f"there is no shard of rank {rank}", hint=f"the ranks here are {known}")
    parts: dict[str, dict[int, Part]] = {}
    for own in sorted(manifests, key=lambda number: (number != rank, number)):
        for part in _parts_of(manifests[own]):
            parts.setdefault(part.spec.name, {})[own] = part
    tensors: list[WholeTensor] = []
    left_out: list[str] = []
    for name, found in parts.items():
        first = next(iter(found.values()))
        if first.spec.shape != first.spec.global_shape:
            tensors.append(_sharded(name, list(found.values())))
            continue
        spec = first.spec
        tensors.append(WholeTensor(name=name, dtype=spec.dtype, shape=spec.shape, parts=(first,)))
        if len(found) > 1 and spec.replicas != manifests[rank].world_size:
            left_out.append(name)
    return WholeState(tensors=tuple(tensors), left_out=tuple(left_out))


def _parts_of(manifest: Manifest) -> list[Part]:
    """Return the leaves of a shard, then its aliases as parts of the leaves that hold them."""
    rank, leaves = manifest.rank, {leaf.name: leaf for leaf in manifest.leaves}
    found = [Part(rank=rank, holder=leaf.name, offset_bytes=0, spec=leaf) for leaf in manifest.leaves]
    for alias in manifest.aliases:
        holder = leaves[alias.of]
        same = (alias.shape, alias.strides, alias.dtype) == (holder.shape, holder.strides, holder.dtype)
        spec = LeafSpec(
            name=alias.name,
            dtype=alias.dtype,
            shape=alias.shape,
            strides=alias.strides,
            replicas=holder.replicas,
            global_shape=holder.global_shape if same else alias.shape,
            global_offset=holder.global_offset if same else (0,) * len(alias.shape),
        )
        found.append(Part(rank=rank, holder=alias.of, offset_bytes=alias.offset_bytes, spec=spec))
    return found


def _sharded(name: str, parts: Sequence[Part]) -> WholeTensor:
    """Return the tensor that distinct parts make; those at the same place are replicas."""
    by_place: dict[tuple[int, ...], Part] = {}
    for part in parts:
        by_place.setdefault(part.spec.global_offset, part)
    distinct = [by_place[place] for place in sorted(by_place)]
    first = distinct[0].spec
    alike = all(
        (part.spec.dtype, part.spec.global_shape) == (first.dtype, first.global_shape) for part in distinct
    )
    boxes = [(part.spec.global_offset, part.spec.shape) for part in distinct]
    if not alike or not fill(first.global_shape, boxes):
        raise IncompleteError(
            f"the {len(distinct)} parts of {name!r} that are here do not make a tensor of {first.global_shape}",
            hint="name the storage directories of all nodes",
        )
    return WholeTensor(name=name, dtype=first.dtype, shape=first.global_shape, parts=tuple(distinct))


def fill(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Tell whether boxes (offsets, sizes) fill a shape exactly: none reaches out of it, no two share an element."""
    spans: list[list[tuple[int, int]]] = []
    volume = 0
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or min((*offsets, *sizes), default=0) < 0:
            return False
        box = [(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
        if any(end > most for (_, end), most in zip(box, shape, strict=True)):
            return False
        if math.prod(sizes):
            volume += math.prod(sizes)
            spans.append(box)
    if volume != math.prod(shape):
        return False
    return not any(
        all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True))
        for index, one in enumerate(spans)
        for other in spans[:index]
    )
