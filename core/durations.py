"""Durations as people write them: `90s`, `15m`, `6h`, `7d`, `2w`."""

import re

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_FORM = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")


def parse_duration(text: str) -> float:
    """Return the seconds of a positive duration; ValueError on anything else."""
    found = _FORM.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise ValueError(f"a duration is a positive number with s, m, h, d or w, such as '6h'; got {text!r}")
    return seconds
