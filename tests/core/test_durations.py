import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.durations import duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("90s", 90), ("15m", 900), ("6h", 21600), ("1.5d", 129600), ("2w", 1209600)],
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.0000415, "41.5 us"),
        (0.4124, "412 ms"),
        (0.99949, "999 ms"),
        (0.99951, "1 s"),
        (8.06, "8.06 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (11135, "3.09 h"),
        (22_810_000, "264 d"),
        (8.64e8, "10000 d"),
        (-0.02, "-20 ms"),
    ],
)
def test_a_duration_for_people_has_three_digits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
