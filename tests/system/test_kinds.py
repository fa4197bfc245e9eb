"""Every kind of state through a real daemon, sockets and disks, restored from memory and from disk."""

import contextlib
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process import service
from torch import nn

import everstep
from everstep.hook.run import Run
from everstep.hook.state_testing import bits


class Kinds(nn.Module):
    """Parameters and buffers of every kind, all made of `fill`."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(float(fill)))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.bf16 = nn.Parameter(torch.full((3,), fill, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((2, 2), float(fill)), requires_grad=False)
        image = torch.arange(96.0).view(2, 3, 4, 4) * fill
        self.image = nn.Parameter(image.to(memory_format=torch.channels_last))
        self.register_buffer("complex_", torch.full((2,), complex(fill, -fill)))
        self.register_buffer("fp8", torch.full((4,), fill).to(torch.float8_e4m3fn))
        self.register_buffer("flag", torch.tensor(fill > 1))
        self.register_buffer("cache", torch.full((2,), float(fill)), persistent=False)
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        nn.init.constant_(self.embed.weight, fill)
        self.head.weight = self.embed.weight
        flat = torch.arange(10.0) * fill
        self.weight, self.bias = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:8])


class Holder:
    """A user's object with any state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def nested(fill: int) -> dict[str, Any]:
    return {
        "list": {1: [(None, True, False, 2**200, b"x" * 9000, b"y"), -(2**63)]},
        "tensors": (torch.tensor(fill), torch.zeros(0)),
        "array": np.full((3, 2000), fill),
        "scalar": np.float32(fill),
        "odd keys": {("k", fill): float("nan"), True: 1, None: 2},
    }


def made(fill: int, state: dict[str, Any]) -> dict[str, Any]:
    """Objects of every kind, all different for another `fill`."""
    model = Kinds(fill)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * fill)
    optimizer.state[model.bf16] = {"master": torch.full((3,), fill / 3, dtype=torch.float32)}
    return {
        "model": model,
        "optimizer": optimizer,
        "holder": Holder(state),
        "torch_generator": torch.Generator().manual_seed(fill),
        "python_generator": random.Random(fill),
        "numpy_generator": np.random.default_rng(fill),
        "numpy_legacy": np.random.RandomState(fill),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    model, wanted = found["model"], expected["model"]
    assert tensors(model) == tensors(wanted)
    assert model.head.weight is model.embed.weight
    assert model.weight.untyped_storage().data_ptr() == model.bias.untyped_storage().data_ptr()
    assert model.image.is_contiguous(memory_format=torch.channels_last)
    master = found["optimizer"].state[model.bf16]["master"]
    assert master.dtype == torch.float32
    assert bits(master) == bits(expected["optimizer"].state[wanted.bf16]["master"])
    assert found["optimizer"].param_groups[0]["lr"] == expected["optimizer"].param_groups[0]["lr"]
    assert repr(found["holder"].state) == repr(expected["holder"].state)
    assert bits(found["torch_generator"].get_state()) == bits(expected["torch_generator"].get_state())
    assert found["python_generator"].getstate() == expected["python_generator"].getstate()
    for name in ("numpy_generator", "numpy_legacy"):
        assert (found[name].random(5) == expected[name].random(5)).all()


def tensors(model: Kinds) -> dict[str, bytes]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: bits(value) for name, value in [*parameters, *model.named_buffers()]}


class _Left(Exception):  # noqa: N818
    """What a run without a last boundary is left by: the daemon takes it for a crash."""


@contextlib.contextmanager
def crashing(storage: list[Path], objects: dict[str, Any]) -> Generator[Run]:
    with (
        contextlib.suppress(_Left),
        everstep.attach("kinds", **objects, storage=storage, every=10**6) as run,
    ):
        yield run
        raise _Left


def test_every_kind_comes_back_from_memory_and_from_disk(tmp_path: Path) -> None:
    storage = [tmp_path / "d0", tmp_path / "d1"]
    for device in storage:
        device.mkdir()
    with service():
        with crashing(storage, made(2, nested(2))) as run:
            while run.report().checkpoints_complete == 0:
                run.checkpoint()
                run.step()
                assert run.wait(60)
        assert_restored(storage, "memory")
    with service():
        assert_restored(storage, "disk")


def assert_restored(storage: list[Path], source: str) -> None:
    objects = made(1, {})
    with crashing(storage, objects) as run:
        restored = run.restore()
        assert restored is not None
        assert restored.source == source
    assert_same(objects, made(2, nested(2)))
