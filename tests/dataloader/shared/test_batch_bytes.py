"""Batches to bytes and back, equal to the bit, and refused with the path where that cannot be."""

import math
from collections import OrderedDict
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.errors import CorruptDataError, StateTypeError
from everstep.dataloader.batch_maker import MadeBatch, Ticket
from everstep.dataloader.shared.batch_bytes import BatchBytes, EncodingMaker, read_batch
from everstep.dataloader.shared.first_batch import leaf_digests
from everstep.dataloader.tensor_tree import decode_batch, encode_batch, octets_of

IDS = np.array([5, 2, 9], dtype=np.int64)


class Pair(NamedTuple):
    """What a dataset of named tuples gives."""

    image: object
    label: object


def octets(data: object) -> bytearray:
    return bytearray(b"".join(encode_batch(IDS, data).pieces))


def round_trip(data: object) -> Any:
    ids, back = decode_batch(memoryview(octets(data)).toreadonly(), encode_batch(IDS, data).classes)
    assert ids == IDS.tolist()
    return back


def same(left: object, right: object) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        return (left.dtype, left.shape) == (right.dtype, right.shape) and leaf_digests(left) == leaf_digests(
            right
        )
    if isinstance(left, dict):
        pairs = cast(dict[object, object], left), cast(dict[object, object], right)
        return list(pairs[0]) == list(pairs[1]) and all(
            same(pairs[0][key], pairs[1][key]) for key in pairs[0]
        )
    if isinstance(left, list | tuple):
        items = cast(list[object], left), cast(list[object], right)
        return len(items[0]) == len(items[1]) and all(map(same, *items))
    return left == right or (isinstance(left, float) and math.isnan(left))


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=9)
)
TENSORS = st.builds(
    lambda shape, dtype: (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]),
)
TREES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@given(data=TREES)
def test_decode_is_the_inverse_of_encode(data: object) -> None:
    assert same(round_trip(data), data)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.tensor(3.5, dtype=torch.float16),
        torch.zeros(2, 3).expand(4, 2, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.full((3,), float("nan"), dtype=torch.float32),
        torch.ones(5, dtype=torch.float8_e4m3fn),
    ],
)
def test_tensors_of_all_kinds_come_back_contiguous_and_writable(tensor: torch.Tensor) -> None:
    back = round_trip({"x": tensor})["x"]
    assert leaf_digests(back) == leaf_digests(tensor)
    assert back.is_contiguous()
    back.zero_()


def test_tensors_have_memory_of_their_own() -> None:
    encoded = octets(torch.arange(4))
    _, back = decode_batch(memoryview(encoded), {})
    encoded[:] = bytes(len(encoded))
    assert back.tolist() == [0, 1, 2, 3]


class Foo:
    """Not to be shared."""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"meta": [1, 2, Foo()]}, r"batch\['meta'\]\[2\] is a \S*Foo: it cannot be shared"),
        (OrderedDict(a=1), "batch is a collections.OrderedDict"),
        ([np.zeros(3)], r"batch\[0\] is a numpy.ndarray"),
        ((1, {"x": {(1, 2): 3}}), r"batch\[1\]\['x'\] has the key \(1, 2\), a tuple"),
        ([torch.ones(1, requires_grad=True)], r"batch\[0\] is a torch.Tensor .* with gradient"),
        ([torch.ones(2, device="meta")], r"batch\[0\] is a torch.Tensor .* on meta"),
        ([torch.eye(2).to_sparse()], r"batch\[0\] is a torch.Tensor of torch.sparse_coo"),
        (Pair(1, 2j), r"batch\[1\] is a builtins.complex"),
        ([torch.nn.Parameter(torch.ones(1))], r"batch\[0\] is a torch.nn.parameter.Parameter"),
    ],
)
def test_anything_else_is_refused_with_its_path(data: object, said: str) -> None:
    with pytest.raises(StateTypeError, match=said):
        encode_batch(IDS, data)


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_bytes_never_give_more_than_an_error(data: st.DataObject) -> None:
    encoded = octets({"x": torch.arange(3), "s": ["a", b"bc", (1.5, None)]})
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = encoded[: data.draw(st.integers(0, len(encoded)))]
    try:
        ids, _ = decode_batch(memoryview(cut), {})
    except CorruptDataError:
        return
    assert all(isinstance(each, int | float) for each in ids)


def test_a_named_tuple_that_this_job_does_not_have_is_not_looked_up() -> None:
    with pytest.raises(CorruptDataError):
        decode_batch(memoryview(octets(Pair(1, 2))), {})


class Squares:
    """Samples that tell their number."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


def made(ticket: Ticket) -> tuple[MadeBatch, memoryview]:
    maker = EncodingMaker(Squares(), torch.tensor, is_batched=True, augment_seed=True)
    batch = maker.make(ticket)
    assert isinstance(batch.data, BatchBytes)
    return batch, octets_of(batch.data.octets).data


TICKET = Ticket(seed=1, epoch=0, cursor=6, ids=[4, 2, 7])


def test_a_batch_is_taken_for_its_own_place_only() -> None:
    _, data = made(TICKET)
    back = read_batch(data, TICKET, (), {})
    assert (back.cursor, back.ids.tolist(), back.left_out, back.is_stand_in) == (6, [4, 2, 7], (), False)
    assert cast(torch.Tensor, back.data).tolist() == [16, 4, 49]
    for ids in ([4, 2], [2, 4, 7], [4, 2, 8]):
        with pytest.raises(CorruptDataError, match="the batch at 6 of epoch 0 has other samples"):
            read_batch(data, TICKET._replace(ids=ids), (), {})


def test_what_is_left_out_is_said_and_must_not_be_in_it() -> None:
    _, data = made(TICKET._replace(ids=[4, 7]))
    back = read_batch(data, TICKET, {2, 5}, {})
    assert (back.ids.tolist(), back.left_out, back.is_stand_in) == ([4, 7], (2,), False)
    with pytest.raises(CorruptDataError):
        read_batch(data, TICKET, {4}, {})


def test_a_batch_of_which_nothing_is_left_is_a_stand_in() -> None:
    _, data = made(TICKET._replace(ids=[9]))
    back = read_batch(data, TICKET, {2, 4, 7}, {})
    assert (back.ids.size, back.left_out, back.is_stand_in) == (0, (4, 2, 7), True)
    assert cast(torch.Tensor, back.data).tolist() == [81]
