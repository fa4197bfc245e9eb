"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("5000000000", 5_000_000_000),
        ("5e9", 5_000_000_000),
        ("5GB", 5_000_000_000),
        ("5 GB", 5_000_000_000),
        ("5GiB", 5 * 1024**3),
        ("1.5KiB", 1536),
        ("2kB", 2000),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "5 G", "5Gb", "GB", "1e999", "nan", "inf", "0.1", "5GB 3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="a size is"):
        parse_size(text)


@given(st.integers(1, 2**53))
def test_whole_numbers_are_taken_exactly(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes


@given(st.integers(1, 2**50))
def test_what_is_printed_can_be_given(size_bytes: int) -> None:
    assert parse_size(size_text(size_bytes)) == pytest.approx(size_bytes, rel=0.06)
