"""Modules whose forward, or whose hooks, write what is part of their state."""

from typing import cast

import torch
from torch import nn
from torch.nn import functional


class Observed(nn.Module):
    """Forward widens ranges, counts in a sparse buffer, and replaces a buffer by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization.observer import MovingAverageMinMaxObserver  # slow

        self.layer = nn.Linear(6, 6)
        self.observer = MovingAverageMinMaxObserver()
        self.register_buffer("seen", torch.zeros(2, 2).to_sparse())
        self.register_buffer("last", torch.zeros(6))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.observer(self.layer(batch))
        self.seen = self.seen + torch.eye(2).to_sparse()
        self.last = found.detach().mean(0)
        return found + self.last


class Hooked(nn.Module):
    """Its hooks write buffers: after forward, within backward, and as soon as a gradient is whole."""

    seen: torch.Tensor
    slope: torch.Tensor
    norms: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        for name in ("seen", "slope", "norms"):
            self.register_buffer(name, torch.zeros(6))
        self.one.register_forward_hook(lambda module, given, found: self._add(self.seen, found.mean(0)))
        self.two.register_full_backward_hook(lambda module, into, of: self._add(self.slope, of[0].mean(0)))
        self.two.weight.register_post_accumulate_grad_hook(
            lambda weight: self._add(self.norms, cast(torch.Tensor, weight.grad).norm(dim=1))
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(batch))

    @staticmethod
    def _add(buffer: torch.Tensor, more: torch.Tensor) -> None:
        buffer.add_(more.detach())


class Statistics(nn.Module):
    """Running statistics are parameters that need no gradient, which torch writes without counting it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(self.layer(batch), self.mean, self.variance, training=True)


class Remade(nn.Module):
    """Forward makes buffers of another shape and another dtype than they begin with."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver  # slow

        self.layer = nn.Linear(6, 6)
        self.quantised = FakeQuantize(
            observer=MovingAveragePerChannelMinMaxObserver,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-128,
            quant_max=127,
        )
        self.register_buffer("last", torch.zeros(6))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = functional.linear(batch, self.quantised(self.layer.weight)) + self.last
        self.last = found.detach().mean(0).bfloat16()
        return found
