import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("6h", 21600), ("1.5d", 129600), ("2w", 1209600)]
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "6", "h", "6 h", "-6h", "0h", "0.0s", "6h30m", "1e9d", "٦h", "6H", "6h\n", ".5h"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as '6h'"):
        parse_duration(text)


@given(st.text())
def test_any_text_is_a_positive_number_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_duration(text) > 0
