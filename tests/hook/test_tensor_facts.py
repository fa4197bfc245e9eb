"""The compiled loop alone: what it refuses, and that it keeps nothing."""

import gc
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from everstep.hook import tensor_watch

EXCHANGE: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

pytestmark = pytest.mark.skipif(
    tensor_watch.facts is None or EXCHANGE is None, reason="needs gcc, and a torch with DLPack's C functions"
)


def tell(
    tensors: Sequence[torch.Tensor], noted: int = 0
) -> tuple[bytes, list[int], list[torch.UntypedStorage]]:
    assert tensor_watch.facts is not None
    return tensor_watch.facts(EXCHANGE, tuple(tensors), noted, torch.Tensor.untyped_storage)


def test_facts_differ_where_one_tensor_does() -> None:
    tensors = [torch.zeros(2, 3) for _ in range(40)]
    first, _, _ = tell(tensors)
    assert tell(tensors)[0] == first
    for place in (0, 3, 20, 39):
        others = list(tensors)
        others[place] = torch.zeros(2, 3)
        assert tell(others)[0] != first


@pytest.mark.parametrize("noted", [-1, 4])
def test_more_than_there_are_cannot_be_noted(noted: int) -> None:
    with pytest.raises(ValueError, match=f"{noted} of 3 tensors"):
        tell([torch.zeros(1)] * 3, noted)


@pytest.mark.parametrize("place", [0, 1, 5, 12, 13, 29])
@pytest.mark.parametrize("intruder", [None, 5, object(), "text", nn.Linear(1, 1)])
def test_no_tensor_is_refused_wherever_it_is(intruder: object, place: int) -> None:
    """What is fetched ahead of a tensor may be anything."""
    tensors: list[Any] = [torch.zeros(1) for _ in range(30)]
    tensors[place] = intruder
    with pytest.raises((TypeError, RuntimeError)):
        tell(tensors, 30)
    with pytest.raises((TypeError, RuntimeError)):
        tell([cast("torch.Tensor", intruder)] * 30, 30)


def test_another_table_of_functions_is_refused() -> None:
    assert tensor_watch.facts is not None
    with pytest.raises(ValueError, match="PyCapsule"):
        tensor_watch.facts(object(), (torch.zeros(1),), 0, torch.Tensor.untyped_storage)


def test_of_none_nothing_is_told() -> None:
    assert tell([]) == (b"", [], [])


def test_garbage_may_be_collected_meanwhile() -> None:
    """Whoever looks through all lists then finds none that is only half full."""
    seen: list[int] = []

    def look(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            seen.extend(
                len(each.copy()) for each in gc.get_objects() if type(each) is list and len(each) == 1024
            )

    gc.freeze()  # the rest of the process need not be looked through
    tensors = [torch.zeros(1) for _ in range(1024)]
    before, kept = gc.get_threshold(), list[object]()
    gc.callbacks.append(look)
    gc.set_threshold(10)
    try:
        for _ in range(2):  # some ninety times
            kept.append(tell(tensors, 1024))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look)
        gc.unfreeze()
    assert seen


def test_nothing_is_kept() -> None:
    tensors = [torch.zeros(2) for _ in range(20)]
    with torch.inference_mode():
        made_in_inference = torch.zeros(1)
    before = [sys.getrefcount(each) for each in tensors]
    found = tell(tensors, 20)
    assert [sys.getrefcount(each) for each in found] == [3] * 3  # here, in the tuple, and as an argument
    with pytest.raises(RuntimeError, match="do not track version"):
        tell([*tensors, made_in_inference], 21)
    assert [sys.getrefcount(each) for each in tensors] == before
