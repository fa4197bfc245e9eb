"""The arena's layout: golden values, since daemon and readers of one version must agree on every byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.cache.arena_format import (
    Header,
    base_bytes,
    budget_for,
    read_header,
    record_bytes,
    write_header,
)

WORD = st.integers(0, (1 << 64) - 1)


def test_sizes() -> None:
    assert [record_bytes(length) for length in (0, 1, 8, 9, 100_000)] == [16, 24, 24, 32, 100_016]
    assert base_bytes(0) == 64
    assert base_bytes(1000) == 8064
    assert budget_for([0, 1, 9]) == 64 + 3 * 8 + 16 + 24 + 32


@given(st.integers(0, 5), WORD, WORD, WORD, WORD)
def test_a_header_comes_back(count: int, capacity: int, free: int, used: int, published: int) -> None:
    header = Header(
        sample_count=count,
        capacity_bytes=capacity,
        free_bytes=free,
        used_bytes=used,
        published_count=published,
    )
    words = memoryview(bytearray(base_bytes(5))).cast("Q")
    write_header(words, header)
    assert read_header(words) == header


@pytest.mark.parametrize("words", [b"", bytes(64), b"EVSTEPC1" + b"\xff" * 56])
def test_what_is_no_arena_is_refused(words: bytes) -> None:
    with pytest.raises(ValueError, match="no cache arena"):
        read_header(memoryview(words).cast("Q"))
