"""What a worker packs is what the trainer unpacks: values, aliases, writable memory; nothing is left open."""

import contextlib
import os
import resource
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from everstep.core.errors import NodeError
from everstep.dataloader.workers.channel import close_all
from everstep.dataloader.workers.packing import (
    ARRAY_INLINE_MAX,
    STORAGE_INLINE_MAX,
    WHOLE_STORAGE_MAX,
    Packed,
    new_shared_storage,
    unpack,
)


def through(value: object, fds_max: int = 200) -> Any:
    packed = Packed(value, fds_max)
    fds = [os.dup(fd) for fd in packed.fds]
    assert len(fds) <= fds_max
    packed.close()
    return unpack(packed.body, fds)


def open_files() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


class Pair(NamedTuple):
    first: object
    second: object


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("count", [0, 1, 7, STORAGE_INLINE_MAX, STORAGE_INLINE_MAX + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_small_and_large(count: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(count).to(dtype)
    back = through(tensor)
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
    back.zero_()  # writable


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(3.0).expand(4, 3),
        torch.arange(5000.0)[100:200],
        torch.tensor(7),
        torch.empty(2, 0, 3),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3000).share_memory_(),
        torch.empty(3, device="meta"),
    ],
    ids=lambda tensor: f"{type(tensor).__name__}{tuple(tensor.shape)}",
)
def test_tensors_of_every_form(tensor: torch.Tensor) -> None:
    back = through(tensor)
    assert type(back) is type(tensor)
    assert (back.shape, back.stride(), back.requires_grad) == (
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
    )
    assert tensor.is_meta or torch.equal(back.resolve_conj(), tensor.resolve_conj())


def test_a_sparse_tensor() -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        tensor = torch.eye(3).to_sparse()
        assert torch.equal(through(tensor).to_dense(), torch.eye(3))


def test_trees_keep_their_types() -> None:
    tree = {"a": [torch.arange(3), "text", b"bytes", None, 2.5], "b": Pair(torch.zeros(9000), np.arange(3))}
    back = through(tree)
    assert type(back["b"]) is Pair
    assert back["a"][1:] == tree["a"][1:]
    assert torch.equal(back["b"].first, torch.zeros(9000))
    assert back["b"].second.tolist() == [0, 1, 2]


@pytest.mark.parametrize("count", [4, 9000])
def test_views_of_one_storage_stay_views_of_one(count: int) -> None:
    whole = torch.zeros(count)
    back_whole, back_part = through((whole, whole[1:3]))
    back_whole[1] = 5
    assert back_part[0] == 5


def test_a_small_view_of_a_large_tensor_leaves_the_rest_behind() -> None:
    whole = torch.arange(WHOLE_STORAGE_MAX // 4 + 1.0)
    back = through(whole[10:20])
    assert back.tolist() == whole[10:20].tolist()
    assert back.untyped_storage().nbytes() == 40


def test_large_tensors_and_arrays_are_mapped_and_small_ones_are_not() -> None:
    packed = Packed(
        [torch.zeros(STORAGE_INLINE_MAX), torch.zeros(2), np.zeros(ARRAY_INLINE_MAX), np.zeros(2)]
    )
    assert len(packed.fds) == 2
    assert len(packed.body) < 2000
    packed.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100_000).reshape(100, 1000),
        np.asfortranarray(np.arange(100_000).reshape(100, 1000)),
        np.arange(200_000)[::2],
        np.array([None, "x"], dtype=object),
        np.zeros(9000, dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["plain", "fortran", "strided", "object", "structured"],
)
def test_arrays(array: "np.ndarray[Any, Any]") -> None:
    back = through(array)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    back[0] = back[1]  # writable


def test_more_tensors_than_descriptors() -> None:
    tensors = [torch.full((STORAGE_INLINE_MAX,), float(i)) for i in range(7)]
    for back, tensor in zip(through(tensors, fds_max=3), tensors, strict=True):
        assert torch.equal(back, tensor)
    assert torch.equal(through(tensors, fds_max=0)[6], tensors[6])


def test_a_tensor_that_was_collated_into_a_memfd_is_not_copied_again() -> None:
    storage = new_shared_storage(1 << 20)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    back = through(tensor)
    tensor[5] = 77
    assert back[5] == 77


def test_what_cannot_be_packed_leaves_nothing_open() -> None:
    before = open_files()
    with pytest.raises(Exception, match="pickle"):
        Packed([torch.zeros(1 << 20), np.zeros(1 << 20), lambda: None])
    assert open_files() == before


def test_a_body_that_does_not_unpickle_leaves_nothing_open() -> None:
    before = open_files()
    packed = Packed(torch.zeros(1 << 20))
    fds = [os.dup(fd) for fd in packed.fds]
    packed.close()
    with pytest.raises(Exception, match="truncated"):
        unpack(packed.body[:-5], fds)
    assert open_files() == before


def test_who_has_no_descriptor_left_for_a_tensor_is_told_what_to_do() -> None:
    packed = Packed(torch.zeros(STORAGE_INLINE_MAX))
    fds = [os.dup(fd) for fd in packed.fds]
    packed.close()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_files())) + 1, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):  # until there is none left
            while True:
                taken.append(os.dup(fds[0]))
        with pytest.raises(NodeError, match=r"too many open files.*ulimit"):
            unpack(packed.body, fds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        close_all(taken)


def test_arrays_that_view_one_memory_to_different_ends() -> None:
    """Each is a storage of its own to torch, all begin at one address."""
    array = np.arange(5000, dtype=np.float64)
    for several in ([array[:5], array], [array, array[:5], array[:2000]]):
        tensors = [torch.from_numpy(each) for each in several]
        back = through([*tensors, *tensors])
        assert all(torch.equal(*each) for each in zip(back, tensors * 2, strict=True))
        assert [each.data_ptr() for each in back[: len(tensors)]] == [
            each.data_ptr() for each in back[len(tensors) :]
        ]
