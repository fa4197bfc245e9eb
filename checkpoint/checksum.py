"""Checksums of segment bytes: XXH3-64 of each 4 MiB block, the last one cut at the exact length.

XXH3 finds accidents, not attackers (reference: xxhash.com; 64 bits miss one corruption in 1.8e19). xxhash lets
go of the GIL for blocks of this size, so several threads check at once.
"""

from collections.abc import Iterator, Sequence

import xxhash

from .manifest_types import BLOCK_SIZE_BYTES


def block_checksums(view: memoryview, length_bytes: int) -> tuple[int, ...]:
    """Return the checksum of each block of the first `length_bytes` of `view`; none for length 0."""
    return tuple(_checksums(view, length_bytes))


def first_bad_block(view: memoryview, length_bytes: int, expected: Sequence[int]) -> int | None:
    """Return the index of the first block that differs from `expected`, or None when all hold.

    A block without a checksum and a checksum without a block differ. Stops at the first difference.
    """
    count = 0
    for count, found in enumerate(_checksums(view, length_bytes), start=1):
        if count > len(expected) or found != expected[count - 1]:
            return count - 1
    return None if count == len(expected) else count


def block_checksum(block: memoryview) -> int:
    """Return the checksum of one block's bytes."""
    return xxhash.xxh3_64_intdigest(block)


def _checksums(view: memoryview, length_bytes: int) -> Iterator[int]:
    octets = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if not 0 <= length_bytes <= len(octets):
        raise ValueError(f"length must be 0 to {len(octets)} bytes, got {length_bytes}")
    for begin in range(0, length_bytes, BLOCK_SIZE_BYTES):
        yield block_checksum(octets[begin : min(begin + BLOCK_SIZE_BYTES, length_bytes)])
