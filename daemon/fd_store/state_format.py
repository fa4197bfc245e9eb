"""Bytes of an arena's state memfd: what a daemon that starts again must know of the arena. Pure.

    page 0            head: magic, version, length, SHA-256, then JSON: whose the arena is, and how it is divided
    page 1            mappers: the same frame around the pids that have mapped it
    page 2            empty
    from page 3 on    a region for each slot, 64 MiB and a page apart, and sparse: a page with the record's frame,
                      then the draft of what was sealed

A frame is at most a page long and on one page, so that a SIGKILL finds it old or new: the kernel looks for it between
pages only. A record's frame is written after its draft and holds the digest of both.
"""

import hashlib
import struct
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ...checkpoint.manifest_parts_format import MANIFEST_SIZE_BYTES_MAX
from ...core.errors import CorruptDataError, FormatVersionError

VERSION = 1
PAGE_BYTES = 4096
SLOTS_MAX = 64
REGION_BYTES = MANIFEST_SIZE_BYTES_MAX + PAGE_BYTES
MAPPERS_OFFSET_BYTES = PAGE_BYTES
_REGIONS_OFFSET_BYTES = 3 * PAGE_BYTES
_FRAME = struct.Struct("<8sII32s")
"""Magic, version, bytes of the content, SHA-256 of what stands before it and of the content."""
_PREFIX = struct.Struct("<8sII")
_CONTENT_BYTES_MAX = PAGE_BYTES - _FRAME.size

HEAD_MAGIC = b"ESARENA\n"
MAPPERS_MAGIC = b"ESMAPPER"
RECORD_MAGIC = b"ESSEALED"

_Id = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class ArenaHead(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whose an arena is, and how it is divided. Written once, before the arena is stored."""

    run_name: Annotated[str, Meta(min_length=1, max_length=200)]
    uid: _Count
    store_id: _Id
    rank: _Count
    world_size: Annotated[int, Meta(ge=1, lt=1 << 31)]
    device_ids: Annotated[list[_Id], Meta(max_length=64)]
    """Where new bytes of the rank may go; empty: to any device of the store."""
    layout_digest: Annotated[str, Meta(max_length=128)]
    slot_size_bytes: Annotated[int, Meta(ge=PAGE_BYTES, lt=1 << 50)]
    slot_count: Annotated[int, Meta(ge=1, le=SLOTS_MAX)]
    arena_inode: _Count
    """Of the arena's memfd, which is thereby told from any other."""


_Pid = Annotated[int, Meta(ge=0, lt=1 << 31)]
_MAPPERS = msgspec.json.Decoder(Annotated[list[_Pid], Meta(max_length=256)])
_HEAD = msgspec.json.Decoder(ArenaHead)


def state_size_bytes(slot_count: int) -> int:
    """Return the size of the state of an arena of so many slots: hardly any of it is ever touched."""
    return _REGIONS_OFFSET_BYTES + slot_count * REGION_BYTES


def record_offset_bytes(slot: int) -> int:
    """Return where the frame of a slot's record begins; its draft begins a page later."""
    return _REGIONS_OFFSET_BYTES + slot * REGION_BYTES


def encode_head(head: ArenaHead) -> bytes:
    """Return a frame; CorruptDataError where it does not fit on a page."""
    return _framed(HEAD_MAGIC, msgspec.json.encode(head))


def decode_head(page: bytes) -> ArenaHead:
    """Return what stands on page 0.

    Raises:
        FormatVersionError: another version of everstep has written it.
        CorruptDataError: it is not what was written.
    """
    try:
        return _HEAD.decode(_content(HEAD_MAGIC, page, "head of an arena's state"))
    except msgspec.DecodeError as error:
        raise CorruptDataError(f"the head of an arena's state cannot be read: {error}") from error


def encode_mappers(pids: list[int]) -> bytes:
    """Return a frame of the pids; a 0 among them stands for those that have no pid here, or no room."""
    return _framed(MAPPERS_MAGIC, msgspec.json.encode(pids if len(pids) <= 256 else [0]))


def decode_mappers(page: bytes) -> list[int]:
    """Return what stands on page 1; CorruptDataError where it is not what was written."""
    try:
        return _MAPPERS.decode(_content(MAPPERS_MAGIC, page, "list of who has mapped an arena"))
    except msgspec.DecodeError as error:
        raise CorruptDataError(f"the list of who has mapped an arena cannot be read: {error}") from error


def record_frame(draft: bytes) -> bytes:
    """Return the frame that makes a draft, which is written already, the record of its slot."""
    prefix = _PREFIX.pack(RECORD_MAGIC, VERSION, len(draft))
    return prefix + _digest(prefix, draft)


def record_length_bytes(frame: bytes) -> int:
    """Return how long the draft is that a record's frame announces; 0: nothing is sealed in its slot.

    Raises:
        FormatVersionError, CorruptDataError: as `decode_head`.
    """
    if not any(frame[: _FRAME.size]):
        return 0
    magic, version, length, _ = _FRAME.unpack_from(frame)
    _check_kind(magic, RECORD_MAGIC, version, "record of a slot")
    if not 0 < length <= MANIFEST_SIZE_BYTES_MAX:
        raise CorruptDataError(f"the record of a slot announces a draft of {length} bytes")
    return length


def check_record(frame: bytes, draft: bytes) -> None:
    """Raise CorruptDataError unless the draft is the one that the frame was made for."""
    if frame[: _FRAME.size] != record_frame(draft):
        raise CorruptDataError("the draft in a slot's record is not the one that was sealed")


def _framed(magic: bytes, content: bytes) -> bytes:
    if len(content) > _CONTENT_BYTES_MAX:
        raise CorruptDataError(f"{len(content)} bytes of an arena's state do not fit on a page")
    prefix = _PREFIX.pack(magic, VERSION, len(content))
    return prefix + _digest(prefix, content) + content


def _content(magic: bytes, page: bytes, what: str) -> bytes:
    if len(page) < _FRAME.size:
        raise CorruptDataError(f"the {what} is cut off")
    found, version, length, digest = _FRAME.unpack_from(page)
    _check_kind(found, magic, version, what)
    content = page[_FRAME.size : _FRAME.size + length]
    if len(content) != length or _digest(page[: _PREFIX.size], content) != digest:
        raise CorruptDataError(f"the {what} is not what was written")
    return content


def _check_kind(found: bytes, magic: bytes, version: int, what: str) -> None:
    if found != magic:
        raise CorruptDataError(f"this is no {what}: it begins with {found!r}")
    if version != VERSION:
        raise FormatVersionError(f"the {what} has version {version}, this daemon reads {VERSION}")


def _digest(prefix: bytes, content: bytes) -> bytes:
    digest = hashlib.sha256(prefix)
    digest.update(content)
    return digest.digest()
