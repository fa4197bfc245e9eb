"""The planner gives each tensor's memory back as soon as the next one is asked for: nobody may ask ahead."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.hook.export_dcp import write_dcp
from everstep.hook.export_source import ExportSource
from everstep.hook.state_tree import TensorRef

TENSORS = {
    f"w{number}": torch.randn(1000, generator=torch.Generator().manual_seed(number)) for number in range(4)
}


class AskingAhead(filesystem._SerialCpuLoader):  # pyright: ignore[reportPrivateUsage]
    """As DCP's loader for CUDA, which needs some."""

    def __init__(self, resolve: Any, inflight_threshhold: int) -> None:
        super().__init__(resolve)
        assert inflight_threshhold > 0

    def values(self) -> Iterator[Any]:
        """Yield what was asked for, once all was."""
        return iter(list(super().values()))


def test_where_cuda_is_each_tensor_is_written_before_the_next_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SimpleNamespace(
        find=lambda name: SimpleNamespace(name=name, shape=(1000,), dtype="float32"),
        tensor=lambda found: TENSORS[found.name].clone(),
    )
    with monkeypatch.context() as cuda:
        cuda.setattr(torch.cuda, "is_available", lambda: True)
        cuda.setattr(filesystem, "_OverlappingCpuLoader", AskingAhead)
        write_dcp(
            tmp_path, cast(ExportSource, source), {"model": {name: TensorRef(name) for name in TENSORS}}
        )
    found = {"model": {name: torch.zeros(1000) for name in TENSORS}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group exists
        load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in TENSORS.items())
