"""The guard: an optimizer's step waits until the snapshot has copied what it is going to change."""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle

STEPS_WITHOUT_BOUNDARY_MAX = 1000
"""Steps of each optimizer without `run.step()` after which it is said: GANs and accumulation stay far below."""


class OptimizerGuard:
    """Hooks `before` into every optimizer among the attached objects."""

    def __init__(self, objects: Mapping[str, object], before: Callable[[], None]) -> None:
        self._before = before
        self._steps = 0
        self._handles: list[RemovableHandle] = [
            value.register_step_pre_hook(self._pre_step)
            for value in objects.values()
            if isinstance(value, torch.optim.Optimizer)
        ]
        self._steps_max = STEPS_WITHOUT_BOUNDARY_MAX * len(self._handles)

    def boundary(self) -> None:
        """A boundary was passed."""
        self._steps = 0

    def close(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Called by torch before `step`; returns None, so that the arguments stay as they are."""
        del optimizer, args, kwargs
        self._before()
        self._steps += 1
        if self._steps == self._steps_max:
            warnings.warn(
                f"{self._steps} optimizer steps without run.step(): no checkpoint can be taken; "
                "call run.step() at the end of each iteration",
                stacklevel=3,
            )


def notes_on_overlap(objects: Mapping[str, object]) -> list[str]:
    """Return, for the report, which optimizers leave nothing for a copy to run beside."""
    return [
        f"{name} is LBFGS, which runs forward and backward inside step(): it waits for each whole copy"
        for name, value in objects.items()
        if isinstance(value, torch.optim.LBFGS)
    ]
