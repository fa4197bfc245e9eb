"""Sections of the index of a tar shard, and how its members make samples: WebDataset's naming rule.

Members that follow each other with the same name up to the first dot of the last path component are one sample; that
name is its key, what comes after the dot, in lower case, names the part. Members without a dot, or whose last
component begins with one, and those named `__x__` belong to no sample. A key that comes again later, after other
members, is another sample, as WebDataset has it.

    1, 2  offsets and bytes of the keys
    3     u64[samples + 1]  number of the first part of each sample, and the number of parts
    4     u32[parts]        number of the part's name
    5     u64[parts]        where its data starts in the archive
    6     u64[parts]        its size in bytes
    7     u32[parts]        XXH32 of the header block before it
    8, 9  offsets and bytes of the names of parts
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.errors import CorruptDataError, UsageError
from .index_format import Buffer, Index, Stamp, encode_index, little_endian, pack_names
from .tar_format import Member

KIND = "tar"
PART_NAMES_MAX = 4096


class Part(NamedTuple):
    """One file of a sample."""

    name: str
    offset: int
    size_bytes: int
    check: int


def key_and_part(name: bytes) -> tuple[bytes, bytes] | None:
    """Return (key, name of the part) of a member, or None where it belongs to no sample."""
    folder, slash, last = name.rpartition(b"/")
    stem, dot, part = last.partition(b".")
    if not stem or not dot or (name.startswith(b"__") and name.endswith(b"__")):
        return None
    return folder + slash + stem, part.lower()


def encode_tar_index(members: Iterable[Member], stamps: Sequence[Stamp]) -> list[Buffer]:
    """Return the index file of one shard in pieces; CorruptDataError where a sample has a part twice."""
    keys, key_offsets = bytearray(), array("Q", [0])
    part_starts, names = array("Q"), array("I")
    offsets, sizes, checks = array("Q"), array("Q"), array("I")
    numbers: dict[bytes, int] = {}
    key: bytes | None = None
    seen: set[bytes] = set()
    for member in members:
        split = key_and_part(member.name)
        if split is None:
            continue
        if split[0] != key:
            key, seen = split[0], set()
            keys += key
            key_offsets.append(len(keys))
            part_starts.append(len(offsets))
        if split[1] in seen:
            raise CorruptDataError(f"sample {key!r} has the part {split[1]!r} twice")
        seen.add(split[1])
        if len(numbers) == PART_NAMES_MAX and split[1] not in numbers:
            raise UsageError(
                f"the archive has more than {PART_NAMES_MAX} names of parts, {split[1]!r} is another one",
                hint="a part is named by what follows the first dot: use no dots in keys",
            )
        names.append(numbers.setdefault(split[1], len(numbers)))
        offsets.append(member.offset)
        sizes.append(member.size_bytes)
        checks.append(member.check)
    part_starts.append(len(offsets))
    tables = [key_offsets, part_starts, names, offsets, sizes, checks]
    key_table, *part_tables = (little_endian(table) for table in tables)
    sections: list[Buffer] = [key_table, keys, *part_tables, *pack_names(list(numbers))]
    return encode_index(KIND, len(part_starts) - 1, sections, stamps)


def check_tar_index(index: Index) -> None:
    """Return if the sections fit each other; CorruptDataError otherwise."""
    if index.section_count() != 10 or index.length(3) != 8 * (index.count + 1):
        raise CorruptDataError("the sections of the index do not fit its number of samples")
    parts = index.u64(3, index.count)
    if parts > index.length(4):
        raise CorruptDataError("the index has fewer parts than its samples need")
    table = 8 * (index.count + 1)
    index.check_lengths([table, None, table, 4 * parts, 8 * parts, 8 * parts, 4 * parts, None, None])


def parts_at(index: Index, sample: int) -> list[Part]:
    """Return the parts of a sample in the order of the archive."""
    start, stop = index.u64(3, sample), index.u64(3, sample + 1)
    if not start < stop <= index.length(4) // 4:
        raise CorruptDataError(f"the index has the parts [{start}, {stop}) for sample {sample}")
    return [
        Part(_text(index.name(8, index.u32(4, i))), index.u64(5, i), index.u64(6, i), index.u32(7, i))
        for i in range(start, stop)
    ]


def key_at(index: Index, sample: int) -> str:
    """Return the key of a sample; bytes that are no UTF-8 as surrogates."""
    return _text(index.name(1, sample))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
