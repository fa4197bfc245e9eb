"""What an export writes for values that torch.load(weights_only=True) refuses: the nearest that it takes."""

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

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
