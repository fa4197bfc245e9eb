"""Bytes of a segment file: a safetensors file whose header everstep builds itself and reads strictly.

```
offset 0   u64 LE   n, the length of the JSON text with its padding; 8 + n is a multiple of 4096
offset 8   n bytes  JSON: {"__metadata__": {stamp}, "<key>": {"dtype", "shape", "data_offsets"}, …} and spaces
offset 8+n          the entries' bytes in the order of the header, without holes, up to the end of the file
```
The stamp comes first and has a fixed width, so that a header's size depends on the entries alone (a layout knows it
before there is a generation) and the stamp can be read from the first 512 bytes of a file.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..core.errors import CorruptDataError, FormatVersionError, StateTypeError
from ..core.ids import CheckpointId, is_id
from .manifest_types import HEADER_ALIGNMENT_BYTES, SegmentEntry

SEGMENT_FORMAT_VERSION = 1
HEADER_SIZE_BYTES_MAX = 100_000_000
"""Longest JSON text that the safetensors library opens (its own limit)."""
STAMP_PREFIX_BYTES = 512
"""So many first bytes of a file are enough for `read_stamp`."""
INTEGER_MAX = 2**63 - 1

_FORMAT_PREFIX = "everstep-segment-v"
_METADATA_KEY = "__metadata__"
_LENGTH_FIELD_BYTES = 8
_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_STAMP_TEXT = re.compile(
    rb'\{"__metadata__":\{"format":"everstep-segment-v(\d{1,9})","generation":"([0-9a-f]{32})",'
    rb'"run_id":"([0-9a-f]{32})","attempt":"(\d{20})","step":"(\d{20})","rank":"(\d{20})","segment":"(\d{20})"\}'
)


_Size = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class _EntryDoc(Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_ENTRIES_DECODER = msgspec.json.Decoder(dict[str, _EntryDoc])


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStamp:
    """Whose bytes a segment file holds; a file under a wrong name or from an older write is told by it."""

    generation: str
    run_id: str
    checkpoint: CheckpointId
    rank: int
    segment: int

    def __post_init__(self) -> None:
        if not (is_id(self.generation) and is_id(self.run_id)):
            raise ValueError(
                f"generation and run_id are 32 hex digits, got {self.generation!r} and {self.run_id!r}"
            )
        for value in (self.checkpoint.attempt, self.checkpoint.step, self.rank, self.segment):
            if not 0 <= value <= INTEGER_MAX:
                raise ValueError(f"a number of a stamp is out of range: {value}")


_ZERO_STAMP = SegmentStamp(
    generation="0" * 32, run_id="0" * 32, checkpoint=CheckpointId(1, 0), rank=0, segment=0
)


def align_up(size_bytes: int, alignment_bytes: int = HEADER_ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `alignment_bytes` that is at least `size_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def slot_offsets(file_sizes_bytes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return where each segment begins in a slot, and the room that all need: in order, each at a multiple of 4096."""
    offsets: list[int] = []
    end = 0
    for size in file_sizes_bytes:
        offsets.append(end)
        end += align_up(size)
    return tuple(offsets), end


def item_size_bytes(dtype: str) -> int:
    """Return the bytes of one element of a safetensors dtype; StateTypeError for one that format v1 does not use."""
    bits = _ITEM_BITS.get(dtype)
    if bits is None:
        raise StateTypeError(
            f"safetensors dtype {dtype!r} is not used by format v1", hint=f"known are {', '.join(_ITEM_BITS)}"
        )
    return bits // 8


def header_size_bytes(entries: Sequence[SegmentEntry]) -> int:
    """Return the size of the header that `build_header` makes of these entries, whatever the stamp."""
    return align_up(_LENGTH_FIELD_BYTES + len(_header_text(entries, _ZERO_STAMP)))


def build_header(entries: Sequence[SegmentEntry], stamp: SegmentStamp) -> bytes:
    """Return length field, JSON and padding: the file's bytes before the data, a multiple of 4096.

    Raises:
        ValueError: the header would be longer than safetensors allows, or a key is not valid UTF-8.
    """
    text = _header_text(entries, stamp)
    size = align_up(_LENGTH_FIELD_BYTES + len(text))
    if size - _LENGTH_FIELD_BYTES > HEADER_SIZE_BYTES_MAX:
        raise ValueError(
            f"the header of segment {stamp.segment} takes {len(text)} bytes, more than {HEADER_SIZE_BYTES_MAX}"
        )
    length = (size - _LENGTH_FIELD_BYTES).to_bytes(_LENGTH_FIELD_BYTES, "little")
    return length + text.ljust(size - _LENGTH_FIELD_BYTES, b" ")


def _header_text(entries: Sequence[SegmentEntry], stamp: SegmentStamp) -> bytes:
    document: dict[str, object] = {
        _METADATA_KEY: {
            "format": f"{_FORMAT_PREFIX}{SEGMENT_FORMAT_VERSION}",
            "generation": stamp.generation,
            "run_id": stamp.run_id,
            "attempt": f"{stamp.checkpoint.attempt:020d}",
            "step": f"{stamp.checkpoint.step:020d}",
            "rank": f"{stamp.rank:020d}",
            "segment": f"{stamp.segment:020d}",
        }
    }
    for entry in entries:
        if entry.key in document:
            raise ValueError(f"the key {entry.key!r} stands twice in one segment, or is reserved")
        document[entry.key] = _EntryDoc(entry.dtype, entry.shape, (entry.begin, entry.end))
    return msgspec.json.encode(document)  # as it stands: no spaces, UTF-8


def header_size_of(prefix: bytes, file_size_bytes: int) -> int:
    """Return the size of the header (with its length field) that a file of this size says it has.

    `prefix` are the file's first 8 bytes or more.

    Raises:
        CorruptDataError: too short, longer than the file or than allowed, or not padded to 4096.
    """
    if len(prefix) < _LENGTH_FIELD_BYTES:
        raise CorruptDataError(f"a segment of {file_size_bytes} bytes has no header")
    size = int.from_bytes(prefix[:_LENGTH_FIELD_BYTES], "little") + _LENGTH_FIELD_BYTES
    if size > file_size_bytes or size - _LENGTH_FIELD_BYTES > HEADER_SIZE_BYTES_MAX:
        raise CorruptDataError(f"a segment of {file_size_bytes} bytes names a header of {size} bytes")
    if size % HEADER_ALIGNMENT_BYTES:
        raise CorruptDataError(f"a header of {size} bytes is not padded to {HEADER_ALIGNMENT_BYTES}")
    return size


def read_stamp(prefix: bytes) -> SegmentStamp:
    """Return the stamp from the first `STAMP_PREFIX_BYTES` of a file, without reading the entries.

    Raises:
        CorruptDataError: these are not the first bytes of an everstep segment.
        FormatVersionError: written by a newer format version.
    """
    return _read_stamp(prefix)[0]


def _read_stamp(prefix: bytes) -> tuple[SegmentStamp, int]:
    """Return the stamp and where its text ends."""
    found = _STAMP_TEXT.match(prefix, _LENGTH_FIELD_BYTES)
    if found is None:
        raise CorruptDataError("the header does not begin with the stamp of an everstep segment")
    version = int(found[1])
    if version > SEGMENT_FORMAT_VERSION:
        raise FormatVersionError(
            f"the segment has format version {version}, this everstep reads up to {SEGMENT_FORMAT_VERSION}",
            hint="upgrade everstep",
        )
    try:
        stamp = SegmentStamp(
            generation=found[2].decode(),
            run_id=found[3].decode(),
            checkpoint=CheckpointId(int(found[4]), int(found[5])),
            rank=int(found[6]),
            segment=int(found[7]),
        )
    except ValueError as exc:
        raise CorruptDataError(f"the stamp of the segment is out of range: {exc}") from exc
    return stamp, found.end()


def parse_header(prefix: bytes, file_size_bytes: int) -> tuple[SegmentStamp, tuple[SegmentEntry, ...]]:
    """Return stamp and entries of a file that has this size and begins with `prefix` (at least its whole header).

    Everything is checked: dtype x shape = bytes, entries in order without holes or overlap and covering the file
    exactly, and that the text is what `build_header` writes of them (no key twice, nothing but spaces behind it).

    Raises:
        CorruptDataError: anything of that does not hold; the message says what.
        FormatVersionError: written by a newer format version.
    """
    size = header_size_of(prefix, file_size_bytes)
    if len(prefix) < size:
        raise CorruptDataError(f"the header has {size} bytes, only {len(prefix)} are there")
    stamp, stamp_end = _read_stamp(prefix)
    entries = _parse_entries(prefix[stamp_end:size].rstrip(b" "))
    end = check_entries(entries)
    if size + end != file_size_bytes:
        raise CorruptDataError(
            f"the entries end at byte {size + end}, the file has {file_size_bytes} bytes",
            hint="the file was cut off or extended",
        )
    return stamp, entries


def _parse_entries(text: bytes) -> tuple[SegmentEntry, ...]:
    """Return the entries of the text behind the stamp: a comma, unless there are none, and the rest of the object."""
    try:
        document = _ENTRIES_DECODER.decode(b"{" + text.removeprefix(b","))
        written = b"," * bool(document) + msgspec.json.encode(document)[1:]
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise CorruptDataError(f"the header does not list entries: {exc}") from exc
    if written != text:
        raise CorruptDataError(
            "the header is not as everstep writes it: a key stands twice, or JSON is laid out otherwise"
        )
    return tuple(
        SegmentEntry(
            key=key,
            dtype=found.dtype,
            shape=found.shape,
            begin=found.data_offsets[0],
            end=found.data_offsets[1],
        )
        for key, found in document.items()
    )


def check_entries(entries: Iterable[SegmentEntry]) -> int:
    """Return the bytes of all entries together, after checking that they follow each other without holes.

    Raises:
        CorruptDataError: a hole, an overlap, or a dtype and shape that do not give the entry's bytes.
    """
    end = 0
    for entry in entries:
        if entry.begin != end or entry.end < entry.begin:
            raise CorruptDataError(
                f"entry {entry.key!r} takes bytes {entry.begin} to {entry.end}, expected to begin at {end}"
            )
        item = _ITEM_BITS.get(entry.dtype)
        if item is None:
            raise CorruptDataError(f"entry {entry.key!r} has the unknown dtype {entry.dtype!r}")
        if _element_count(entry.shape, entry.end - entry.begin) * item // 8 != entry.end - entry.begin:
            raise CorruptDataError(
                f"entry {entry.key!r}: {entry.dtype} {list(entry.shape)} does not fill"
                f" {entry.end - entry.begin} bytes"
            )
        end = entry.end
    return end


def _element_count(shape: Sequence[int], count_max: int) -> int:
    """Return the product of the shape, or any number above `count_max` where it is larger: a header may name thousands
    of dimensions, whose whole product takes seconds."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > count_max:
            break
    return count
