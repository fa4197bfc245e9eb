"""From the keywords of attach() to the components of the training state."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from ..core.errors import UsageError
from .history import NAME as HISTORY_NAME
from .module_state import ModuleState, ParameterRegistry
from .object_state import object_component
from .optimizer_state import OptimizerState
from .rng_state import NAME as RNG_NAME
from .state_protocol import Component, Laziness, Sink, TensorLeaf
from .stored_state import StoredState

__all__ = ["Component", "Laziness", "Sink", "TensorLeaf", "check_components", "make_components"]

RESERVED_NAMES = (HISTORY_NAME, RNG_NAME, "everstep")
"""Components that every run has beside the attached objects; `RngState` and `History` are made by the run."""


def make_components(objects: Mapping[str, object], *, world_size: int) -> list[Component]:
    """Return the components of the objects: modules first, then optimizers, then the rest, each in the given order.

    Capture, check and apply them in this order: optimizers name their parameters by what the modules said last.

    Raises:
        StateTypeError: an object of a kind that cannot be saved.
        UsageError: a keyword that cannot be a component's name, an optimizer without hooks, or one that hides
            another whose state would be lost.
    """
    for name in objects:
        if not name.isidentifier() or name in RESERVED_NAMES:
            raise UsageError(
                f"an object cannot be attached as {name!r}",
                hint=f"take another keyword; {' and '.join(RESERVED_NAMES)} are everstep's own",
            )
    registry = ParameterRegistry(world_size)
    modules: list[Component] = []
    optimizers: list[Component] = []
    others: list[Component] = []
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            modules.append(ModuleState(name, value, registry))
        elif isinstance(value, torch.optim.Optimizer):
            optimizers.append(OptimizerState(name, value, registry))
        elif hasattr(value, "param_groups") and hasattr(value, "step"):
            raise _no_optimizer(name, value)
        else:
            others.append(object_component(name, value))
    _check_guarded(objects)
    _check_nothing_hidden(objects, registry)
    return [*modules, *optimizers, *others]


def check_components(
    components: Sequence[Component], stored: StoredState, receive: Callable[[Sequence[str]], object]
) -> None:
    """Return if the stored state fits them: structures first, then what is compared by its bytes, which are small.

    `receive` is called once, with the names of the components and leaves whose bytes are then read.

    Raises:
        StateMismatchError, …: as `Component.check`.
    """
    looking = [component for component in components if not component.checks_bytes]
    reading = [component for component in components if component.checks_bytes]
    for component in looking:
        component.check(stored)
    modules = [component for component in components if isinstance(component, ModuleState)]
    compared = [(module, leaves) for module in modules if (leaves := module.compared(stored))]
    receive([component.name for component in reading] + [leaf for _, leaves in compared for leaf in leaves])
    for component in reading:
        component.check(stored)
    for module, _ in compared:
        module.check_compared(stored)


def _no_optimizer(name: str, value: object) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    derived = isinstance(value, torch.optim.Optimizer)
    lacks = "whose class does not call super().__init__()" if derived else "which is no torch.optim.Optimizer"
    if not hasattr(value, "register_step_pre_hook"):
        lacks += " and has no register_step_pre_hook"
    return UsageError(
        f"{name} is a {kind}, {lacks}",
        hint="its steps cannot be held back until a snapshot is copied: derive it from torch.optim.Optimizer,"
        " or attach the optimizer inside it",
    )


def _check_guarded(objects: Mapping[str, object]) -> None:
    """An optimizer whose class never called torch's __init__ has no hooks; then one that lies inside it must step."""
    for name, value in objects.items():
        if not isinstance(value, torch.optim.Optimizer) or _has_hooks(value):
            continue
        if not any(_has_hooks(inner) for _, inner in _inner_optimizers(name, value)):
            raise _no_optimizer(name, value)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _check_nothing_hidden(objects: Mapping[str, object], registry: ParameterRegistry) -> None:
    """An optimizer around another (SAM, lookahead) does not hold the inner one's state: that has to be attached too."""
    attached = {id(optimizer) for optimizer in registry.optimizers}
    for name, value in objects.items():
        if not isinstance(value, torch.optim.Optimizer):
            continue
        for place, inner in _inner_optimizers(name, value):
            if id(inner) not in attached and inner.state is not value.state:
                keyword = "_".join(filter(None, re.split(r"\W+", place)))
                raise UsageError(
                    f"{place} is an optimizer with state of its own, which nobody attached",
                    hint=f"attach it too, e.g. {keyword}={place}",
                )


def _inner_optimizers(
    name: str, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers that another one keeps as attributes, or in lists and dicts there, with their places."""
    for key, value in vars(optimizer).items():
        place = f"{name}.{key}"
        if isinstance(value, torch.optim.Optimizer):
            yield place, value
        elif isinstance(value, list | tuple):
            for index, each in enumerate(cast("Sequence[object]", value)):
                if isinstance(each, torch.optim.Optimizer):
                    yield f"{place}[{index}]", each
        elif isinstance(value, dict):
            for entry, each in cast("dict[object, object]", value).items():
                if isinstance(each, torch.optim.Optimizer):
                    yield f"{place}[{entry!r}]", each
