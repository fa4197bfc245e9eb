"""Several named parts as one piece of bytes: what get_bytes returns for a sample that is several files.

0   4     "ESP1"
4   4     u32 number of parts n, at most 65,536
8   12 n  per part u32 length of its name, u64 length of its data
…         the names (UTF-8), one after the other; then the data, one after the other
"""

import struct
from collections.abc import Sequence

from ...core.errors import CorruptDataError

MAGIC = b"ESP1"
PARTS_MAX = 65_536
_HEAD = struct.Struct("<4sI")
_ENTRY = struct.Struct("<IQ")


def encode_parts(parts: Sequence[tuple[str, bytes | memoryview]]) -> bytes:
    """Return the parts as one piece of bytes, in this order."""
    names = [name.encode("utf-8", "surrogateescape") for name, _ in parts]
    table = [_ENTRY.pack(len(name), len(data)) for name, (_, data) in zip(names, parts, strict=True)]
    return b"".join((_HEAD.pack(MAGIC, len(parts)), *table, *names, *(data for _, data in parts)))


def read_parts(data: bytes | bytearray | memoryview) -> dict[str, memoryview]:
    """Return name -> data, without copying; CorruptDataError where `data` is not what `encode_parts` wrote."""
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise CorruptDataError(f"{len(view)} bytes are no sample of several parts")
    magic, count = _HEAD.unpack_from(view)
    position = _HEAD.size + _ENTRY.size * count
    if magic != MAGIC or count > PARTS_MAX or position > len(view):
        raise CorruptDataError(f"these are no parts of a sample: {bytes(view[:8])!r}")
    lengths = list(_ENTRY.iter_unpack(view[_HEAD.size : position]))
    if position + sum(name + size for name, size in lengths) != len(view):
        raise CorruptDataError(f"the lengths of the {count} parts do not add up to {len(view)} bytes")
    names: list[str] = []
    for length, _ in lengths:
        names.append(bytes(view[position : position + length]).decode("utf-8", "surrogateescape"))
        position += length
    parts: dict[str, memoryview] = {}
    for name, (_, size) in zip(names, lengths, strict=True):
        parts[name] = view[position : position + size]
        position += size
    if len(parts) != count:
        raise CorruptDataError("two parts of the sample have the same name")
    return parts
