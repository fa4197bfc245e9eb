"""Tensors as bytes: names of dtypes, dense memory, copies."""

import mmap
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.dtype_format import itemsize_bytes
from everstep.checkpoint.shard_rules_plan import is_dense
from everstep.core.errors import StateTypeError
from everstep.hook.state_testing import bits
from everstep.hook.tensor_bytes import (
    COPY_PIECE_BYTES,
    BufferPin,
    byte_range,
    copy_bits,
    copy_bytes,
    dense_or_copy,
    describe,
    dtype_name,
    require_plain,
    torch_dtype,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
    "int32",
    "uint32",
    "float32",
    "complex32",
    "int64",
    "uint64",
    "float64",
    "complex64",
    "complex128",
]


def filled(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bits (of 0 and 1 for bool, whose other bytes torch may not keep)."""
    kind = torch_dtype(dtype)
    count = itemsize_bytes(dtype)
    for size in shape:
        count *= size
    data = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return data.view(kind).view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_its_name_and_size(dtype: str) -> None:
    found = torch_dtype(dtype)
    assert dtype_name(found) == dtype
    assert found.itemsize == itemsize_bytes(dtype)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.bits8])
def test_a_dtype_without_a_form_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(StateTypeError, match="not known to format v1"):
        dtype_name(dtype)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(StateTypeError, match="'float7'"):
        torch_dtype("float7")


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 3)] * 4))
def test_strides_of_equal_memory_are_equal_and_dense(order: list[int], shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape).permute(order)
    spec = describe("x", tensor)
    assert is_dense(spec.shape, spec.strides)
    assert describe("x", torch.empty_strided(spec.shape, spec.strides)) == spec
    assert spec.is_contiguous == tensor.is_contiguous()
    for size, stride, found in zip(spec.shape, spec.strides, tensor.stride(), strict=True):
        assert size == 1 or stride == found


def test_dimensions_of_size_one_do_not_hide_row_major_order() -> None:
    odd = torch.as_strided(torch.zeros(6), (1, 2, 1, 3), (99, 3, 77, 1))
    assert describe("x", odd).is_contiguous
    assert describe("x", torch.zeros(4, 0, 3).transpose(0, 2)).is_contiguous


def test_dense_tensors_are_taken_as_they_are() -> None:
    for tensor in (
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(0, 3),
        torch.zeros(()),
        torch.zeros(10)[3:5],
    ):
        assert dense_or_copy(tensor) == (tensor, False)


@pytest.mark.parametrize("kind", ["expanded", "sliced", "conjugate", "negative", "unfolded"])
def test_others_are_copied_with_their_values(kind: str) -> None:
    base = torch.arange(12).view(3, 4) * (1 + 2j)
    tensor = {
        "expanded": base[:, :1].expand(3, 5),
        "sliced": base[:, ::2],
        "conjugate": base.conj(),
        "negative": base.conj().imag,
        "unfolded": base.flatten().unfold(0, 4, 2),
    }[kind]
    dense, copied = dense_or_copy(tensor)
    assert copied
    assert is_dense(dense.shape, dense.stride())
    assert not dense.is_conj()
    assert not dense.is_neg()
    assert torch.equal(dense, tensor)
    assert dense.data_ptr() != tensor.data_ptr()


def test_a_copy_goes_across_its_pieces() -> None:
    source = torch.randint(0, 256, (2 * COPY_PIECE_BYTES + 5,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_bytes(target.data_ptr(), *byte_range(source))
    assert torch.equal(source, target)
    copy_bytes(0, 0, 0)


PINNED_IN_CYCLES = """
import gc, mmap
from everstep.hook.tensor_bytes import BufferPin

class Holder:
    pass

memory = mmap.mmap(-1, 8192)
for _ in range(20):
    view = memoryview(memory)[4096:]  # before its holder: garbage is cleared in the order in which it was made
    pin, holder = BufferPin(view), Holder()
    holder.view, holder.pin, holder.itself = view, pin, holder
    del view, pin, holder
    assert gc.collect()
memory.close()
"""


def test_a_pinned_buffer_in_a_cycle_is_collected_and_let_go() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PINNED_IN_CYCLES], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_part_of_a_buffer_is_pinned_where_it_lies() -> None:
    content = bytearray(b"0123456789")
    pin = BufferPin(memoryview(content)[4:7])
    target = torch.zeros(3, dtype=torch.uint8)
    copy_bytes(target.data_ptr(), pin.address, pin.size_bytes)
    assert bits(target) == b"456"
    with pytest.raises(BufferError):
        content.append(0)
    pin.release()
    content.append(0)


def test_a_pinned_buffer_cannot_be_closed() -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[:3] = b"abc"
        pin = BufferPin(memoryview(memory).toreadonly())
        with pytest.raises(BufferError):
            memory.close()
        target = torch.zeros(3, dtype=torch.uint8)
        copy_bytes(target.data_ptr(), pin.address, 3)
        assert bits(target) == b"abc"
        pin.release()
        assert pin.size_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_copied_between_any_strides(dtype: str) -> None:
    source = filled(dtype, (4, 6))
    target = torch.empty_strided((4, 6), (1, 4), dtype=torch_dtype(dtype))
    copy_bits(source, to=target)
    assert bits(target) == bits(source)


def test_a_signalling_nan_stays_one() -> None:
    source = torch.tensor([0x7F800001, -8388607], dtype=torch.int32).view(torch.float32)
    target = torch.zeros(4)[::2]
    copy_bits(source, to=target)
    assert bits(target) == bits(source)


def test_bits_are_copied_into_an_expanded_and_a_conjugate_tensor() -> None:
    expanded = torch.zeros(3, 1).expand(3, 5)
    copy_bits(torch.arange(3.0).view(3, 1).expand(3, 5).contiguous(), to=expanded)
    assert expanded.tolist() == [[0.0] * 5, [1.0] * 5, [2.0] * 5]
    memory = torch.zeros(2, dtype=torch.complex64)
    copy_bits(torch.tensor([1 + 2j, 3 - 4j]), to=memory.conj())
    assert memory.tolist() == [1 - 2j, 3 + 4j]


def test_bits_are_copied_into_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    copy_bits(torch.ones(3), to=parameter)
    assert parameter.tolist() == [1.0] * 3
    assert parameter.is_leaf


class Wrapper(torch.Tensor):
    """A tensor whose elements are elsewhere, as DTensor's."""

    @staticmethod
    def __new__(cls) -> "Wrapper":  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None):
        return NotImplemented


class Plain(torch.Tensor):
    """A subclass that only has another name."""


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantiz:UserWarning")
def test_tensors_without_bytes_of_their_own_are_refused_with_the_path() -> None:
    refused = {
        "on the meta device": torch.zeros(2, device="meta"),
        "layout torch.sparse_coo": torch.eye(2).to_sparse(),
        "a nested tensor": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        "without a shape yet": torch.nn.UninitializedParameter(),
        "a quantised tensor": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        "Wrapper": Wrapper(),
    }
    for what, tensor in refused.items():
        with pytest.raises(StateTypeError, match=rf"model\.x is .*{what}.*cannot be saved \(.+\)"):
            require_plain(tensor, "model.x")
    for tensor in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), torch.zeros(2).as_subclass(Plain)):
        require_plain(tensor, "model.x")
