"""Prepared samples: whatever a tree holds comes back as it was, and what cannot be stored is named by its path."""

import contextlib
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import CorruptDataError, StateTypeError
from everstep.dataloader.tensor_tree import decode_sample, encode_sample

ARRAYS = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.sampled_from(
        ["bool", "int8", ">i4", "uint64", "float16", "float64", "complex64", "S3", "U2", "M8[s]"]
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
TENSORS = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from(
        [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=20)
)
TREES = st.recursive(
    st.one_of(
        PLAIN,
        ARRAYS,
        TENSORS,
        ARRAYS.map(lambda array: array.reshape(-1)[:1].sum() if array.dtype.kind in "iuf" else 1),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=4),
    ),
    max_leaves=10,
)


def round_trip(sample: object) -> object:
    return decode_sample(bytearray(encode_sample(sample)))


def assert_same(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        assert [type(key) for key in found] == [type(key) for key in expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert isinstance(found, np.ndarray | np.generic)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


@given(TREES)
def test_a_tree_comes_back(sample: object) -> None:
    assert_same(round_trip(sample), sample)


def test_views_are_stored_as_they_are_read_and_come_back_writable() -> None:
    base = torch.arange(12).reshape(3, 4)
    array = np.arange(12).reshape(3, 4)[::2, ::-1]
    found = round_trip({"t": base.t()[1:], "a": array, "nan": float("nan"), "c": torch.tensor([1j]).conj()})
    assert isinstance(found, dict)
    assert torch.equal(found["t"], base.t()[1:])
    assert np.array_equal(found["a"], array)
    assert math.isnan(found["nan"])
    assert torch.equal(found["c"], torch.tensor([-1j]))
    found["t"] += 1
    found["a"] += 1
    assert torch.equal(found["t"], base.t()[1:] + 1)
    assert np.array_equal(found["a"], array + 1)


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("sample", "path"),
    [
        ({"image": [1, object()]}, r"sample\['image'\]\[1\] is a builtins.object"),
        ((Point(1),), r"sample\[0\] is a \S*Point"),
        (OrderedDict(), r"sample is a collections.OrderedDict"),
        ({"a": {1, 2}}, r"sample\['a'\] is a builtins.set"),
        ([np.array([object()])], r"sample\[0\] is a numpy.ndarray"),
        ([np.zeros(2, dtype=[("a", "i4")])], r"sample\[0\] is a numpy.ndarray"),
        ([torch.zeros(2).to_sparse()], r"sample\[0\] is a torch.Tensor"),
        ([torch.zeros(2, requires_grad=True)], r"sample\[0\] is a torch.Tensor"),
        ([torch.nn.Parameter(torch.zeros(1))], r"sample\[0\] is a torch.nn.parameter.Parameter"),
        ({(1, 2): 3}, r"sample has the key \(1, 2\), a tuple"),
        (1j, "sample is a builtins.complex"),
    ],
)
def test_what_cannot_be_stored_is_named(sample: object, path: str) -> None:
    with pytest.raises(StateTypeError, match=path):
        encode_sample(sample)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(StateTypeError, match="more than 64 levels deep"):
        encode_sample(tree)


@given(TREES, st.data())
def test_damaged_bytes_give_one_error_only(sample: object, data: st.DataObject) -> None:
    octets = bytearray(encode_sample(sample))
    where = data.draw(st.integers(0, len(octets) - 1))
    octets[where] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(octets)))
    with contextlib.suppress(CorruptDataError):  # anything else would fail the test
        decode_sample(octets[:cut])
