"""Bytes of a manifest file, and their only reader.

A manifest file:
```
offset  0   8 bytes  magic "EVSTEPMF"
offset  8   u32 LE   format version, 1
offset 12   u32 LE   reserved, 0
offset 16   u64 LE   length of the payload
offset 24   32 bytes SHA-256 of the payload
offset 56   payload  JSON, see `_ManifestDoc`; the file ends with it
```
Decoding gives a value that holds together (shard_rules_plan.py) or one of the declared errors.
"""

import hashlib
import operator
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import msgspec
from msgspec import Struct

from ..core.errors import CorruptDataError, FormatVersionError, StateTypeError
from ..core.ids import CheckpointId, run_id_of
from .manifest_parts_format import (
    MANIFEST_SIZE_BYTES_MAX,
    AliasDoc,
    Count,
    Id,
    LeafDoc,
    Name,
    Point,
    Positive,
    RecordDoc,
    Time,
    alias_doc,
    alias_of,
    leaf_of,
    leaves_form,
    parsed_values,
    piece_of,
    point,
    record_doc,
    record_of,
    refuse_large,
    valid_json,
)
from .manifest_types import Draft, Manifest, ManifestHead, ManifestOverview, SegmentRecord
from .shard_rules_plan import check_manifest, check_rank, check_records

MAGIC = b"EVSTEPMF"
MANIFEST_FORMAT_VERSION = 1
MANIFEST_SUFFIX = ".mf"
_FRAME = struct.Struct("<8sIIQ32s")
MANIFEST_FILE_BYTES_MAX = MANIFEST_SIZE_BYTES_MAX + _FRAME.size


class _ManifestDoc(Struct, forbid_unknown_fields=True):
    run_id: Id
    run_name: Name
    owner_uid: Count
    checkpoint: Point
    rank: Count
    world_size: Positive
    parent: Point | None
    generation: Id
    created_unix_s: Time
    layout_digest: str
    notes: dict[str, str]
    leaves: tuple[LeafDoc, ...]
    aliases: tuple[AliasDoc, ...]
    segments: tuple[RecordDoc, ...]
    values: msgspec.Raw


class _EncodedDoc(_ManifestDoc):
    """The same, of which the long parts are encoded already."""

    leaves: msgspec.Raw  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases: msgspec.Raw  # pyright: ignore[reportIncompatibleVariableOverride]


class _HeadDoc(Struct):
    """The fields of `_ManifestDoc` that recovery needs; the long ones are skipped."""

    run_id: Id
    run_name: Name
    owner_uid: Count
    checkpoint: Point
    rank: Count
    world_size: Positive
    parent: Point | None
    generation: Id
    created_unix_s: Time
    notes: dict[str, str]
    segments: tuple[RecordDoc, ...]


class _OverviewDoc(_HeadDoc):
    leaves: tuple[msgspec.Raw, ...]
    aliases: tuple[AliasDoc, ...]


_ENCODER = msgspec.json.Encoder()
_MANIFEST_DECODER = msgspec.json.Decoder(_ManifestDoc)
_HEAD_DECODER = msgspec.json.Decoder(_HeadDoc)
_OVERVIEW_DECODER = msgspec.json.Decoder(_OverviewDoc)
_LEAF_DECODER = msgspec.json.Decoder(LeafDoc)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What manifests of drafts with the same leaves have in common, as encoded."""

    shared: tuple[object, ...]
    """What of a draft is encoded here: the very tuples, which the next draft of a `DraftReader` has, too."""
    leaves: bytes
    """A form to be filled in, see `leaves_form`."""
    aliases: bytes


class ManifestEncoder:
    """Encodes the manifests of one rank: what its drafts have in common once, since it grows with the leaves."""

    def __init__(self) -> None:
        """Know no draft yet."""
        self._common: _Common | None = None

    def encode(self, head: ManifestHead, draft: Draft) -> bytes:
        """Return the bytes of a manifest file: the draft's leaves, in the head's segments. On any thread.

        The draft has been checked (`check_draft`). Pieces stand with their leaves, in the order of the leaves.

        Raises:
            CorruptDataError: the head does not hold together, or is of other segments; the values are no valid JSON.
            StateTypeError: it is larger than 64 MiB.
        """
        check_rank(head.checkpoint, head.parent, head.rank, head.world_size)
        check_records(head.segments)
        found = [(each.segment, each.header_size_bytes, each.file_size_bytes) for each in head.segments]
        if found != [(each.segment, each.header_size_bytes, each.file_size_bytes) for each in draft.segments]:
            raise CorruptDataError(f"the segments of checkpoint {head.checkpoint} are not those of its draft")
        common = self._common_of(draft)
        ids = {b"device %d" % each.segment: each.device_id.encode() for each in head.segments}
        ids |= {b"generation %d" % each.segment: each.generation.encode() for each in head.segments}
        document = _EncodedDoc(
            run_id=head.run_id,
            run_name=head.run_name,
            owner_uid=head.owner_uid,
            checkpoint=point(head.checkpoint),
            rank=head.rank,
            world_size=head.world_size,
            parent=point(head.parent) if head.parent else None,
            generation=head.generation,
            created_unix_s=head.created_unix_s,
            layout_digest=draft.layout_digest,
            notes=head.notes,
            leaves=msgspec.Raw(common.leaves % ids),
            aliases=msgspec.Raw(common.aliases),
            segments=tuple(record_doc(record) for record in head.segments),
            values=valid_json(draft.values),
        )
        payload = _ENCODER.encode(document)
        refuse_large(len(payload), "manifest")
        digest = hashlib.sha256(payload).digest()
        return _FRAME.pack(MAGIC, MANIFEST_FORMAT_VERSION, 0, len(payload), digest) + payload

    def _common_of(self, draft: Draft) -> _Common:
        shared, known = (draft.leaves, draft.pieces, draft.aliases), self._common
        if known is not None and all(map(operator.is_, known.shared, shared)):
            return known
        self._common = known = None  # of another layout: not kept beside the new one
        self._common = made = _Common(
            shared=shared,
            leaves=leaves_form(draft.leaves, draft.pieces),
            aliases=_ENCODER.encode([alias_doc(alias) for alias in draft.aliases]),
        )
        return made


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
        head = ManifestHead(**_head_fields(document))
        _check_head(head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptDataError(f"the manifest does not hold together: {exc}") from exc
    return head


def decode_manifest_overview(content: bytes, leaf_count_max: int) -> ManifestOverview:
    """Return the head of the manifest that a file holds, with its first leaves: the others are counted, not looked at.

    As fast as `decode_manifest_head`, so that who asks for many leaves again and again keeps the interpreter from
    nothing that matters more. Raises the same errors.
    """
    payload = _unframe(content)
    try:
        document = _OVERVIEW_DECODER.decode(payload)
        overview = ManifestOverview(
            **_head_fields(document),
            leaves=tuple(leaf_of(_LEAF_DECODER.decode(raw)) for raw in document.leaves[:leaf_count_max]),
            leaf_count=len(document.leaves),
            aliases=tuple(alias_of(alias) for alias in document.aliases),
        )
        _check_head(overview)
    except (msgspec.MsgspecError, ValueError, RecursionError, StateTypeError) as exc:
        raise CorruptDataError(f"the manifest does not hold together: {exc}") from exc
    return overview


def _check_head(head: ManifestHead) -> None:
    check_rank(head.checkpoint, head.parent, head.rank, head.world_size)
    if run_id_of(head.run_name) != head.run_id:
        raise CorruptDataError(f"run {head.run_name!r} does not have the id {head.run_id}")
    check_records(head.segments)


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


class _HeadFields(TypedDict):
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


def _head_fields(document: _ManifestDoc | _HeadDoc) -> _HeadFields:
    return _HeadFields(
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
        segments=tuple(record_of(record) for record in document.segments),
    )


def _manifest_of(document: _ManifestDoc) -> Manifest:
    return Manifest(
        **_head_fields(document),
        layout_digest=document.layout_digest,
        leaves=tuple(leaf_of(leaf) for leaf in document.leaves),
        aliases=tuple(alias_of(alias) for alias in document.aliases),
        pieces=tuple(piece_of(leaf.name, piece) for leaf in document.leaves for piece in leaf.pieces),
        values=parsed_values(document.values),
    )
