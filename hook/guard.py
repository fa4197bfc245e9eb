"""The guard: an optimizer's step waits until the snapshot has copied what it is going to change."""

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

STEPS_WITHOUT_BOUNDARY_MAX = 1000
"""Steps of each optimizer without `run.step()` after which it is said: GANs and accumulation stay far below."""

INTERVALS_LOOKED_AT, EMPTY_INTERVALS_MIN = 4, 3
"""Of so many intervals between boundaries so many without a step: `run.step()` is called for each micro-batch.

Counted from the first step on: before it, and where there never is one, nothing is known. One such interval in four
is a step that a scaler has skipped.
"""


class OptimizerGuard:
    """Calls `before` before each step of an optimizer of this process.

    Of any: one that was built anew after attach(), or lies inside the one that was attached, writes the same weights.
    And before all other hooks, of one optimizer or of any, which write to them as well.
    """

    def __init__(self, objects: Mapping[str, object], before: Callable[[], None]) -> None:
        self._before = before
        self._steps = 0
        self._has_stepped = False
        self._intervals: list[bool] | None = []
        """Whether an optimizer of this process stepped in each, from the first that did on; None: it is decided."""
        self._attached = {id(value) for value in objects.values() if isinstance(value, Optimizer)}
        self._steps_max = STEPS_WITHOUT_BOUNDARY_MAX * len(self._attached)
        self._handle = register_optimizer_step_pre_hook(_weakly(self))
        hooks = cast("OrderedDict[int, object]", cast("Any", self._handle).hooks_dict_ref())
        hooks.move_to_end(self._handle.id, last=False)
        weakref.finalize(self, self._handle.remove)
        _let_scalers_wait()
        _guarding[:] = [*(each for each in _guarding if each() is not None), weakref.ref(self)]

    def boundary(self) -> None:
        """A boundary was passed."""
        self._steps = 0
        has_stepped, self._has_stepped = self._has_stepped, False
        if self._intervals is None or not (has_stepped or self._intervals):
            return
        self._intervals.append(has_stepped)
        if len(self._intervals) > INTERVALS_LOOKED_AT:
            empty = self._intervals[-INTERVALS_LOOKED_AT:].count(False)
            self._intervals = None
            if empty >= EMPTY_INTERVALS_MIN:
                warnings.warn(
                    f"{empty} of {INTERVALS_LOOKED_AT} times nothing stepped between two calls of run.step(): a "
                    "boundary is once per optimizer step; under gradient accumulation call run.step() only after "
                    "optimizer.step()",
                    stacklevel=3,
                )

    def close(self) -> None:
        """Take the hook out."""
        self._handle.remove()
        _guarding[:] = [each for each in _guarding if each() is not self]

    def before_update(self) -> None:
        """Wait as for a step: a scaler may have left it out, and the iteration writes what follows all the same."""
        self._before()

    def before_step(self, optimizer: Optimizer) -> None:
        """Wait for what the optimizer may change."""
        self._before()
        self._has_stepped = True
        if id(optimizer) not in self._attached:
            return
        self._steps += 1
        if self._steps == self._steps_max:
            warnings.warn(
                f"{self._steps} optimizer steps without run.step(): no checkpoint can be taken; "
                "call run.step() at the end of each iteration",
                stacklevel=4,
            )


_WAITS = "waits_for_everstep"
_guarding: "list[weakref.ref[OptimizerGuard]]" = []


def _let_scalers_wait() -> None:
    """Let `update()` of torch's GradScaler tell the guards of this process: it has no hook. Again is nothing."""
    update = GradScaler.update
    if _WAITS in update.__dict__:
        return

    @functools.wraps(update)
    def waiting(self: GradScaler, new_scale: float | torch.Tensor | None = None) -> None:
        for reference in tuple(_guarding):
            if (guard := reference()) is not None:
                guard.before_update()
        update(self, new_scale)

    waiting.__dict__[_WAITS] = True
    GradScaler.update = waiting


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
