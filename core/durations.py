"""Durations as people write and read them: `300ms`, `90s`, `15m`, `6h`, `7d`, `2w`; `412 ms`."""

import re

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_FORM = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|[smhdw])")


def parse_duration(text: str) -> float:
    """Return the seconds of a positive duration; ValueError on anything else."""
    found = _FORM.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise ValueError(
            f"a duration is a positive number with ms, s, m, h, d or w, such as '6h'; got {text!r}"
        )
    return seconds


def duration_text(seconds: float) -> str:
    """Return a duration for people, by three digits: `412 ms`, `8.1 s`, `12 min`, `3.1 h`, `264 d`."""
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for limit_s, unit_s, unit in ((119.5, 1, "s"), (7170, 60, "min"), (171_000, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    days = seconds / 86400
    return f"{days:.3g} d" if days < 1000 else f"{days:.0f} d"
