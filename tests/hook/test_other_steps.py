"""What writes weights within the step of an optimizer that nobody attached waits for the copy, too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from overlapping import WARM, Loop, Slow, exercise, normalised, simple, supervised
from torch import nn

from everstep.hook.run import Run


class Around(torch.optim.Optimizer):
    """Around another one, of which it has all; torch knows nothing of its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def around(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Around(torch.optim.AdamW(parameters, lr=0.01, fused=True))


def decaying(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A hook writes to the weights before each step, and nobody counts it."""
    made = torch.optim.AdamW(parameters, lr=0.01)

    def decay(*_: object) -> None:
        for parameter in parameters:
            parameter.data.mul_(0.9)

    made.register_step_pre_hook(decay)
    return made


@pytest.mark.parametrize("optimizer", [around, decaying])
def test_what_writes_within_a_step_waits_like_it(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], devices: list[Path], slow: Slow
) -> None:
    exercise(lambda seed: simple(seed, normalised, optimizer), devices, slow)


def test_an_optimizer_that_is_built_anew_waits_like_the_one_that_is_attached(
    devices: list[Path], slow: Slow
) -> None:
    def make(seed: int) -> Loop:
        torch.manual_seed(seed)
        model = normalised()
        first = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

        def iterate(number: int, run: Run) -> None:
            anew = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
            supervised(model, first if number <= WARM else anew, number)

        return Loop({"model": model, "optimizer": first}, iterate)

    exercise(make, devices, slow)
