"""Sizes as people write and read them: `5GB`, `512MiB`, `5e9`; `3.1 MiB`."""

import re
from decimal import Decimal

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_UNITS["KiB"] = 1024  # the one binary unit that is not written with the letter of the decimal one
_FORM = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?(?:[eE][0-9]{1,2})?) ?([A-Za-z]{0,3})")


def parse_size(text: str) -> int:
    """Return the bytes of a size of at least one byte; ValueError on anything else."""
    found = _FORM.fullmatch(text)
    size_bytes = int(Decimal(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if not size_bytes:
        raise ValueError(
            f"a size is a number of bytes, or one with kB, MB, GB, TB, KiB, MiB, GiB or TiB; got {text!r}"
        )
    return size_bytes


def size_text(size_bytes: float) -> str:
    """Return bytes for people: `3.1 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size_bytes /= 1024
        if size_bytes < 1024 or unit == "TiB":
            break
    return f"{size_bytes:.1f} {unit}"
