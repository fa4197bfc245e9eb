"""The parts that manifests and drafts are made of, as JSON documents: leaves, pieces, aliases, segments, values."""

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..core.errors import CorruptDataError, StateTypeError
from ..core.ids import CheckpointId
from .dtype_format import itemsize_bytes
from .leaf import NAME_LENGTH_MAX, Alias, LeafSpec
from .manifest_types import Piece, PlannedPiece, SegmentEntry, SegmentPlan, SegmentRecord

_P = TypeVar("_P", bound=PlannedPiece)

_ENCODER = msgspec.json.Encoder()

MANIFEST_SIZE_BYTES_MAX = 64 * 1024 * 1024
_DIMENSIONS_MAX = 64
"""As in torch."""

Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Sizes = Annotated[tuple[Count, ...], Meta(max_length=_DIMENSIONS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
_Key = Annotated[str, Meta(min_length=1, max_length=4160)]
_Checksums = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})*\Z")]
Time = Annotated[float, Meta(ge=0, le=1e18)]
Point = tuple[Positive, Count]


class PlannedPieceDoc(Struct, forbid_unknown_fields=True, gc=False):
    segment: Count
    key: _Key
    offset_in_leaf: Count
    size: Count


class PieceDoc(Struct, forbid_unknown_fields=True, gc=False):
    device_id: str
    """As `generation` one of a segment's, which `check_manifest` holds it to: looked at once there, not per piece."""
    segment: Count
    key: _Key
    offset_in_leaf: Count
    size: Count
    generation: str


class _LeafFacts(Struct, forbid_unknown_fields=True, gc=False):
    name: Name
    dtype: str
    shape: _Sizes
    strides: _Sizes
    global_shape: _Sizes
    global_offset: _Sizes
    replicas: Positive


class DraftLeafDoc(_LeafFacts, forbid_unknown_fields=True, gc=False):
    pieces: tuple[PlannedPieceDoc, ...]


class LeafDoc(_LeafFacts, forbid_unknown_fields=True, gc=False):
    pieces: tuple[PieceDoc, ...]


class AliasDoc(Struct, forbid_unknown_fields=True, gc=False):
    name: Name
    of: Name
    offset: Count
    dtype: str
    shape: _Sizes
    strides: _Sizes


class RecordDoc(Struct, forbid_unknown_fields=True, gc=False):
    segment: Count
    device_id: Id
    generation: Id
    file_size: Count
    header_size: Count
    dio_alignment: Count
    xxh3: _Checksums
    """16 hex digits (big-endian) for each 4 MiB block, in order; a JSON number would lose bits in other languages."""


class _EntryDoc(Struct, forbid_unknown_fields=True, gc=False):
    key: _Key
    dtype: str
    shape: _Sizes
    begin: Count
    end: Count


class PlanDoc(Struct, forbid_unknown_fields=True, gc=False):
    segment: Count
    slot_offset: Count
    header_size: Count
    data_size: Count
    entries: tuple[_EntryDoc, ...]


_RAW = msgspec.json.Decoder(msgspec.Raw)


def refuse_large(size_bytes: int, what: str) -> None:
    if size_bytes > MANIFEST_SIZE_BYTES_MAX:
        raise StateTypeError(
            f"the {what} has {size_bytes} bytes, more than {MANIFEST_SIZE_BYTES_MAX}",
            hint="put long lists of numbers into tensors, and histories into run.log(...)",
        )


def valid_json(values: bytes) -> msgspec.Raw:
    """Return values as they will be embedded, after a full parse: msgspec would embed anything."""
    try:
        msgspec.json.decode(values)
        return msgspec.Raw(bytes(_RAW.decode(values)))
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptDataError(f"the values of the state are not valid JSON: {exc}") from exc


def point(checkpoint: CheckpointId) -> tuple[int, int]:
    return checkpoint.attempt, checkpoint.step


def pieces_by_leaf(pieces: Iterable[_P]) -> dict[str, list[_P]]:
    found: defaultdict[str, list[_P]] = defaultdict(list)
    for piece in pieces:
        found[piece.leaf].append(piece)
    return found


def leaves_form(leaves: Iterable[LeafSpec], pieces: Iterable[PlannedPiece]) -> bytes:
    """Return the leaves' documents as encoded, but with `%(device N)b` and `%(generation N)b` for those of segment N.

    Filled in by `%`: most of a manifest stays the same from one checkpoint to the next.
    """
    by_leaf = pieces_by_leaf(pieces)
    return b"[%b]" % b",".join(_leaf_form(leaf, by_leaf[leaf.name]) for leaf in leaves)


def _leaf_form(leaf: LeafSpec, pieces: Iterable[PlannedPiece]) -> bytes:
    facts, brackets = _escaped(_ENCODER.encode(draft_leaf_doc(leaf, ()))), b"[]}"
    assert facts.endswith(brackets)
    return b"%b[%b]}" % (facts.removesuffix(brackets), b",".join(map(_piece_form, pieces)))


def _piece_form(piece: PlannedPiece) -> bytes:
    planned = _escaped(_ENCODER.encode(_planned_piece_doc(piece)))
    return b'{"device_id":"%%(device %d)b",%b,"generation":"%%(generation %d)b"}' % (
        piece.segment,
        planned[1:-1],
        piece.segment,
    )


def _escaped(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


def draft_leaf_doc(leaf: LeafSpec, pieces: Sequence[PlannedPiece]) -> DraftLeafDoc:
    return DraftLeafDoc(
        name=leaf.name,
        dtype=leaf.dtype,
        shape=leaf.shape,
        strides=leaf.strides,
        global_shape=leaf.global_shape,
        global_offset=leaf.global_offset,
        replicas=leaf.replicas,
        pieces=tuple(map(_planned_piece_doc, pieces)),
    )


def _planned_piece_doc(piece: PlannedPiece) -> PlannedPieceDoc:
    return PlannedPieceDoc(
        segment=piece.segment,
        key=piece.key,
        offset_in_leaf=piece.offset_in_leaf_bytes,
        size=piece.size_bytes,
    )


def alias_doc(alias: Alias) -> AliasDoc:
    return AliasDoc(
        name=alias.name,
        of=alias.of,
        offset=alias.offset_bytes,
        dtype=alias.dtype,
        shape=alias.shape,
        strides=alias.strides,
    )


def record_doc(record: SegmentRecord) -> RecordDoc:
    return RecordDoc(
        segment=record.segment,
        device_id=record.device_id,
        generation=record.generation,
        file_size=record.file_size_bytes,
        header_size=record.header_size_bytes,
        dio_alignment=record.dio_alignment_bytes,
        xxh3=struct.pack(f">{len(record.block_checksums)}Q", *record.block_checksums).hex(),
    )


def plan_doc(plan: SegmentPlan) -> PlanDoc:
    return PlanDoc(
        segment=plan.segment,
        slot_offset=plan.slot_offset_bytes,
        header_size=plan.header_size_bytes,
        data_size=plan.data_size_bytes,
        entries=tuple(
            _EntryDoc(key=e.key, dtype=e.dtype, shape=e.shape, begin=e.begin, end=e.end) for e in plan.entries
        ),
    )


def parsed_values(values: msgspec.Raw) -> bytes:
    return bytes(valid_json(bytes(values)))


def leaf_of(document: LeafDoc | DraftLeafDoc) -> LeafSpec:
    return LeafSpec(
        name=document.name,
        dtype=document.dtype,
        shape=document.shape,
        strides=document.strides,
        replicas=document.replicas,
        global_shape=document.global_shape,
        global_offset=document.global_offset,
    )


def alias_of(document: AliasDoc) -> Alias:
    itemsize_bytes(document.dtype)  # an unknown dtype raises here
    return Alias(
        name=document.name,
        of=document.of,
        offset_bytes=document.offset,
        dtype=document.dtype,
        shape=document.shape,
        strides=document.strides,
    )


def planned_piece_of(leaf: str, document: PlannedPieceDoc) -> PlannedPiece:
    return PlannedPiece(
        leaf=leaf,
        offset_in_leaf_bytes=document.offset_in_leaf,
        size_bytes=document.size,
        segment=document.segment,
        key=document.key,
    )


def piece_of(leaf: str, document: PieceDoc) -> Piece:
    return Piece(
        leaf=leaf,
        offset_in_leaf_bytes=document.offset_in_leaf,
        size_bytes=document.size,
        device_id=document.device_id,
        generation=document.generation,
        segment=document.segment,
        key=document.key,
    )


def record_of(document: RecordDoc) -> SegmentRecord:
    return SegmentRecord(
        segment=document.segment,
        device_id=document.device_id,
        generation=document.generation,
        file_size_bytes=document.file_size,
        header_size_bytes=document.header_size,
        dio_alignment_bytes=document.dio_alignment,
        block_checksums=struct.unpack(f">{len(document.xxh3) // 16}Q", bytes.fromhex(document.xxh3)),
    )


def plan_of(document: PlanDoc) -> SegmentPlan:
    return SegmentPlan(
        segment=document.segment,
        slot_offset_bytes=document.slot_offset,
        header_size_bytes=document.header_size,
        data_size_bytes=document.data_size,
        entries=tuple(
            SegmentEntry(key=e.key, dtype=e.dtype, shape=e.shape, begin=e.begin, end=e.end)
            for e in document.entries
        ),
    )
