"""Loaders of both kinds with the same arguments, for tests that hold one against the other."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from everstep.dataloader import DataLoader

Loader = TorchDataLoader[Any]


def ours(dataset: object, **arguments: object) -> DataLoader[Any]:
    """Return everstep's loader; workers are forked unless said otherwise."""
    if arguments.get("num_workers"):
        arguments = {"multiprocessing_context": "fork", **arguments}
    return cast(Callable[..., DataLoader[Any]], DataLoader)(dataset, **arguments)


def torchs(dataset: object, **arguments: object) -> Loader:
    """Return torch's loader, without workers: what it makes of samples does not depend on them."""
    return cast(Callable[..., Loader], TorchDataLoader)(dataset, **arguments)


def assert_same(left: object, right: object) -> None:
    """Assert that two batches are equal in structure, types, dtypes and values."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, cast("np.ndarray[Any, Any]", right))
    elif isinstance(left, dict):
        pairs, others = cast(dict[str, object], left), cast(dict[str, object], right)
        assert list(pairs) == list(others)
        for key, value in pairs.items():
            assert_same(value, others[key])
    elif isinstance(left, list | tuple):
        values, others = cast(list[object], left), cast(list[object], right)
        assert len(values) == len(others)
        for one, other in zip(values, others, strict=True):
            assert_same(one, other)
    else:
        assert left == right
