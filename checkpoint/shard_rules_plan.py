"""What must hold of leaves, pieces and segments before anybody believes a draft or a manifest.

A draft comes from another process and a manifest from a disk: both are checked here, by the same rules, before a byte
is written or handed out. Each violation is a CorruptDataError that names it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..core.errors import CorruptDataError
from ..core.ids import CheckpointId
from .dtype_format import itemsize_bytes, safetensors_dtype
from .leaf import Alias, LeafSpec, contiguous_strides
from .manifest_types import (
    BLOCK_SIZE_BYTES,
    HEADER_ALIGNMENT_BYTES,
    Draft,
    Manifest,
    PlannedPiece,
    SegmentEntry,
    SegmentPlan,
    SegmentRecord,
)
from .segment_format import align_up, check_entries, header_size_bytes, item_size_bytes

SEGMENT_COUNT_MAX = 4096
"""All files of a shard are open while it is written."""


def check_draft(draft: Draft, slot_size_bytes: int, *, is_ring: bool = False) -> None:
    """Return if everything that the draft says holds together and lies inside a slot of this size.

    In the slot of a ring several segments may have one place, in turn.

    Raises:
        CorruptDataError: a rule does not hold; the message names leaf, piece or segment.
    """
    check_rank(draft.checkpoint, draft.parent, draft.rank, draft.world_size)
    check_segment_plans(draft.segments, slot_size_bytes, is_ring=is_ring)
    leaves = check_leaves(draft.leaves, draft.aliases)
    _check_pieces_fill_entries(draft.pieces, leaves, draft.segments)
    check_pieces_cover(draft.pieces, leaves)


def check_manifest(manifest: Manifest) -> None:
    """Return if everything that the manifest says holds together.

    Raises:
        CorruptDataError: a rule does not hold; the message names leaf, piece or segment.
    """
    check_rank(manifest.checkpoint, manifest.parent, manifest.rank, manifest.world_size)
    records = check_records(manifest.segments)
    leaves = check_leaves(manifest.leaves, manifest.aliases)
    for piece in manifest.pieces:
        record = records.get((piece.generation, piece.segment))
        if record is None or record.device_id != piece.device_id:
            raise CorruptDataError(
                f"piece {piece.key!r} lies in segment {piece.segment} of generation {piece.generation} on device"
                f" {piece.device_id}, which the manifest does not list"
            )
        if piece.size_bytes > record.file_size_bytes - record.header_size_bytes:
            raise CorruptDataError(f"piece {piece.key!r} is longer than segment {piece.segment}")
    check_pieces_cover(manifest.pieces, leaves)


def check_rank(checkpoint: CheckpointId, parent: CheckpointId | None, rank: int, world_size: int) -> None:
    """Return if rank < world_size and the parent is older than the checkpoint; else CorruptDataError."""
    if not 0 <= rank < world_size:
        raise CorruptDataError(
            f"rank {rank} of checkpoint {checkpoint} is not below its world size {world_size}"
        )
    if parent is not None and parent >= checkpoint:
        raise CorruptDataError(f"checkpoint {checkpoint} names {parent} as its parent, which is not older")


def check_leaves(leaves: Sequence[LeafSpec], aliases: Sequence[Alias]) -> dict[str, LeafSpec]:
    """Return the leaves by name, after checking names, density and that each alias lies inside its leaf."""
    by_name: dict[str, LeafSpec] = {}
    for leaf in leaves:
        _check_name(leaf.name)
        if leaf.name in by_name:
            raise CorruptDataError(f"two leaves are named {leaf.name!r}")
        if not is_dense(leaf.shape, leaf.strides):
            raise CorruptDataError(
                f"leaf {leaf.name!r} of shape {list(leaf.shape)} and strides {list(leaf.strides)} is not dense"
            )
        by_name[leaf.name] = leaf
    taken = set(by_name)
    for alias in aliases:
        _check_name(alias.name)
        if alias.name in taken:
            raise CorruptDataError(f"two leaves are named {alias.name!r}")
        taken.add(alias.name)
        _check_alias(alias, by_name)
    return by_name


def _check_name(name: str) -> None:
    if not name or name == "__metadata__":
        raise CorruptDataError(f"a leaf cannot be named {name!r}")


def _check_alias(alias: Alias, leaves: Mapping[str, LeafSpec]) -> None:
    of = leaves.get(alias.of)
    if of is None:
        raise CorruptDataError(f"alias {alias.name!r} stands for the unknown leaf {alias.of!r}")
    if len(alias.shape) != len(alias.strides):
        raise CorruptDataError(f"alias {alias.name!r}: shape and strides differ in length")
    extent = 0
    if math.prod(alias.shape):
        last = sum((size - 1) * stride for size, stride in zip(alias.shape, alias.strides, strict=True))
        extent = (last + 1) * itemsize_bytes(alias.dtype)
    if alias.offset_bytes + extent > of.size_bytes:
        raise CorruptDataError(
            f"alias {alias.name!r} reaches byte {alias.offset_bytes + extent} of leaf {alias.of!r},"
            f" which has {of.size_bytes}"
        )


def is_dense(shape: tuple[int, ...], strides: Sequence[int]) -> bool:
    """Tell whether the elements fill consecutive memory without holes or overlap, in whatever order of dimensions."""
    if strides == contiguous_strides(shape) or 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def check_pieces_cover(pieces: Iterable[PlannedPiece], leaves: Mapping[str, LeafSpec]) -> None:
    """Return if the pieces cover each leaf exactly once, and each is the whole leaf or whole rows of it."""
    by_leaf: defaultdict[str, list[PlannedPiece]] = defaultdict(list)
    for piece in pieces:
        if piece.leaf not in leaves:
            raise CorruptDataError(f"piece {piece.key!r} belongs to the unknown leaf {piece.leaf!r}")
        by_leaf[piece.leaf].append(piece)
    for name, leaf in leaves.items():
        end = 0
        for piece in sorted(by_leaf[name], key=lambda piece: piece.offset_in_leaf_bytes):
            if piece.offset_in_leaf_bytes != end or piece.size_bytes < 0:
                raise CorruptDataError(
                    f"leaf {name!r}: piece {piece.key!r} begins at byte {piece.offset_in_leaf_bytes},"
                    f" expected {end}"
                )
            _check_key(piece, leaf)
            end += piece.size_bytes
        if end != leaf.size_bytes:
            raise CorruptDataError(f"leaf {name!r} has {leaf.size_bytes} bytes, its pieces have {end}")


def _check_key(piece: PlannedPiece, leaf: LeafSpec) -> None:
    """A whole leaf is stored under its name; rows of one under `<name>@<start>:<stop>`."""
    if piece.size_bytes == leaf.size_bytes:
        expected = leaf.name
    elif not leaf.size_bytes:
        raise CorruptDataError(f"leaf {leaf.name!r} is empty, its piece {piece.key!r} is not")
    elif not leaf.is_contiguous or not leaf.shape:
        raise CorruptDataError(f"leaf {leaf.name!r} is not in row-major order and cannot be stored in pieces")
    else:
        row_bytes = leaf.size_bytes // leaf.shape[0]
        start, rest = divmod(piece.offset_in_leaf_bytes, row_bytes)
        rows, more = divmod(piece.size_bytes, row_bytes)
        if rest or more or not rows:
            raise CorruptDataError(f"piece {piece.key!r} does not hold whole rows of {row_bytes} bytes")
        expected = f"{leaf.name}@{start}:{start + rows}"
    if piece.key != expected:
        raise CorruptDataError(f"the piece {expected!r} is stored under the key {piece.key!r}")


def check_segment_plans(
    segments: Sequence[SegmentPlan], slot_size_bytes: int, *, is_ring: bool = False
) -> None:
    """Return if the segments lie in the slot without overlap and each header has room for exactly its entries."""
    if len(segments) > SEGMENT_COUNT_MAX:
        raise CorruptDataError(
            f"a shard of {len(segments)} segments is over the limit of {SEGMENT_COUNT_MAX}"
        )
    for number, plan in enumerate(segments):
        if plan.segment != number:
            raise CorruptDataError(f"segment {plan.segment} stands at place {number}")
        _check_plan_entries(plan)
    _check_places(_largest_of_each_place(segments) if is_ring else segments, slot_size_bytes)


def _largest_of_each_place(segments: Iterable[SegmentPlan]) -> list[SegmentPlan]:
    """Return the places of a ring as the largest segment that has each, in the order of the slot."""
    largest: dict[int, SegmentPlan] = {}
    for plan in segments:
        known = largest.get(plan.slot_offset_bytes, plan)
        largest[plan.slot_offset_bytes] = max(known, plan, key=lambda each: each.file_size_bytes)
    return [largest[offset] for offset in sorted(largest)]


def _check_places(plans: Iterable[SegmentPlan], slot_size_bytes: int) -> None:
    end = 0
    for plan in plans:
        if plan.slot_offset_bytes % HEADER_ALIGNMENT_BYTES or plan.slot_offset_bytes < end:
            raise CorruptDataError(
                f"segment {plan.segment} begins at byte {plan.slot_offset_bytes} of the slot: not a multiple of"
                f" {HEADER_ALIGNMENT_BYTES}, or inside the one before, which ends at {end}"
            )
        end = plan.slot_offset_bytes + align_up(plan.file_size_bytes)
        if end > slot_size_bytes:
            raise CorruptDataError(
                f"segment {plan.segment} ends at byte {end} of a slot of {slot_size_bytes}"
            )


def _check_plan_entries(plan: SegmentPlan) -> None:
    data_bytes = check_entries(plan.entries)
    if data_bytes != plan.data_size_bytes:
        raise CorruptDataError(
            f"segment {plan.segment} has {plan.data_size_bytes} bytes of data, its entries {data_bytes}"
        )
    for entry in plan.entries:
        if entry.end > entry.begin and entry.begin % item_size_bytes(entry.dtype):
            raise CorruptDataError(f"entry {entry.key!r} is not aligned to its element size")
    try:
        header_bytes = header_size_bytes(plan.entries)
    except ValueError as exc:
        raise CorruptDataError(f"segment {plan.segment}: {exc}") from exc
    if header_bytes != plan.header_size_bytes:
        raise CorruptDataError(
            f"the header of segment {plan.segment} takes {header_bytes} bytes, the layout has {plan.header_size_bytes}"
        )


def _check_pieces_fill_entries(
    pieces: Iterable[PlannedPiece], leaves: Mapping[str, LeafSpec], segments: Sequence[SegmentPlan]
) -> None:
    """Each piece is one entry of its segment, and no entry is left over."""
    entries = {(plan.segment, entry.key): entry for plan in segments for entry in plan.entries}
    for piece in pieces:
        entry = entries.pop((piece.segment, piece.key), None)
        if entry is None:
            raise CorruptDataError(f"segment {piece.segment} has no entry of its own for piece {piece.key!r}")
        if entry.end - entry.begin != piece.size_bytes:
            raise CorruptDataError(
                f"piece {piece.key!r} has {piece.size_bytes} bytes, its entry {entry.end - entry.begin}"
            )
        _check_entry_dtype(entry, leaves.get(piece.leaf))
    if entries:
        segment, key = next(iter(entries))
        raise CorruptDataError(f"entry {key!r} of segment {segment} belongs to no leaf")


def _check_entry_dtype(entry: SegmentEntry, leaf: LeafSpec | None) -> None:
    if leaf is None:
        raise CorruptDataError(f"entry {entry.key!r} belongs to an unknown leaf")
    if entry.dtype != (safetensors_dtype(leaf.dtype) or "U8"):
        raise CorruptDataError(f"entry {entry.key!r} is written as {entry.dtype}, its leaf is {leaf.dtype}")


def check_records(records: Sequence[SegmentRecord]) -> dict[tuple[str, int], SegmentRecord]:
    """Return the records by (generation, segment), after checking that sizes and block checksums fit each other."""
    found: dict[tuple[str, int], SegmentRecord] = {}
    for record in records:
        key = (record.generation, record.segment)
        if key in found:
            raise CorruptDataError(
                f"segment {record.segment} of generation {record.generation} is listed twice"
            )
        if record.header_size_bytes % HEADER_ALIGNMENT_BYTES or not (
            0 < record.header_size_bytes <= record.file_size_bytes
        ):
            raise CorruptDataError(
                f"segment {record.segment} has a header of {record.header_size_bytes} bytes"
                f" in a file of {record.file_size_bytes}"
            )
        blocks = -(-record.file_size_bytes // BLOCK_SIZE_BYTES)
        if len(record.block_checksums) != blocks:
            raise CorruptDataError(
                f"segment {record.segment} of {record.file_size_bytes} bytes has"
                f" {len(record.block_checksums)} block checksums, expected {blocks}"
            )
        found[key] = record
    return found
