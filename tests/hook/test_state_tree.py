"""What an export writes for values that torch.load(weights_only=True) refuses: the nearest that it takes."""

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from everstep.core.errors import StateTypeError
from everstep.hook.component import make_components
from everstep.hook.export_source import ExportSource
from everstep.hook.export_torch import write_torch
from everstep.hook.state_testing import store
from everstep.hook.state_tree import StateTree


class Holder:
    """An attached object of one value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def loaded(value: object, folder: Path) -> object:
    """The value after a checkpoint, an export to torch and torch.load."""
    with store(make_components({"it": Holder(value)}, world_size=1)) as stored:
        tree = StateTree({"it": stored.values("it")}, lambda name: b"", by_name=False)
        write_torch(folder, cast(ExportSource, None), tree.components())  # no tensor is stored
    return torch.load(folder / "checkpoint.pt", weights_only=True)["it"]["value"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({np.int64(3): 1}, {3: 1}),
        ({frozenset({2, 1}): 1, (np.str_("a"), frozenset()): 2}, {(1, 2): 1, ("a", ()): 2}),
        ({np.datetime64("2024-02-29"): 1}, {"2024-02-29": 1}),
        (OrderedDict({np.int64(3): np.int64(1)}), OrderedDict({3: 1})),
        (Counter({np.int64(3): np.int64(1)}), Counter({3: 1})),
        ({np.int64(3), np.float32(0.5)}, {3, 0.5}),
        (frozenset({frozenset({frozenset({1})})}), {((1,),)}),
        (deque([frozenset({1})]), [{1}]),
        (np.datetime64("2024-02-29T00:00:00.123456789"), "2024-02-29T00:00:00.123456789"),
        (np.array(["2024-02-29", "NaT"], "M8[D]"), ["2024-02-29", "NaT"]),
        (np.timedelta64(5, "h"), "5 hours"),
        (np.longdouble(1.5), 1.5),
        (np.clongdouble(1.5j), 1.5j),
        (np.array(7, ">i4"), 7),
        (b"", bytearray()),
        (np.array([b"", b"a"]), [bytearray(), b"a"]),
        ({b"": b"a"}, {"": b"a"}),
        (1 << 3000, hex(1 << 3000)),
        (-(1 << 2000), -(1 << 2000)),
        ({1 << 3000: 1}, {hex(1 << 3000): 1}),
    ],
)
def test_the_nearest_plain_value(value: object, expected: object, tmp_path: Path) -> None:
    found = loaded(value, tmp_path)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([1, 2], ">i4"), torch.int32),
        (np.array([1.5], ">f8"), torch.float64),
        (np.array([1.5], np.longdouble), torch.float64),
        (np.array([1.5j], np.clongdouble), torch.complex128),
    ],
    ids=str,
)
def test_numbers_that_torch_lacks_become_those_that_it_has(
    array: "np.ndarray[tuple[int], np.dtype[np.number]]", dtype: torch.dtype, tmp_path: Path
) -> None:
    found = loaded(array, tmp_path)
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.tolist()) == (dtype, array.tolist())


@pytest.mark.parametrize(
    "value",
    [
        {frozenset({1}): "a", (1,): "b"},
        OrderedDict({b"": "a", "": "b"}),
        {np.datetime64("2024-02-29"): "a", "2024-02-29": "b"},
        Counter({1 << 3000: 1, hex(1 << 3000): 2}),
        [{frozenset({1}), (1,)}],
    ],
    ids=["frozenset", "bytes", "date", "integer", "set"],
)
def test_two_keys_that_become_one_are_refused(value: object, tmp_path: Path) -> None:
    """An entry would be gone without a word."""
    with pytest.raises(StateTypeError, match=r"^it: two keys of a dict, or items of a set, become "):
        loaded(value, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_key_of_an_optimizer_that_becomes_the_number_of_a_parameter_is_refused() -> None:
    module = nn.Linear(2, 2, bias=False)
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.state.update({module.weight: {"age": 1}, 0: {"age": 2}})  # pyright: ignore[reportArgumentType, reportCallIssue]
    components = make_components({"model": module, "optimizer": optimizer}, world_size=1)
    with store(components) as stored:
        documents = {"optimizer": stored.values("optimizer")}
    with pytest.raises(StateTypeError, match=r"^optimizer: two keys .* become 0 "):
        StateTree(documents, lambda name: b"", by_name=False).components()
    state = cast(
        dict[str, Any], StateTree(documents, lambda name: b"", by_name=True).components()["optimizer"]
    )
    assert state["state"] == {"weight": {"age": 1}, 0: {"age": 2}}
