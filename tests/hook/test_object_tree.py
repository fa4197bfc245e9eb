"""Trees of values: what a state_dict may hold comes back with its types, dtypes, strides and sharing."""

import collections
import contextlib
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from everstep.checkpoint.value_format import dump_values
from everstep.core.errors import CorruptDataError, StateMismatchError, StateTypeError
from everstep.hook.component import Component, Laziness, Sink
from everstep.hook.object_tree import TreeDecoder, TreeEncoder, leaf_names
from everstep.hook.state_testing import bits, store
from everstep.hook.stored_state import StoredState


class Tree:
    """A component of one value."""

    name = "x"

    def __init__(self, value: object) -> None:
        self.value = value

    checks_bytes = True

    def capture(self, sink: Sink) -> None:
        sink.value(TreeEncoder(sink).encode(self.value, self.name))

    def check(self, stored: StoredState) -> None:
        for leaf in leaf_names(stored.values(self.name)):
            stored.spec(leaf)

    def apply(self, stored: StoredState) -> None:
        self.value = TreeDecoder(stored).decode(stored.values(self.name))


def through(value: object) -> Any:
    tree: Component = Tree(value)
    stored = store([tree])
    tree.check(stored)
    tree.apply(stored)
    assert isinstance(tree, Tree)
    return tree.value


def leaves(value: object) -> dict[str, tuple[str, Laziness]]:
    from everstep.hook.capture import capture_state

    captured = capture_state([Tree(value)])
    return {leaf.spec.name: (leaf.spec.dtype, leaf.laziness) for leaf in captured.leaves}


def test_tensors_anywhere_in_a_tree() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    value = {
        "list": [torch.arange(3), (torch.tensor(1.5), None)],
        1: torch.zeros(0, 2, dtype=torch.bfloat16),
        ("a", 2): image,
        "parameter": nn.Parameter(torch.ones(2)),
        "fp8": torch.ones(3).to(torch.float8_e5m2),
    }
    found = through(value)
    assert list(found) == list(value)
    assert bits(found["list"][0]) == bits(value["list"][0])  # pyright: ignore[reportArgumentType]
    assert found["list"][1][0] == 1.5
    assert (found[1].shape, found[1].dtype) == ((0, 2), torch.bfloat16)
    assert found["a", 2].stride() == image.stride()
    assert bits(found["a", 2]) == bits(image)
    assert found["parameter"].tolist() == [1.0, 1.0]
    assert found["fp8"].dtype == torch.float8_e5m2


def test_leaves_are_named_by_their_path_and_eager() -> None:
    value = {
        "a": [torch.zeros(1), {"b.c": torch.zeros(2)}],
        "a[1]": {"b": {"c": torch.zeros(3)}},
        7: torch.zeros(4),
    }
    assert leaves(value) == {
        "x['a'][0]": ("float32", Laziness.EAGER),
        "x['a'][1].b.c": ("float32", Laziness.EAGER),
        "x['a[1]'].b.c": ("float32", Laziness.EAGER),
        "x[7]": ("float32", Laziness.EAGER),
    }


def test_paths_that_read_the_same_get_names_of_their_own() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert list(leaves(value)) == ["x.a.b", "x.a.b#2"]
    found = through(value)
    assert (found["a.b"].item(), found["a"]["b"].item()) == (0.0, 1.0)


def test_tensors_that_share_memory_share_it_again() -> None:
    flat = torch.arange(6.0)
    found = through({"flat": flat, "same": flat, "views": [flat[:2], flat[2:].view(2, 2)]})
    found["views"][1].zero_()
    assert found["flat"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    found["flat"][0] = 7
    assert found["same"][0] == 7


@pytest.mark.parametrize("size", [0, 4096, 4097, 100_000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_short_and_long(size: int, kind: type) -> None:
    value = kind(b"ab\0" * (size // 3 + 1))[:size]
    found = through([value])
    assert (type(found[0]), found[0]) == (kind, value)
    assert len(leaves(value)) == (size > 4096)


plain_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)


@given(plain_dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))))
def test_arrays_of_any_dtype(array: npt.NDArray[Any]) -> None:
    found = through((array,))[0]
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3000.0).reshape(30, 100),
        np.asfortranarray(np.arange(3000.0).reshape(30, 100)),
        np.arange(6000.0)[::2],
        np.broadcast_to(np.arange(10.0), (500, 10)),
        np.arange(3000, dtype=">i4"),
        np.array(["long"] * 2000),
        np.arange(2000).astype("M8[s]"),
    ],
)
def test_large_arrays_are_leaves_of_bytes(array: npt.NDArray[Any]) -> None:
    assert leaves([array]) == {"x[0]": ("uint8", Laziness.EAGER)}
    found = through([array])[0]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    by_column = [made.flags.f_contiguous and not made.flags.c_contiguous for made in (array, found)]
    assert by_column[0] == by_column[1]


@pytest.mark.parametrize(
    "scalar",
    [
        np.float64(0.1),
        np.float32(np.nan),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1j),
        np.str_("é"),
        np.str_(""),
        np.bytes_(b"a\0"),
        np.datetime64("2024-02-29"),
        np.float16(1),
        np.uint64(2**64 - 1),
        np.longdouble(1) / 3,
    ],
)
def test_numpy_scalars(scalar: np.generic) -> None:
    found = through({"a": scalar})["a"]
    assert type(found) is type(scalar)
    assert found.tobytes() == scalar.tobytes()


@pytest.mark.parametrize(
    "value",
    [torch.float8_e4m3fn, torch.device("cuda", 1), torch.device("cpu"), torch.Size([2, 3]), np.dtype(">f4")],
)
def test_small_types_of_torch_and_numpy(value: object) -> None:
    found = through({"a": value})["a"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_sparse_tensors() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    uncoalesced = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True)  # pyright: ignore[reportArgumentType]
    found = through({"pairs": dense.to_sparse(), "rows": dense.to_sparse_csr(), "twice": uncoalesced})
    assert found["pairs"].is_coalesced()
    assert torch.equal(found["pairs"].to_dense(), dense)
    assert found["rows"].layout is torch.sparse_csr
    assert torch.equal(found["rows"].to_dense(), dense)
    assert not found["twice"].is_coalesced()
    assert found["twice"]._nnz() == 2
    with pytest.raises(StateTypeError, match=r"x is a tensor of layout torch\.sparse_csc"):
        through(dense.to_sparse_csc())


def test_a_modules_state_dict_keeps_its_versions() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    found = through({"net": state})["net"]
    assert type(found) is OrderedDict
    assert list(found) == list(state)
    assert found._metadata == state._metadata  # pyright: ignore[reportAttributeAccessIssue]
    fresh = nn.Sequential(nn.BatchNorm1d(2))
    fresh.load_state_dict(found)


def test_ordered_dicts_counters_and_sets() -> None:
    value = [OrderedDict([(2, "b"), (1, "a")]), collections.Counter({30: 2, 80: 1}), {1, 2}, frozenset("a")]
    assert through(value) == value
    assert [type(found) for found in through(value)] == [type(item) for item in value]


class Money(int):
    """A number of another class."""


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Money(1),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        np.ma.masked_array([1.0], mask=[True]),
        torch.Generator(),
        lambda: 0,
    ],
)
def test_other_types_are_refused_with_their_path_and_what_to_do(value: object) -> None:
    with pytest.raises(StateTypeError, match=r"x\.deep\[1\] .*cannot be saved \(.+\)"):
        through({"deep": [1, value]})


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_tensor_as_a_key_is_refused(kind: type[dict[object, object]]) -> None:
    """Found by identity: what it is the key of would be there after a restore, and nobody would find it."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(StateTypeError, match=r"x\.momentum has a tensor of shape \(2, 3\) as a key"):
        through({"momentum": kind({parameter: torch.ones(2, 3)})})


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_a_quantised_tensor_is_refused_with_its_path() -> None:
    quantised = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(
        StateTypeError, match=r"x\.q is a quantised tensor, which cannot be saved \(save int_repr"
    ):
        through({"q": quantised})


bad_contents = st.recursive(
    st.none()
    | st.integers(-2, 2**40)
    | st.sampled_from(["x", "uint8", "<f8", "|O", "AAAA", "C", "cuda:99", "size"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["dtype", "shape", "data", "leaf", "order", "indices", "values", "size", "coalesced"]
            ),
            inner,
            max_size=5,
        )
    ),
)
tags = st.sampled_from(
    "$leaf $rawbytes $ndarray $npscalar $npdtype $torch $sparse_coo $sparse_csr $modulestate".split()  # noqa: SIM905
)


@given(tags, bad_contents)
def test_malformed_documents_are_refused_or_decoded(tag: str, content: object) -> None:
    stored = store([Tree(torch.zeros(2))])
    dump_values({tag: content})
    with contextlib.suppress(CorruptDataError, StateMismatchError):  # nothing else may come out
        decoded = TreeDecoder(stored).decode({tag: content})
        assert decoded != {tag: content}
