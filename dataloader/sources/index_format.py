"""An index file: where each sample of a dataset lies, built once, mapped into memory and never changed.

    offset  size
    0       8     "EVSTINDX"
    8       4     u32 version, 1
    12      4     u32 number of sections s, 1 to 32
    16      16    kind ("image-folder", "tar", "jsonl", "objects"), padded with zero bytes
    32      8     u64 size of the file in bytes
    40      8     u64 number of samples
    48      16    content digest: XXH3-128 over kind, number of samples, and length and bytes of sections 1 to s-1
    64      16 s  per section u64 offset, u64 length in bytes; each starts at the next multiple of 8, in order
    64+16s  8     u64 XXH3-64 over all bytes before it and section 0

Numbers are little-endian. Section 0 holds the stamps (sizes and times of the files when they were read), by which an
index is found to be out of date; they differ between copies of a dataset, so the content digest leaves them out.
What the other sections are is said by the module of each kind.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from ...core.errors import CorruptDataError, FormatVersionError, UsageError

Buffer = bytes | bytearray | memoryview

MAGIC = b"EVSTINDX"
VERSION = 1
SECTIONS_MAX = 32
HEAD_BYTES_MAX = 64 + 16 * SECTIONS_MAX + 8
NEVER_CURRENT = -1
"""The time in a stamp of a file that was changed so lately that it may change again within the same second."""

_HEAD = struct.Struct("<8sII16sQQ16s")
_PAIR = struct.Struct("<QQ")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_STAMP = struct.Struct("<qQI")
_DIGEST_PIECE_BYTES = 1 << 24


class Index:
    """A parsed index over bytes in memory or a mapping of them; every access is checked against its section."""

    def __init__(self, data: Buffer, *, kind: str, verify: bool = True) -> None:
        """Parse `data`; where `verify` is false only the head is checked, not the digest of the sections.

        Raises:
            UsageError: it is no index, or one of another kind of dataset.
            FormatVersionError: a newer version of everstep wrote it.
            CorruptDataError: it is damaged.
        """
        self._data = memoryview(data).cast("B")
        head = _parse_head(self._data)
        if head.kind != kind:
            raise UsageError(f"the index is of kind {head.kind!r}, expected {kind!r}", hint=_OTHER_NAME)
        self.kind = head.kind
        self.count = head.count
        self.digest = head.digest
        self._sections = head.sections
        if verify and _content_digest(kind, head.count, self._bodies()) != head.digest:
            raise CorruptDataError("the digest of the index does not hold")

    def section_count(self) -> int:
        """Return the number of sections, that of the stamps included."""
        return len(self._sections)

    def length(self, section: int) -> int:
        """Return the length of a section in bytes."""
        return self._sections[section][1]

    def u64(self, section: int, position: int) -> int:
        """Return the number at `position` of a section of u64."""
        return int(_U64.unpack_from(self._data, self._at(section, position * 8, 8))[0])

    def u32(self, section: int, position: int) -> int:
        """Return the number at `position` of a section of u32."""
        return int(_U32.unpack_from(self._data, self._at(section, position * 4, 4))[0])

    def piece(self, section: int, start: int, stop: int) -> bytes:
        """Return a copy of the bytes [start, stop) of a section."""
        begin = self._at(section, start, stop - start)
        return bytes(self._data[begin : begin + stop - start])

    def name(self, offsets: int, position: int) -> bytes:
        """Return name number `position`: the section `offsets` says where it lies in the section after it."""
        return self.piece(offsets + 1, self.u64(offsets, position), self.u64(offsets, position + 1))

    def name_count(self, offsets: int) -> int:
        """Return how many names a pair of sections holds."""
        return max(0, self.length(offsets) // 8 - 1)

    def stamps(self) -> "list[Stamp]":
        """Return the sizes and times of the files as they were when the index was made."""
        return parse_stamps(self.piece(0, 0, self.length(0)))

    def file_stamp(self) -> "Stamp":
        """Return the one stamp of an index of one file; CorruptDataError if it has none or several."""
        stamps = self.stamps()
        if len(stamps) != 1:
            raise CorruptDataError(f"the index of one file has {len(stamps)} stamps")
        return stamps[0]

    def check_lengths(self, lengths: Sequence[int | None]) -> None:
        """Return if section i + 1 is lengths[i] bytes long, None for any length; CorruptDataError otherwise."""
        if len(lengths) != len(self._sections) - 1:
            raise CorruptDataError(f"the index has {len(self._sections)} sections, not {len(lengths) + 1}")
        for number, expected in enumerate(lengths, start=1):
            if expected is not None and self.length(number) != expected:
                raise CorruptDataError(
                    f"section {number} of the index has {self.length(number)} bytes, expected {expected}"
                )

    def _at(self, section: int, offset: int, size: int) -> int:
        begin, length = self._sections[section]
        if offset < 0 or size < 0 or offset + size > length:
            raise CorruptDataError(f"the index points to [{offset}, {offset + size}) of section {section}")
        return begin + offset

    def _bodies(self) -> list[Buffer]:
        return [self._data[begin : begin + length] for begin, length in self._sections[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a file or directory looked like when it was read: its path (relative, or empty), mtime and size."""

    path: bytes
    mtime_s: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    kind: str
    count: int
    digest: str
    sections: tuple[tuple[int, int], ...]


def encode_index(kind: str, count: int, sections: Sequence[Buffer], stamps: Sequence[Stamp]) -> list[Buffer]:
    """Return the index file as pieces to be written one after the other; `sections` are those after the stamps."""
    assert 0 < len(kind.encode()) <= 16
    bodies: list[Buffer] = [encode_stamps(stamps), *(memoryview(section).cast("B") for section in sections)]
    assert len(bodies) <= SECTIONS_MAX
    position = _head_size(len(bodies))
    table = b""
    for body in bodies:
        position = _aligned(position)
        table += _PAIR.pack(position, len(body))
        position += len(body)
    digest = bytes.fromhex(_content_digest(kind, count, bodies[1:]))
    head = _HEAD.pack(MAGIC, VERSION, len(bodies), kind.encode(), position, count, digest) + table
    pieces: list[Buffer] = [head + _U64.pack(_head_check(head, bodies[0]))]
    position = len(pieces[0])
    for body in bodies:
        pieces += [bytes(_aligned(position) - position), body]
        position = _aligned(position) + len(body)
    return pieces


def pack_names(names: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return two sections, offsets and bytes, that `Index.name` reads."""
    offsets = [0]
    for name in names:
        offsets.append(offsets[-1] + len(name))
    return struct.pack(f"<{len(offsets)}Q", *offsets), b"".join(names)


def little_endian(values: "array[int]") -> memoryview:
    """Return the bytes of an array of numbers as index files have them."""
    assert array("H", [1]).tobytes() == b"\1\0"  # on another machine each number would be turned around
    return memoryview(values).cast("B")


def encode_stamps(stamps: Sequence[Stamp]) -> bytes:
    """Return section 0: per stamp i64 seconds, u64 size, u32 length of the path, path."""
    return b"".join(_STAMP.pack(each.mtime_s, each.size_bytes, len(each.path)) + each.path for each in stamps)


def parse_stamps(data: bytes) -> list[Stamp]:
    """Return the stamps of section 0; CorruptDataError where it ends amid one."""
    stamps: list[Stamp] = []
    position = 0
    while position < len(data):
        if len(data) - position < _STAMP.size:
            raise CorruptDataError("the stamps of the index end amid one")
        mtime_s, size_bytes, length = _STAMP.unpack_from(data, position)
        position += _STAMP.size
        if length > len(data) - position:
            raise CorruptDataError("the stamps of the index end amid a path")
        path = data[position : position + length]
        stamps.append(Stamp(path=path, mtime_s=mtime_s, size_bytes=size_bytes))
        position += length
    return stamps


_OTHER_NAME = "move that file away, or name another directory by index="


def _parse_head(data: memoryview) -> _Head:
    start = bytes(data[: _HEAD.size])
    if start[:8] != MAGIC and not MAGIC.startswith(start):
        raise UsageError("the file is no index of everstep", hint=_OTHER_NAME)
    if len(start) < _HEAD.size:
        raise CorruptDataError(f"the index ends after {len(start)} bytes")
    _, version, section_count, kind, size, count, digest = _HEAD.unpack(start)
    if version > VERSION:
        raise FormatVersionError(
            f"the index has version {version}, this everstep reads {VERSION}",
            hint="use the newer everstep, or name another directory by index=",
        )
    if version != VERSION or not 1 <= section_count <= SECTIONS_MAX or size != len(data):
        raise CorruptDataError(
            f"the index says version {version}, {section_count} sections and {size} bytes; it has {len(data)} bytes"
        )
    head_size = _head_size(section_count)
    if head_size > size:
        raise CorruptDataError("the index ends within its head")
    sections = _parse_table(bytes(data[_HEAD.size : head_size - 8]), head_size, size)
    begin, length = sections[0]
    check = _head_check(bytes(data[: head_size - 8]), data[begin : begin + length])
    if check != _U64.unpack_from(data, head_size - 8)[0]:
        raise CorruptDataError("the checksum of the head of the index does not hold")
    name = kind.rstrip(b"\0").decode("ascii", "replace")
    return _Head(kind=name, count=count, digest=digest.hex(), sections=sections)


def _parse_table(table: bytes, head_size: int, size: int) -> tuple[tuple[int, int], ...]:
    sections: list[tuple[int, int]] = []
    end = head_size
    for offset, length in _PAIR.iter_unpack(table):
        if offset != _aligned(end) or offset + length > size:
            raise CorruptDataError(
                f"section {len(sections)} of the index lies at [{offset}, {offset + length})"
            )
        end = offset + length
        sections.append((offset, length))
    if end != size:
        raise CorruptDataError(f"the sections of the index end at {end}, the file at {size}")
    return tuple(sections)


def _content_digest(kind: str, count: int, bodies: Sequence[Buffer]) -> str:
    digest = xxhash.xxh3_128(kind.encode() + _U64.pack(count))
    for body in bodies:
        digest.update(_U64.pack(len(body)))
        for start in range(0, len(body), _DIGEST_PIECE_BYTES):
            digest.update(body[start : start + _DIGEST_PIECE_BYTES])
    return digest.hexdigest()


def _head_check(head: bytes, stamps: Buffer) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(stamps)
    return digest.intdigest()


def _head_size(section_count: int) -> int:
    return _HEAD.size + 16 * section_count + 8


def _aligned(position: int) -> int:
    return (position + 7) // 8 * 8
