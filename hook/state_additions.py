"""What modules and optimizers add in a `state_dict()` of their own: a checkpoint does not ask it, so it is said once.

Parameters, buffers, extra state and an optimizer's state and groups are read where they hang, without `state_dict()`.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from .module_state import NamedModule, tensors_of, walk

_SHOWN = 5
_EXTRA_STATE = "_extra_state"
_OWN_KEYS = {"state", "param_groups"}


def notes_on_additions(objects: Mapping[str, object]) -> list[str]:
    """Return, for the log and the report, what `state_dict()` of attached objects has and no checkpoint."""
    notes: list[str] = []
    for name, value in objects.items():
        try:
            if isinstance(value, torch.optim.Optimizer):
                notes += _note(name, _added_by_optimizer(value), "keep them in param_groups")
            elif isinstance(value, nn.Module):
                notes += _note(name, _added_by_module(value), "return them from get_extra_state()")
        except Exception as error:  # noqa: BLE001 - of a script's own code, which nothing else calls
            notes.append(f"{name}.state_dict() fails, so what it adds is in no checkpoint: {error!r}")
    return notes


def notes_on_lazy(objects: Mapping[str, object]) -> list[str]:
    """Return, for the log and the report, which modules cannot be restored into as they are attached."""
    return [
        f"{name}.{lazy[0]} has no shape yet, so that a restart has nothing to restore into: run one forward pass "
        "before attach()"
        for name, value in objects.items()
        if isinstance(value, nn.Module)
        and (lazy := [fqn for fqn, tensor in value.named_parameters() if nn.parameter.is_lazy(tensor)])
    ]


def _note(name: str, keys: list[str], remedy: str) -> list[str]:
    if not keys:
        return []
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    shown = ", ".join(keys[:_SHOWN]) + more
    what = f"{name}.state_dict() adds {shown}, which no checkpoint holds"
    return [f"{what}: {remedy}, or attach what holds them as an object of its own"]


def _added_by_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    hooks: object = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not hooks:
        return []
    state = cast("Mapping[str, object]", optimizer.state_dict())
    return [key for key, value in state.items() if key not in _OWN_KEYS and not _is_of_another(value)]


def _is_of_another(value: object) -> bool:
    """Tell whether it is the state of an optimizer inside, which is attached or has no state of its own."""
    return isinstance(value, Mapping) and _OWN_KEYS.issubset(cast("Mapping[str, object]", value))


def _added_by_module(root: nn.Module) -> list[str]:
    modules = {id(named.module): named for named in reversed(list(walk(root, 1)))}  # each by its first name
    saving = [named for named in reversed(modules.values()) if _saves_in_its_own_way(named.module)]
    if not saving:
        return []
    storages = {_storage_of(each.tensor) for named in modules.values() for each in tensors_of(named)} - {None}
    return list(dict.fromkeys(key for named in saving for key in _added_at(named, storages)))


def _saves_in_its_own_way(module: nn.Module) -> bool:
    made = cast("Any", module)
    hooks = cast("dict[int, object]", getattr(module, "_state_dict_hooks", {}))
    return not all(map(is_torchs, (made.state_dict, made._save_to_state_dict, *hooks.values())))


def is_torchs(code: object) -> bool:
    """Tell whether torch itself has it, whose wrappers only rename what their modules hold."""
    code = code.func if isinstance(code, functools.partial) else code
    return str(getattr(code, "__module__", "")).partition(".")[0] == "torch"


def _added_at(named: NamedModule, storages: set[int | None]) -> Iterator[str]:
    """Yield the keys for which the module has neither a tensor of that name nor that tensor under another name."""
    module = named.module
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for key, value in _flat(cast("Mapping[str, object]", module.state_dict())):
        if key not in names and _storage_of(value) not in storages:
            yield named.prefix + key


def _flat(state: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in state.items():
        if str(key).endswith(_EXTRA_STATE):
            continue
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _storage_of(value: object) -> int | None:
    """Return what a tensor's memory is known by, whatever part of it the tensor is; None: no plain tensor."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return None
    tensor = cast("torch.Tensor", value)
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None
