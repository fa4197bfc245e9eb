"""Inputs for parsers: good ones with bytes changed, JSON with values changed or nested absurdly, and plain noise."""

import json
from typing import cast

from hypothesis import strategies as st
from targets import Target

_INTEGERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400]),
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), _INTEGERS, st.floats(), st.text(max_size=20)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_PIECES = st.sampled_from(
    [
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b"\xff\xfe",
        b"\x00" * 64,
        b"1" * 10_000,
        b'"\\ud800"',
        b" " * 4096,
        b"NaN",
    ]
)


@st.composite
def inputs(draw: st.DrawFn, target: Target) -> bytes:
    """Return one input for this parser."""
    seed = draw(st.sampled_from(target.seeds))
    match draw(st.sampled_from(("bytes", "bytes", "json", "json", "noise"))):
        case "bytes":
            content = draw(_edited(seed))
        case "json":
            content = draw(_changed_json(seed))
        case _:
            content = draw(st.binary(max_size=300))
    return target.sign(content) if draw(st.booleans()) else content


@st.composite
def _edited(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return the seed with up to four edits: bytes put over, in, doubled or taken out."""
    content = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(("over", "insert", "cut", "double", "piece"))):
            case "over":
                new = draw(st.binary(min_size=1, max_size=8))
                content[place : place + len(new)] = new
            case "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del content[place : place + draw(st.integers(1, 64))]
            case "double":
                content[place:place] = content[place : place + draw(st.integers(1, 512))]
            case _:
                content[place:place] = draw(_PIECES)
    return bytes(content)


@st.composite
def _changed_json(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return the seed with one value of the JSON inside it changed; where there is none, edited."""
    begin, end = seed.find(b"{"), seed.rstrip().rfind(b"}") + 1
    try:
        document: object = json.loads(seed[begin:end])
    except ValueError:
        return draw(_edited(seed))
    text = json.dumps(_with_one_changed(draw, document)).encode()
    size = (end - begin) if len(text) <= end - begin else 0
    return seed[:begin] + text.ljust(size) + seed[end:]


def _with_one_changed(draw: st.DrawFn, value: object) -> object:
    """Go down to some value, and return everything with that one replaced, left out or given twice."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        fields = cast(dict[str, object], value)
        key = draw(st.sampled_from(sorted(fields)))
        match draw(st.integers(0, 9)):
            case 0:
                return {name: each for name, each in fields.items() if name != key}
            case 1:
                return fields | {draw(st.text(max_size=8)): draw(_JSON)}
            case _:
                return fields | {key: _with_one_changed(draw, fields[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        items = cast(list[object], value)
        place = draw(st.integers(0, len(items) - 1))
        changed = _with_one_changed(draw, items[place])
        return [*items[:place], *[changed] * draw(st.sampled_from((0, 1, 1, 1, 2))), *items[place + 1 :]]
    return draw(_JSON)
