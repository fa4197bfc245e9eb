"""Bytes of a draft, by which a hook describes a sealed snapshot to its daemon, and their only reader.

JSON like a manifest's payload, with the segments as planned and without a frame: its digest travels in the message that
announces it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.errors import CorruptDataError, StateTypeError
from ..core.ids import CheckpointId
from .manifest_parts_format import (
    MANIFEST_SIZE_BYTES_MAX,
    AliasDoc,
    Count,
    DraftLeafDoc,
    PlanDoc,
    Point,
    Positive,
    alias_doc,
    alias_of,
    draft_leaf_doc,
    leaf_of,
    parsed_values,
    pieces_by_leaf,
    plan_doc,
    plan_of,
    planned_piece_of,
    point,
    refuse_large,
    valid_json,
)
from .manifest_types import Draft
from .shard_rules_plan import check_draft, check_rank


class _DraftDoc(Struct, forbid_unknown_fields=True):
    """A draft, with `_Common` and the values as encoded."""

    checkpoint: Point
    rank: Count
    world_size: Positive
    parent: Point | None
    layout_digest: str
    notes: dict[str, str]
    leaves: msgspec.Raw
    aliases: msgspec.Raw
    segments: msgspec.Raw
    values: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What all drafts of a layout have in common, as encoded."""

    leaves: bytes
    aliases: bytes
    segments: bytes


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_DraftDoc)
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])
_LEAF = msgspec.json.Decoder(DraftLeafDoc)
_ALIASES = msgspec.json.Decoder(tuple[AliasDoc, ...])
_SEGMENTS = msgspec.json.Decoder(tuple[PlanDoc, ...])


class DraftEncoder:
    """Encodes drafts of one layout: what they have in common once, at the first, since it grows with the leaves."""

    def __init__(self) -> None:
        """Know no layout yet."""
        self._common: tuple[Draft, _Common] | None = None

    def encode(self, draft: Draft) -> bytes:
        """Return the JSON by which a hook describes a sealed snapshot to its daemon.

        All drafts given must have the same leaves, aliases, pieces and segments, and values from `dump_values`.

        Raises:
            CorruptDataError: a piece belongs to no leaf.
            StateTypeError: it is larger than 64 MiB.
        """
        if self._common is None:
            self._common = (draft, _common(draft))
        first, common = self._common
        assert draft.leaves is first.leaves
        assert draft.segments is first.segments
        document = _DraftDoc(
            checkpoint=point(draft.checkpoint),
            rank=draft.rank,
            world_size=draft.world_size,
            parent=point(draft.parent) if draft.parent else None,
            layout_digest=draft.layout_digest,
            notes=draft.notes,
            leaves=msgspec.Raw(common.leaves),
            aliases=msgspec.Raw(common.aliases),
            segments=msgspec.Raw(common.segments),
            values=msgspec.Raw(draft.values),
        )
        content = _ENCODER.encode(document)
        refuse_large(len(content), "draft")
        return content


def encode_draft(draft: Draft) -> bytes:
    """Return what a `DraftEncoder` of its own does. CorruptDataError where the values, any bytes, are no JSON."""
    return DraftEncoder().encode(replace(draft, values=bytes(valid_json(draft.values))))


def _common(draft: Draft) -> _Common:
    pieces = pieces_by_leaf(draft.pieces)
    leaves = [draft_leaf_doc(leaf, pieces.pop(leaf.name, [])) for leaf in draft.leaves]
    if pieces:
        raise CorruptDataError(f"the leaf {next(iter(pieces))!r} of a piece is not in the draft")
    return _Common(
        leaves=_ENCODER.encode(leaves),
        aliases=_ENCODER.encode([alias_doc(alias) for alias in draft.aliases]),
        segments=_ENCODER.encode([plan_doc(plan) for plan in draft.segments]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Believed:
    """The last draft that was checked, what it shares with others as it came, and the slot that it was checked for."""

    draft: Draft
    common: _Common
    slot_size_bytes: int
    is_ring: bool


class DraftReader:
    """Reads the drafts of one rank. What a draft shares with the one before is parsed and checked once.

    10,000 leaves take 143 ms, those of the next draft 4 (2 cores, 2026-11-22): from one checkpoint to the
    next the layout hardly ever changes.
    """

    def __init__(self) -> None:
        """Know no draft yet."""
        self._believed: _Believed | None = None

    def read(self, content: bytes, slot_size_bytes: int, *, is_ring: bool = False) -> Draft:
        """Return the draft in `content`, checked for a slot of this size. May be called on several threads.

        Raises:
            CorruptDataError: not a draft, or a rule of `check_draft` does not hold.
        """
        document = _document_of(content)
        common, known = _common_of(document), self._believed
        if known is not None and (known.common, known.slot_size_bytes, known.is_ring) == (
            common,
            slot_size_bytes,
            is_ring,
        ):
            draft = _like(known.draft, document)
            check_rank(draft.checkpoint, draft.parent, draft.rank, draft.world_size)
            return draft
        self._believed = known = None  # of another layout: not kept beside the new one
        draft = _draft_of(document)
        check_draft(draft, slot_size_bytes, is_ring=is_ring)
        self._believed = _Believed(
            draft=draft, common=common, slot_size_bytes=slot_size_bytes, is_ring=is_ring
        )
        return draft


def decode_draft(content: bytes) -> Draft:
    """Return the draft in `content` as said; `check_draft` decides whether it may be believed.

    Raises:
        CorruptDataError: not a draft.
    """
    return _draft_of(_document_of(content))


def _document_of(content: bytes) -> _DraftDoc:
    if len(content) > MANIFEST_SIZE_BYTES_MAX:
        raise CorruptDataError(f"a draft of {len(content)} bytes is over the limit")
    with _corrupt_where_wrong():
        return _DECODER.decode(content)


@contextmanager
def _corrupt_where_wrong() -> Generator[None]:
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError, StateTypeError) as exc:
        raise CorruptDataError(f"the draft does not hold together: {exc}") from exc


def _common_of(document: _DraftDoc) -> _Common:
    return _Common(
        leaves=bytes(document.leaves), aliases=bytes(document.aliases), segments=bytes(document.segments)
    )


def _draft_of(document: _DraftDoc) -> Draft:
    with _corrupt_where_wrong():
        # One by one: a call for all of them would keep the GIL from the drives' threads for as long as it takes.
        leaves = [_LEAF.decode(leaf) for leaf in _ROWS.decode(document.leaves)]
        return Draft(
            checkpoint=CheckpointId(*document.checkpoint),
            rank=document.rank,
            world_size=document.world_size,
            parent=CheckpointId(*document.parent) if document.parent else None,
            layout_digest=document.layout_digest,
            leaves=tuple(leaf_of(leaf) for leaf in leaves),
            aliases=tuple(alias_of(alias) for alias in _ALIASES.decode(document.aliases)),
            pieces=tuple(planned_piece_of(leaf.name, piece) for leaf in leaves for piece in leaf.pieces),
            segments=tuple(plan_of(plan) for plan in _SEGMENTS.decode(document.segments)),
            values=parsed_values(document.values),
            notes=document.notes,
        )


def _like(known: Draft, document: _DraftDoc) -> Draft:
    """Return the draft of a document whose leaves, aliases, pieces and segments are those of a known one."""
    with _corrupt_where_wrong():
        return replace(
            known,
            checkpoint=CheckpointId(*document.checkpoint),
            rank=document.rank,
            world_size=document.world_size,
            parent=CheckpointId(*document.parent) if document.parent else None,
            layout_digest=document.layout_digest,
            values=parsed_values(document.values),
            notes=document.notes,
        )
