"""Bytes of a manifest and of a draft, and the only reader of either.

A manifest file:
```
offset  0   8 bytes  magic "EVSTEPMF"
offset  8   u32 LE   format version, 1
offset 12   u32 LE   reserved, 0
offset 16   u64 LE   length of the payload
offset 24   32 bytes SHA-256 of the payload
offset 56   payload  JSON, see `_ManifestDoc`; the file ends with it
```
A draft is the same kind of JSON without a frame (its digest travels in the message that announces it) and with the
segments as planned. Decoding gives a value that holds together (shard_rules_plan.py) or one of the declared errors.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from ..core.errors import CorruptDataError, FormatVersionError, StateTypeError
from ..core.ids import CheckpointId, run_id_of
from .dtype_format import itemsize_bytes
from .leaf import Alias, LeafSpec
from .manifest_types import Draft, Manifest, Piece, SegmentEntry, SegmentPlan, SegmentRecord
from .shard_rules_plan import check_draft, check_manifest, check_rank, check_records

__all__ = [
    "MANIFEST_FILE_BYTES_MAX",
    "MANIFEST_SIZE_BYTES_MAX",
    "ManifestHead",
    "ManifestName",
    "check_draft",
    "decode_draft",
    "decode_manifest",
    "decode_manifest_head",
    "draft_pieces_of",
    "encode_draft",
    "encode_manifest",
    "manifest_name",
    "parse_manifest_name",
]

MAGIC = b"EVSTEPMF"
MANIFEST_FORMAT_VERSION = 1
MANIFEST_SIZE_BYTES_MAX = 64 * 1024 * 1024
MANIFEST_SUFFIX = ".mf"
_FRAME = struct.Struct("<8sIIQ32s")
MANIFEST_FILE_BYTES_MAX = MANIFEST_SIZE_BYTES_MAX + _FRAME.size
_DIMENSIONS_MAX = 64
"""As in torch."""

_Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_GenerationOrNone = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Sizes = Annotated[tuple[_Count, ...], Meta(max_length=_DIMENSIONS_MAX)]
_Name = Annotated[str, Meta(min_length=1, max_length=4096)]
_Key = Annotated[str, Meta(min_length=1, max_length=4160)]
_Checksums = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})*\Z")]
_Time = Annotated[float, Meta(ge=0, le=1e18)]
_Point = tuple[_Positive, _Count]


class _PieceDoc(Struct, forbid_unknown_fields=True, omit_defaults=True):
    device_id: _Id
    segment: _Count
    key: _Key
    offset_in_leaf: _Count
    size: _Count
    generation: _GenerationOrNone = ""
    """Left out in a draft."""


class _LeafDoc(Struct, forbid_unknown_fields=True):
    name: _Name
    dtype: str
    shape: _Sizes
    strides: _Sizes
    global_shape: _Sizes
    global_offset: _Sizes
    replicas: _Positive
    pieces: tuple[_PieceDoc, ...]


class _AliasDoc(Struct, forbid_unknown_fields=True):
    name: _Name
    of: _Name
    offset: _Count
    dtype: str
    shape: _Sizes
    strides: _Sizes


class _RecordDoc(Struct, forbid_unknown_fields=True):
    segment: _Count
    device_id: _Id
    generation: _Id
    file_size: _Count
    header_size: _Count
    dio_alignment: _Count
    xxh3: _Checksums
    """16 hex digits (big-endian) for each 4 MiB block, in order; a JSON number would lose bits in other languages."""


class _EntryDoc(Struct, forbid_unknown_fields=True):
    key: _Key
    dtype: str
    shape: _Sizes
    begin: _Count
    end: _Count


class _PlanDoc(Struct, forbid_unknown_fields=True):
    segment: _Count
    device_id: _Id
    slot_offset: _Count
    header_size: _Count
    data_size: _Count
    entries: tuple[_EntryDoc, ...]


class _ManifestDoc(Struct, forbid_unknown_fields=True):
    run_id: _Id
    run_name: _Name
    owner_uid: _Count
    checkpoint: _Point
    rank: _Count
    world_size: _Positive
    parent: _Point | None
    generation: _Id
    created_unix_s: _Time
    layout_digest: str
    notes: dict[str, str]
    leaves: tuple[_LeafDoc, ...]
    aliases: tuple[_AliasDoc, ...]
    segments: tuple[_RecordDoc, ...]
    values: msgspec.Raw


class _HeadDoc(Struct):
    """The fields of `_ManifestDoc` that recovery needs; the long ones are skipped."""

    run_id: _Id
    run_name: _Name
    owner_uid: _Count
    checkpoint: _Point
    rank: _Count
    world_size: _Positive
    parent: _Point | None
    generation: _Id
    created_unix_s: _Time
    notes: dict[str, str]
    segments: tuple[_RecordDoc, ...]


class _DraftDoc(Struct, forbid_unknown_fields=True):
    checkpoint: _Point
    rank: _Count
    world_size: _Positive
    parent: _Point | None
    layout_digest: str
    notes: dict[str, str]
    leaves: tuple[_LeafDoc, ...]
    aliases: tuple[_AliasDoc, ...]
    segments: tuple[_PlanDoc, ...]
    values: msgspec.Raw


_ENCODER = msgspec.json.Encoder()
_MANIFEST_DECODER = msgspec.json.Decoder(_ManifestDoc)
_HEAD_DECODER = msgspec.json.Decoder(_HeadDoc)
_DRAFT_DECODER = msgspec.json.Decoder(_DraftDoc)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHead:
    """A manifest without leaves and values: what recovery keeps of it."""

    run_id: str
    run_name: str
    owner_uid: int
    checkpoint: CheckpointId
    rank: int
    world_size: int
    parent: CheckpointId | None
    generation: str
    created_unix_s: float
    notes: dict[str, str]
    segments: tuple[SegmentRecord, ...]


class ManifestName(NamedTuple):
    """What a manifest's file name says."""

    checkpoint: CheckpointId
    rank: int


def manifest_name(checkpoint: CheckpointId, rank: int) -> str:
    """Return the file name `<attempt>.<step>.<rank>.mf`: the same for every writer of this shard."""
    return f"{checkpoint}.{rank}{MANIFEST_SUFFIX}"


def parse_manifest_name(name: str) -> ManifestName | None:
    """Return what a name made by `manifest_name` says, or None for any other name."""
    stem = name.removesuffix(MANIFEST_SUFFIX)
    attempt_and_step, _, rank = stem.rpartition(".")
    try:
        found = ManifestName(CheckpointId.parse(attempt_and_step), int(rank))
    except ValueError:
        return None
    return found if manifest_name(*found) == name else None


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file.

    Pieces are grouped under their leaves, so decoding gives them in the order of the leaves.

    Raises:
        CorruptDataError: the manifest does not hold together, or its values are not valid JSON.
        StateTypeError: it is larger than 64 MiB.
    """
    check_manifest(manifest)
    pieces = _pieces_by_leaf(manifest.pieces)
    document = _ManifestDoc(
        run_id=manifest.run_id,
        run_name=manifest.run_name,
        owner_uid=manifest.owner_uid,
        checkpoint=_point(manifest.checkpoint),
        rank=manifest.rank,
        world_size=manifest.world_size,
        parent=_point(manifest.parent) if manifest.parent else None,
        generation=manifest.generation,
        created_unix_s=manifest.created_unix_s,
        layout_digest=manifest.layout_digest,
        notes=manifest.notes,
        leaves=tuple(_leaf_doc(leaf, pieces[leaf.name]) for leaf in manifest.leaves),
        aliases=tuple(_alias_doc(alias) for alias in manifest.aliases),
        segments=tuple(_record_doc(record) for record in manifest.segments),
        values=_valid_json(manifest.values),
    )
    payload = _ENCODER.encode(document)
    _refuse_large(len(payload), "manifest")
    digest = hashlib.sha256(payload).digest()
    return _FRAME.pack(MAGIC, MANIFEST_FORMAT_VERSION, 0, len(payload), digest) + payload


def decode_manifest(content: bytes) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        FormatVersionError: written by a newer format version.
        CorruptDataError: anything else that is wrong; the message says what.
    """
    payload = _unframe(content)
    try:
        document = _MANIFEST_DECODER.decode(payload)
        manifest = _manifest_of(document)
        if run_id_of(manifest.run_name) != manifest.run_id:
            raise CorruptDataError(f"run {manifest.run_name!r} does not have the id {manifest.run_id}")
        check_manifest(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError, StateTypeError) as exc:
        raise CorruptDataError(f"the manifest does not hold together: {exc}") from exc
    return manifest


def decode_manifest_head(content: bytes) -> ManifestHead:
    """Return the head of the manifest that a file holds: its digest is checked, its leaves are not looked at.

    A hundred times faster than `decode_manifest` where there are many leaves, so that a store with a thousand
    checkpoints is recovered in seconds. Raises the same errors.
    """
    payload = _unframe(content)
    try:
        document = _HEAD_DECODER.decode(payload)
        head = _head_of(document)
        check_rank(head.checkpoint, head.parent, head.rank, head.world_size)
        if run_id_of(head.run_name) != head.run_id:
            raise CorruptDataError(f"run {head.run_name!r} does not have the id {head.run_id}")
        check_records(head.segments)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptDataError(f"the manifest does not hold together: {exc}") from exc
    return head


def _unframe(content: bytes) -> bytes:
    if len(content) < _FRAME.size or not content.startswith(MAGIC):
        raise CorruptDataError(f"{len(content)} bytes are not a manifest: the magic is missing")
    if len(content) > MANIFEST_FILE_BYTES_MAX:
        raise CorruptDataError(f"a manifest of {len(content)} bytes is over the limit")
    _, version, reserved, length, digest = _FRAME.unpack_from(content)
    if version > MANIFEST_FORMAT_VERSION:
        raise FormatVersionError(
            f"the manifest has format version {version}, this everstep reads up to {MANIFEST_FORMAT_VERSION}",
            hint="upgrade everstep",
        )
    payload = content[_FRAME.size :]
    if version != MANIFEST_FORMAT_VERSION or reserved or length != len(payload):
        raise CorruptDataError(
            f"the manifest's frame is wrong: version {version}, reserved {reserved}, length {length}"
            f" for {len(payload)} bytes"
        )
    if hashlib.sha256(payload).digest() != digest:
        raise CorruptDataError("the manifest's SHA-256 does not match")
    return payload


def encode_draft(draft: Draft) -> bytes:
    """Return the JSON by which a hook describes a sealed snapshot to its daemon.

    Raises:
        CorruptDataError: the values are not valid JSON, or a piece belongs to no leaf.
        StateTypeError: it is larger than 64 MiB.
    """
    pieces = _pieces_by_leaf(draft.pieces)
    document = _DraftDoc(
        checkpoint=_point(draft.checkpoint),
        rank=draft.rank,
        world_size=draft.world_size,
        parent=_point(draft.parent) if draft.parent else None,
        layout_digest=draft.layout_digest,
        notes=draft.notes,
        leaves=tuple(_leaf_doc(leaf, pieces.pop(leaf.name, [])) for leaf in draft.leaves),
        aliases=tuple(_alias_doc(alias) for alias in draft.aliases),
        segments=tuple(_plan_doc(plan) for plan in draft.segments),
        values=_valid_json(draft.values),
    )
    if pieces:
        raise CorruptDataError(f"the leaf {next(iter(pieces))!r} of a piece is not in the draft")
    content = _ENCODER.encode(document)
    _refuse_large(len(content), "draft")
    return content


def decode_draft(content: bytes) -> Draft:
    """Return the draft in `content` as said; `check_draft` decides whether it may be believed.

    Raises:
        CorruptDataError: not a draft.
    """
    if len(content) > MANIFEST_SIZE_BYTES_MAX:
        raise CorruptDataError(f"a draft of {len(content)} bytes is over the limit")
    try:
        document = _DRAFT_DECODER.decode(content)
        return _draft_of(document)
    except (msgspec.MsgspecError, ValueError, RecursionError, StateTypeError) as exc:
        raise CorruptDataError(f"the draft does not hold together: {exc}") from exc


def draft_pieces_of(draft: Draft, generation: str) -> tuple[Piece, ...]:
    """Return the draft's pieces with the generation that they get at admission, in the order of the leaves."""
    by_leaf = _pieces_by_leaf(draft.pieces)
    return tuple(
        replace(piece, generation=generation) for leaf in draft.leaves for piece in by_leaf.get(leaf.name, ())
    )


def _refuse_large(size_bytes: int, what: str) -> None:
    if size_bytes > MANIFEST_SIZE_BYTES_MAX:
        raise StateTypeError(
            f"the {what} has {size_bytes} bytes, more than {MANIFEST_SIZE_BYTES_MAX}",
            hint="put long lists of numbers into tensors, and histories into run.log(...)",
        )


def _valid_json(values: bytes) -> msgspec.Raw:
    """Return values as they will be embedded, after a full parse: msgspec would embed anything."""
    try:
        msgspec.json.decode(values)
        return msgspec.Raw(bytes(msgspec.json.decode(values, type=msgspec.Raw)))
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptDataError(f"the values of the state are not valid JSON: {exc}") from exc


def _point(checkpoint: CheckpointId) -> tuple[int, int]:
    return checkpoint.attempt, checkpoint.step


def _pieces_by_leaf(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    found: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.leaf].append(piece)
    return found


def _leaf_doc(leaf: LeafSpec, pieces: Sequence[Piece]) -> _LeafDoc:
    return _LeafDoc(
        name=leaf.name,
        dtype=leaf.dtype,
        shape=leaf.shape,
        strides=leaf.strides,
        global_shape=leaf.global_shape,
        global_offset=leaf.global_offset,
        replicas=leaf.replicas,
        pieces=tuple(
            _PieceDoc(
                device_id=piece.device_id,
                generation=piece.generation,
                segment=piece.segment,
                key=piece.key,
                offset_in_leaf=piece.offset_in_leaf_bytes,
                size=piece.size_bytes,
            )
            for piece in pieces
        ),
    )


def _alias_doc(alias: Alias) -> _AliasDoc:
    return _AliasDoc(
        name=alias.name,
        of=alias.of,
        offset=alias.offset_bytes,
        dtype=alias.dtype,
        shape=alias.shape,
        strides=alias.strides,
    )


def _record_doc(record: SegmentRecord) -> _RecordDoc:
    return _RecordDoc(
        segment=record.segment,
        device_id=record.device_id,
        generation=record.generation,
        file_size=record.file_size_bytes,
        header_size=record.header_size_bytes,
        dio_alignment=record.dio_alignment_bytes,
        xxh3=struct.pack(f">{len(record.block_checksums)}Q", *record.block_checksums).hex(),
    )


def _plan_doc(plan: SegmentPlan) -> _PlanDoc:
    return _PlanDoc(
        segment=plan.segment,
        device_id=plan.device_id,
        slot_offset=plan.slot_offset_bytes,
        header_size=plan.header_size_bytes,
        data_size=plan.data_size_bytes,
        entries=tuple(
            _EntryDoc(key=e.key, dtype=e.dtype, shape=e.shape, begin=e.begin, end=e.end) for e in plan.entries
        ),
    )


def _manifest_of(document: _ManifestDoc) -> Manifest:
    return Manifest(
        run_id=document.run_id,
        run_name=document.run_name,
        owner_uid=document.owner_uid,
        checkpoint=CheckpointId(*document.checkpoint),
        rank=document.rank,
        world_size=document.world_size,
        parent=CheckpointId(*document.parent) if document.parent else None,
        generation=document.generation,
        created_unix_s=document.created_unix_s,
        layout_digest=document.layout_digest,
        leaves=tuple(_leaf_of(leaf) for leaf in document.leaves),
        aliases=tuple(_alias_of(alias) for alias in document.aliases),
        pieces=tuple(_piece_of(leaf.name, piece) for leaf in document.leaves for piece in leaf.pieces),
        segments=tuple(_record_of(record) for record in document.segments),
        values=_parsed_values(document.values),
        notes=document.notes,
    )


def _head_of(document: _HeadDoc) -> ManifestHead:
    return ManifestHead(
        run_id=document.run_id,
        run_name=document.run_name,
        owner_uid=document.owner_uid,
        checkpoint=CheckpointId(*document.checkpoint),
        rank=document.rank,
        world_size=document.world_size,
        parent=CheckpointId(*document.parent) if document.parent else None,
        generation=document.generation,
        created_unix_s=document.created_unix_s,
        notes=document.notes,
        segments=tuple(_record_of(record) for record in document.segments),
    )


def _draft_of(document: _DraftDoc) -> Draft:
    return Draft(
        checkpoint=CheckpointId(*document.checkpoint),
        rank=document.rank,
        world_size=document.world_size,
        parent=CheckpointId(*document.parent) if document.parent else None,
        layout_digest=document.layout_digest,
        leaves=tuple(_leaf_of(leaf) for leaf in document.leaves),
        aliases=tuple(_alias_of(alias) for alias in document.aliases),
        pieces=tuple(_piece_of(leaf.name, piece) for leaf in document.leaves for piece in leaf.pieces),
        segments=tuple(_plan_of(plan) for plan in document.segments),
        values=_parsed_values(document.values),
        notes=document.notes,
    )


def _parsed_values(values: msgspec.Raw) -> bytes:
    return bytes(_valid_json(bytes(values)))


def _leaf_of(document: _LeafDoc) -> LeafSpec:
    leaf = LeafSpec(
        name=document.name,
        dtype=document.dtype,
        shape=document.shape,
        strides=document.strides,
        replicas=document.replicas,
        global_shape=document.global_shape,
        global_offset=document.global_offset,
    )
    assert leaf.size_bytes >= 0  # an unknown dtype raises here
    return leaf


def _alias_of(document: _AliasDoc) -> Alias:
    itemsize_bytes(document.dtype)  # an unknown dtype raises here
    return Alias(
        name=document.name,
        of=document.of,
        offset_bytes=document.offset,
        dtype=document.dtype,
        shape=document.shape,
        strides=document.strides,
    )


def _piece_of(leaf: str, document: _PieceDoc) -> Piece:
    return Piece(
        leaf=leaf,
        offset_in_leaf_bytes=document.offset_in_leaf,
        size_bytes=document.size,
        device_id=document.device_id,
        generation=document.generation,
        segment=document.segment,
        key=document.key,
    )


def _record_of(document: _RecordDoc) -> SegmentRecord:
    return SegmentRecord(
        segment=document.segment,
        device_id=document.device_id,
        generation=document.generation,
        file_size_bytes=document.file_size,
        header_size_bytes=document.header_size,
        dio_alignment_bytes=document.dio_alignment,
        block_checksums=struct.unpack(f">{len(document.xxh3) // 16}Q", bytes.fromhex(document.xxh3)),
    )


def _plan_of(document: _PlanDoc) -> SegmentPlan:
    return SegmentPlan(
        segment=document.segment,
        device_id=document.device_id,
        slot_offset_bytes=document.slot_offset,
        header_size_bytes=document.header_size,
        data_size_bytes=document.data_size,
        entries=tuple(
            SegmentEntry(key=e.key, dtype=e.dtype, shape=e.shape, begin=e.begin, end=e.end)
            for e in document.entries
        ),
    )
