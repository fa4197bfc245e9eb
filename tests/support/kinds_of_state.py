"""One training state with every kind of object and tensor that exports differ in."""

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import everstep


class Kinds(nn.Module):
    """Tied weights, channels_last, BatchNorm's buffers, dtypes that safetensors lacks, a cache, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.brain = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.randn(2, 3, dtype=torch.complex64))
        self.register_buffer("scale8", torch.rand(4).to(torch.float8_e4m3fnuz))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("cache", torch.ones(7), persistent=False)

    def get_extra_state(self) -> dict[str, object]:
        return {"version": 3, "ids": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["version"] == 3

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(image)).square().mean() + self.brain.float().sum()
        return self.head(self.embed(tokens)).square().mean() + found


class Notes:
    """An object whose state holds what plain JSON and safetensors cannot."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def fill(self) -> None:
        self.state = {
            "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "long": np.arange(2000, dtype=np.int64),
            "text": np.array(["a", "bc"]),
            "number": np.float64(1.5),
            "last": deque([1, 2], maxlen=3),
            "names": frozenset({"x"}),
            "blob": bytes(range(256)) * 20,
            "tensor": torch.arange(4.0),
            "sparse": torch.eye(3).to_sparse(),
            "odd": OrderedDict([(1, 2**80), ((1, 2), None)]),
            "counts": {np.int64(3): 1, (frozenset({2, 1}), b""): b""},
            "tally": Counter({np.str_("a"): np.int64(2)}),
            "sets": frozenset({frozenset({1}), np.float32(0.5)}),
            "day": np.datetime64("2024-02-29"),
            "waits": np.array([5, 7], "m8[h]"),
            "foreign": np.array([1, 2], ">i4"),
            "wide": np.array([1.5], np.longdouble),
            "wider": np.longdouble(2.5),
            "huge": 1 << 3000,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Kinds()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "notes": Notes(),
        "draws": torch.Generator().manual_seed(5),
    }


def train(state: dict[str, Any], count: int = 3) -> None:
    for _ in range(count):
        state["optimizer"].zero_grad()
        state["model"](torch.arange(5), torch.randn(2, 3, 8, 8)).backward()
        state["optimizer"].step()
        state["schedule"].step()
    state["notes"].fill()


def save(name: str, storage: list[Path], state: dict[str, Any]) -> None:
    """Take one checkpoint of the state, through a daemon."""
    with everstep.attach(name, **state, storage=storage, every=10**6) as run:
        run.log(loss=0.5)
        run.step()
