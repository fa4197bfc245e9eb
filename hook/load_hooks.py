"""What modules and optimizers do when they load: a restore calls their post hooks of `load_state_dict()`, nothing else.

It writes into tensors where they are. What is derived from them outside of buffers is made anew in such a hook; code
of an own `load_state_dict()`, or that wants to see the dict, is not called, which is said once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from .document import mismatch
from .module_state import walk
from .state_additions import is_torchs


def call_load_hooks(objects: Mapping[str, object]) -> None:
    """Call the post hooks of objects that have all of their state again: of inner modules first, as torch does.

    Raises:
        StateMismatchError: one raised something.
    """
    for name, value in objects.items():
        try:
            if isinstance(value, nn.Module):
                _call_of_modules(value)
            elif isinstance(value, torch.optim.Optimizer):
                for hook in _hooks(value, "_optimizer_load_state_dict_post_hooks"):
                    hook(value)
        except Exception as error:
            raise mismatch(
                name, [f"its load_state_dict() hook raised {type(error).__name__}: {error}"]
            ) from error


def _call_of_modules(root: nn.Module) -> None:
    for module in dict.fromkeys(_inner_first(root)):
        for hook in _hooks(module, "_load_state_dict_post_hooks"):
            hook(module, nn.Module().load_state_dict({}))  # no key is missing, and none too much


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def notes_on_loading(objects: Mapping[str, object]) -> list[str]:
    """Return, for the log and the report, what of attached objects a restore does not call."""
    notes: list[str] = []
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            found = list(dict.fromkeys(_uncalled_of_module(name, value)))
        elif isinstance(value, torch.optim.Optimizer):
            found = list(_uncalled_of_optimizer(name, value))
        else:
            continue
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            notes.append(
                f"{found[0]}{more}: a restore writes into the tensors and does not call it; "
                "register_load_state_dict_post_hook() is called"
            )
    return notes


def _uncalled_of_module(name: str, root: nn.Module) -> Iterator[str]:
    if not is_torchs(root.load_state_dict):
        yield f"{name}.load_state_dict()"
    for named in walk(root, 1):
        place = f"{name}.{named.prefix}"
        if not is_torchs(cast("Any", named.module)._load_from_state_dict):
            yield f"{place}_load_from_state_dict()"
        for _ in _hooks(named.module, "_load_state_dict_pre_hooks"):
            yield f"a load_state_dict() pre hook of {place.removesuffix('.')}"


def _uncalled_of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    if not is_torchs(optimizer.load_state_dict):
        yield f"{name}.load_state_dict()"
    for _ in _hooks(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        yield f"a load_state_dict() pre hook of {name}"


def _hooks(owner: object, registry: str) -> Iterable[Callable[..., object]]:
    """Return the hooks that are not torch's own; torch wraps some in an object that has them as `hook`."""
    hooks = cast("Mapping[int, Callable[..., object]]", getattr(owner, registry, {}))
    return [hook for hook in hooks.values() if not is_torchs(getattr(hook, "hook", hook))]
