"""Tagged JSON: decode of encode is the identity with its types; foreign bytes give declared errors only."""

import contextlib
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.checkpoint import value_format
from everstep.checkpoint.value_format import DEPTH_MAX, decode_value, dump_values, encode_value, load_values
from everstep.core.errors import CorruptDataError, StateTypeError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(
        st.characters(categories=["Cs", "L"])
    ),  # lone surrogates: what os.fsdecode makes of odd file names
    st.binary(),
    st.binary().map(bytearray),
    st.complex_numbers(),
)
hashables = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text())
)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tuple", "$leaf", "a", ""]), inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4).map(OrderedDict),
        st.sets(hashables, max_size=4),
        st.frozensets(hashables, max_size=4),
        st.lists(hashables, max_size=6).map(Counter),
        st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 6)),
    )


values = st.recursive(scalars, containers, max_leaves=20)


def same(left: object, right: object) -> bool:
    """Equal in type, value and order, with NaN equal to itself and -0.0 apart from 0.0."""
    if type(left) is not type(right):
        return False
    match left, right:
        case float(), float():
            return repr(left) == repr(right)
        case complex(), complex():
            return same(left.real, right.real) and same(left.imag, right.imag)
        case deque(), deque():
            return left.maxlen == right.maxlen and same(list(left), list(right))
        case dict(), dict():
            return same([*left.items()], [*right.items()])
        case (list(), list()) | (tuple(), tuple()):
            return len(left) == len(right) and all(map(same, left, right))
        case _:
            return left == right


def through(value: object) -> object:
    return decode_value(load_values(dump_values(encode_value(value, "state"))))


@given(values)
@example(10**6000)
@example(-(2**63) - 1)
@example(2**63 - 1)
@example({"$tuple": [1]})
@example({"a": 1, "$b": 2})
@example({"\ud800": 1})
@example("\udc80")
@example([-0.0, math.nan, math.inf, 5e-324, 1e22, 1.0])
@example(complex(-0.0, math.nan))
@example({1: "a", "1": "b", None: (), True and 2: []})
@example(deque([1, 2], maxlen=2))
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert same(through(value), value)


@given(st.binary() | st.text().map(str.encode))
@example(b"[" * 100_000)
@example(b"1e999")
@example(b'{"a": NaN}')
def test_foreign_bytes_are_refused_or_decoded(data: bytes) -> None:
    with contextlib.suppress(CorruptDataError):  # nothing else may come out
        value = decode_value(load_values(data))
        assert same(through(value), value)


TAGS = [
    "$tuple", "$int", "$float", "$str", "$bytes", "$bytearray", "$dict", "$odict", "$set", "$fset", "$deque",
    "$counter", "$complex", "$x",
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=3),
        st.builds(
            lambda tag, content: {tag: content},
            st.sampled_from(TAGS),
            inner | st.lists(st.lists(inner, min_size=2, max_size=2)),
        ),
    ),
    max_leaves=15,
)


@given(json_values)
@example({"$deque": [2**63 - 1, []]})
@example({"$deque": [2**64, []]})
@example({"$deque": [-1, []]})
@example({"$set": [[1]]})
@example({"$dict": [[{"$dict": []}, 1]]})
@example({"$counter": [["a", "b"]]})
@example({"$int": "z"})
@example({"$bytes": "é"})
@example({"$complex": ["1"]})
@example({"$str": "/w=="})
def test_any_json_is_refused_or_decoded(document: object) -> None:
    data = json.dumps(document).encode()
    with contextlib.suppress(CorruptDataError):  # nothing else may come out
        value = decode_value(load_values(data))
        assert same(through(value), value)


def nested(kind: str, depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        match kind:
            case "list":
                value = [value]
            case "tuple":
                value = (value,)
            case "dict":
                value = {"a": value}
            case _:
                value = {1: value}
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "int dict"])
def test_what_can_be_encoded_can_be_decoded_however_deep(kind: str) -> None:
    deepest = nested(kind, DEPTH_MAX)
    assert same(through(deepest), deepest)
    with pytest.raises(StateTypeError, match="nested deeper"):
        encode_value(nested(kind, DEPTH_MAX + 1), "state")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(StateTypeError, match="does it contain itself"):
        encode_value(value, "state")


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    "value", [Point(1, 2), Decimal(1), defaultdict(int), object(), (1).__add__, range(3), type]
)
def test_an_object_of_another_type_is_refused_with_the_path(value: object) -> None:
    with pytest.raises(StateTypeError, match=r"scheduler\.inner\[1\] is a .*cannot be saved"):
        encode_value({"inner": [0, value]}, "scheduler")


def test_a_caller_may_know_more_types() -> None:
    def encode(path: str, value: object) -> object:
        return {"$decimal": str(value)} if isinstance(value, Decimal) else NotImplemented

    def decode(tag: str, content: object) -> object:
        return Decimal(str(content)) if tag == "$decimal" else NotImplemented

    document = encode_value({"a": (Decimal("1.5"),)}, "x", encode)
    assert decode_value(load_values(dump_values(document)), decode) == {"a": (Decimal("1.5"),)}
    with pytest.raises(CorruptDataError, match=r"unknown tag \$decimal"):
        decode_value(document)


def test_malformed_content_of_a_callers_tag_is_corrupt_data() -> None:
    def decode(tag: str, content: object) -> object:
        raise KeyError(tag)

    with pytest.raises(CorruptDataError, match=r"the tag \$mine"):
        decode_value({"$mine": 1}, decode)


def test_a_document_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_format, "VALUES_SIZE_BYTES_MAX", 100)
    assert len(dump_values("x" * 90)) == 92
    with pytest.raises(StateTypeError, match=r"run\.log"):
        dump_values("x" * 99)


def test_sets_are_written_in_one_order() -> None:
    assert encode_value({"b", "a", "c"}, "x") == {"$set": ["a", "b", "c"]}
