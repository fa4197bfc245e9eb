"""The guard: an optimizer's step waits until the snapshot has copied what it is going to change."""

import warnings
import weakref
from collections.abc import Callable, Mapping

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

STEPS_WITHOUT_BOUNDARY_MAX = 1000
"""Steps of each optimizer without `run.step()` after which it is said: GANs and accumulation stay far below."""


class OptimizerGuard:
    """Calls `before` before each step of an optimizer of this process.

    Of any: one that was built anew after attach(), or lies inside the one that was attached, writes the same weights.
    And before the hooks of a single optimizer, which write to them as well.
    """

    def __init__(self, objects: Mapping[str, object], before: Callable[[], None]) -> None:
        self._before = before
        self._steps = 0
        self._attached = {id(value) for value in objects.values() if isinstance(value, Optimizer)}
        self._steps_max = STEPS_WITHOUT_BOUNDARY_MAX * len(self._attached)
        self._handle = register_optimizer_step_pre_hook(_weakly(self))
        weakref.finalize(self, self._handle.remove)

    def boundary(self) -> None:
        """A boundary was passed."""
        self._steps = 0

    def close(self) -> None:
        """Take the hook out."""
        self._handle.remove()

    def before_step(self, optimizer: Optimizer) -> None:
        """Wait for what the optimizer may change."""
        self._before()
        if id(optimizer) not in self._attached:
            return
        self._steps += 1
        if self._steps == self._steps_max:
            warnings.warn(
                f"{self._steps} optimizer steps without run.step(): no checkpoint can be taken; "
                "call run.step() at the end of each iteration",
                stacklevel=4,
            )


def _weakly(guard: OptimizerGuard) -> Callable[[Optimizer, object, object], None]:
    """Return the hook, which keeps nothing alive; it returns None, so that the step's arguments stay as they are."""
    reference = weakref.ref(guard)

    def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        guarding = reference()
        if guarding is not None:
            guarding.before_step(optimizer)

    return hook


def notes_on_overlap(objects: Mapping[str, object]) -> list[str]:
    """Return, for the report, which optimizers leave nothing for a copy to run beside."""
    return [
        f"{name} is LBFGS, which runs forward and backward inside step(): it waits for each whole copy"
        for name, value in objects.items()
        if isinstance(value, torch.optim.LBFGS)
    ]
