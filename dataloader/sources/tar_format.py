"""Reads the headers of a tar archive: ustar, GNU (long names) and pax, without reading any data.

The layout is POSIX.1-2017 (pax) and the GNU tar manual's "Basic Tar Format": blocks of 512 bytes; a header holds name
(0, 100), size (124, 12), checksum (148, 8), type (156), magic (257, 6) and prefix (345, 155). What cannot be read
by position (sparse members) is refused. Headers of extended names are read up to EXTENDED_BYTES_MAX.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ...core.errors import CorruptDataError, UsageError

BLOCK_BYTES = 512
EXTENDED_BYTES_MAX = 1 << 20
SIZE_MAX = (1 << 63) - 1
LOOK_ON_BYTES = 1 << 20
"""After the end mark: tar fills records of 10 KiB, on some tapes of 256 KiB, with zeros."""

_FILES = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_EMPTY = bytes(BLOCK_BYTES)


class Member(NamedTuple):
    """A regular file in an archive; `check` is the XXH32 of the header block right before its data."""

    name: bytes
    offset: int
    size_bytes: int
    check: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TarHeader:
    """One header block."""

    name: bytes
    size_bytes: int
    type: bytes


@dataclass(slots=True)
class _Extended:
    """What the headers before a member say about it."""

    name: bytes | None = None
    size_bytes: int | None = None


def scan_members(read: Callable[[int, int], bytes], size_bytes: int) -> Generator[Member, None, int]:
    """Yield the regular files of an archive of `size_bytes`; `read(offset, size)` returns less only at its end.

    Return where the mark of its end is, or its size where it has none.

    Raises:
        UsageError: it is compressed, or a member is sparse.
        CorruptDataError: it is no tar archive, or ends amid a member.
    """
    extended = _Extended()
    offset = 0
    while offset < size_bytes:
        block = read(offset, BLOCK_BYTES)
        if offset == 0:
            _refuse_compressed(block)
        header = parse_header(block, offset)
        if header is None:
            return offset
        offset += BLOCK_BYTES
        if header.type in b"xXgLK":
            _extend(extended, header, read, offset)
            offset += _padded(header.size_bytes)
            continue
        size = header.size_bytes if extended.size_bytes is None else extended.size_bytes
        name = header.name if extended.name is None else extended.name
        extended = _Extended()
        if header.type in _WITHOUT_DATA:
            continue
        if header.type == b"S":
            raise UsageError(f"member {name!r} is sparse", hint="write the archive without --sparse")
        if offset + size > size_bytes:
            raise CorruptDataError(
                f"member {name!r} ends at {offset + size}, the archive at {size_bytes}: it was cut off"
            )
        if header.type in _FILES and not name.endswith(b"/"):
            yield Member(name, offset, size, header_check(block))
        offset += _padded(size)
    return size_bytes


def has_end(read: Callable[[int, int], bytes], size_bytes: int) -> bool:
    """Return whether an archive ends with a block of zeros, as it should; without one its end may be cut off."""
    tail = read(max(0, size_bytes - BLOCK_BYTES), BLOCK_BYTES)
    return size_bytes >= BLOCK_BYTES and tail == _EMPTY


def goes_on(read: Callable[[int, int], bytes], begin: int, size_bytes: int) -> int | None:
    """Return where a header follows the end mark, or None: archives put one after the other, or a block that was lost.

    Looked at is the first block that is not empty from `begin` on, where the end mark is, within LOOK_ON_BYTES.
    """
    rest = read(begin, min(LOOK_ON_BYTES, max(0, size_bytes - begin)))
    for place in range(0, len(rest) - BLOCK_BYTES + 1, BLOCK_BYTES):
        block = rest[place : place + BLOCK_BYTES]
        if block != _EMPTY:
            try:
                parse_header(block, begin + place)
            except CorruptDataError:
                return None  # what fills the last record of a tape
            return begin + place
    return None


def parse_header(block: bytes, offset: int) -> TarHeader | None:
    """Return the header in a block, or None for the block of zeros at the end; CorruptDataError otherwise."""
    if block == _EMPTY:
        return None
    if len(block) != BLOCK_BYTES:
        raise CorruptDataError(f"the archive ends amid the header at {offset}")
    stored = _number(block[148:156], "checksum", offset)
    plain = sum(block[:148]) + sum(block[156:]) + 8 * ord(" ")
    signed = plain - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
    if stored not in {plain, signed}:
        raise CorruptDataError(f"there is no tar header at {offset}: its checksum does not hold")
    name = _text(block[:100])
    if block[257:263] == b"ustar\0":  # GNU's own headers have other things in the place of the prefix
        prefix = _text(block[345:500])
        name = prefix + b"/" + name if prefix else name
    return TarHeader(name=name, size_bytes=_number(block[124:136], "size", offset), type=block[156:157])


def header_check(block: bytes) -> int:
    """Return what tells a header block from another one: XXH32; the block holds name, size and time of its member."""
    return xxhash.xxh32_intdigest(block)


def parse_pax(data: bytes, offset: int) -> dict[bytes, bytes]:
    """Return the records `length key=value\\n` of a pax header; CorruptDataError where they do not fit."""
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        digits, space, _ = data[position : position + 21].partition(b" ")
        length = int(digits) if digits.isdigit() and space else 0
        record = data[position + len(digits) + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if length > len(data) - position or not record.endswith(b"\n") or not equals:
            raise CorruptDataError(f"the pax header at {offset} has a bad record at {position}")
        records[key] = value[:-1]
        position += length
    return records


def _extend(extended: _Extended, header: TarHeader, read: Callable[[int, int], bytes], offset: int) -> None:
    if header.size_bytes > EXTENDED_BYTES_MAX:
        raise CorruptDataError(f"the extended header at {offset} has {header.size_bytes} bytes")
    data = read(offset, header.size_bytes)
    if len(data) != header.size_bytes:
        raise CorruptDataError(f"the archive ends amid the extended header at {offset}")
    if header.type == b"L":
        extended.name = _text(data)
    elif header.type in b"xX":
        records = parse_pax(data, offset)
        if any(key.startswith(b"GNU.sparse.") for key in records):
            raise UsageError(f"the member at {offset} is sparse", hint="write the archive without --sparse")
        extended.name = records.get(b"path", extended.name)
        if b"size" in records:
            extended.size_bytes = _decimal(records[b"size"], offset)


def _decimal(text: bytes, offset: int) -> int:
    if not text.isdigit() or len(text) > 19 or int(text) > SIZE_MAX:
        raise CorruptDataError(f"the pax header at {offset} has the size {text[:32]!r}")
    return int(text)


def _number(field: bytes, what: str, offset: int) -> int:
    """Return a number in octal digits, or in binary where the first bit is set (GNU)."""
    if field[0] == 0x80:
        value = int.from_bytes(field[1:], "big")
    else:
        digits = field.partition(b"\0")[0].strip(b" ")
        if digits.strip(b"01234567"):
            raise CorruptDataError(f"the tar header at {offset} has the {what} {field!r}")
        value = int(digits or b"0", 8)
    if value > SIZE_MAX:
        raise CorruptDataError(f"the tar header at {offset} has the {what} {value}")
    return value


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _padded(size: int) -> int:
    return (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def _refuse_compressed(block: bytes) -> None:
    for start, name in _COMPRESSED.items():
        if block.startswith(start):
            raise UsageError(
                f"it is compressed by {name}", hint="decompress it: samples are read by position"
            )
