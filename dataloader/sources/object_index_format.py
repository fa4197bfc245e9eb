"""Sections of the index of a list of objects.

1, 2  offsets and bytes of the names, as the file system of the store has them
3     u64[objects]  sizes in bytes; 2^64 - 1 where the store does not say
4, 5  offsets and bytes of what the store tells versions of an object apart by (ETag, CRC, MD5); may be empty
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from ...core.errors import CorruptDataError
from .index_format import Buffer, Index, encode_index, little_endian

KIND = "objects"
SIZE_UNKNOWN = (1 << 64) - 1


class StoredObject(NamedTuple):
    """One object of a store; `tag` is "" and `size_bytes` None where the store does not say."""

    name: str
    size_bytes: int | None
    tag: str


def encode_object_index(objects: Iterable[StoredObject]) -> list[Buffer]:
    """Return the index file in pieces; the objects in the order that they shall have."""
    names, name_offsets = bytearray(), array("Q", [0])
    tags, tag_offsets = bytearray(), array("Q", [0])
    sizes = array("Q")
    for each in objects:
        names += each.name.encode("utf-8", "surrogateescape")
        name_offsets.append(len(names))
        tags += each.tag.encode("utf-8", "surrogateescape")
        tag_offsets.append(len(tags))
        sizes.append(SIZE_UNKNOWN if each.size_bytes is None else each.size_bytes)
    sections: list[Buffer] = [
        little_endian(name_offsets),
        names,
        little_endian(sizes),
        little_endian(tag_offsets),
        tags,
    ]
    return encode_index(KIND, len(sizes), sections, [])


def check_object_index(index: Index) -> None:
    """Return if the sections fit the number of objects; CorruptDataError otherwise."""
    table = 8 * (index.count + 1)
    index.check_lengths([table, None, 8 * index.count, table, None])


def object_at(index: Index, sample: int) -> StoredObject:
    """Return one object."""
    size = index.u64(3, sample)
    name = index.name(1, sample).decode("utf-8", "surrogateescape")
    if not name:
        raise CorruptDataError(f"the index has no name for sample {sample}")
    tag = index.name(4, sample).decode("utf-8", "surrogateescape")
    return StoredObject(name, None if size == SIZE_UNKNOWN else size, tag)
