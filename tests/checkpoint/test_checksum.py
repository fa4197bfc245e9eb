import os

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.checksum import block_checksums, first_bad_block
from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES

_CONTENT = os.urandom(2 * BLOCK_SIZE_BYTES + 4567)
_CHECKSUMS = block_checksums(memoryview(_CONTENT), len(_CONTENT))


def test_a_published_value_of_xxh3() -> None:
    assert block_checksums(memoryview(b"abc"), 1) == (0xE6C632B61E964E1F,)  # XXH3_64bits("a")


@pytest.mark.parametrize("length", [0, 1, BLOCK_SIZE_BYTES - 1, BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES + 1])
def test_one_checksum_per_block_the_last_cut_at_the_length(length: int) -> None:
    expected = tuple(
        xxhash.xxh3_64_intdigest(_CONTENT[begin:length][:BLOCK_SIZE_BYTES])
        for begin in range(0, length, BLOCK_SIZE_BYTES)
    )

    assert block_checksums(memoryview(_CONTENT), length) == expected
    assert len(expected) == -(-length // BLOCK_SIZE_BYTES)
    assert first_bad_block(memoryview(_CONTENT), length, expected) is None


@given(st.sets(st.integers(0, 8 * len(_CONTENT) - 1), min_size=1, max_size=3))
def test_every_flipped_bit_is_found_in_its_block(bits: set[int]) -> None:
    damaged = bytearray(_CONTENT)
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8

    assert (
        first_bad_block(memoryview(damaged), len(damaged), _CHECKSUMS) == min(bits) // 8 // BLOCK_SIZE_BYTES
    )


def test_bytes_beyond_the_length_do_not_count() -> None:
    padded = bytearray(_CONTENT) + b"padding"

    assert first_bad_block(memoryview(padded), len(_CONTENT), _CHECKSUMS) is None


@pytest.mark.parametrize(
    ("expected", "bad"), [(_CHECKSUMS[:2], 2), (_CHECKSUMS[:0], 0), ((*_CHECKSUMS, 7), 3)]
)
def test_a_missing_or_surplus_checksum_is_a_bad_block(expected: tuple[int, ...], bad: int) -> None:
    assert first_bad_block(memoryview(_CONTENT), len(_CONTENT), expected) == bad


def test_any_contiguous_view_is_read_as_bytes() -> None:
    assert block_checksums(memoryview(_CONTENT[:4096]).cast("I"), 4096) == block_checksums(
        memoryview(_CONTENT), 4096
    )


@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_outside_the_view_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 4 bytes, got {length}"):
        block_checksums(memoryview(b"1234"), length)
