"""Proof that modules and optimizers hold the tensors that a walk found: what makes the next walk needless."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn

from .containers import Contents, Lists, Table
from .identity import same

CACHES = "_non_persistent_buffers_set"
"""Attribute of a module: its buffers that are not in state_dict()."""

_tables_of = attrgetter("_parameters", "_buffers", "_modules")
_caches_of = cast("Callable[[nn.Module], set[str]]", attrgetter(CACHES))
_norm_of = attrgetter("max_norm")
_held_of = attrgetter("_parameters", "_buffers", "_modules", CACHES)


class ModulesWatch:
    """Proof that modules have the children, parameters and buffers that they had."""

    def __init__(self, modules: Iterable[nn.Module], sparse: Sequence[torch.Tensor]) -> None:
        """Look at the modules, each once, however many names it has; `sparse` are the tensors that are not dense."""
        self._sparse = sparse
        self._modules = list({id(module): module for module in modules}.values())
        self._types = list(map(type, self._modules))
        tables = list[Table](chain.from_iterable(map(_tables_of, self._modules)))
        # A scripted module shows wrappers, made anew at each look: it is walked each time.
        plain = all(isinstance(table, dict) for table in tables)
        self._provable = plain and all(hasattr(module, CACHES) for module in self._modules)
        self._contents = Contents(tables if self._provable else ())
        self._held = tuple(self._read_held()) if self._provable else ()
        self._caches = list(map(_caches_of, self._modules)) if self._provable else []
        self._cached = list(map(set[str], self._caches))
        self._embeddings = [
            each for each in self._modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        ]
        self._norms = list(map(_norm_of, self._embeddings))

    def holds(self) -> bool:
        """Tell whether a walk would find the same modules and tensors under the same names."""
        return (
            self._provable
            and list(map(type, self._modules)) == self._types
            and same(self._read_held(), self._held)
            and self._contents.hold()
            and self._caches == self._cached
            and list(map(_norm_of, self._embeddings)) == self._norms
            and not any(map(is_plain_tensor, self._sparse))
        )

    def _read_held(self) -> Iterator[object]:
        return chain.from_iterable(map(_held_of, self._modules))


class GroupsWatch:
    """Proof that the groups of optimizers have the parameters, and names for them, that they had."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Look at the optimizers. The sequence is read again: one that joins it is a change."""
        self._optimizers = optimizers
        self._parameters = Lists(self._lists())
        self._names = self._read_names()

    def holds(self) -> bool:
        """Tell whether the groups are as they were, whatever became of their hyper-parameters."""
        return self._parameters.hold(self._lists()) and self._read_names() == self._names

    def _lists(self) -> list[list[torch.Tensor]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def _read_names(self) -> list[list[list[str]]]:
        return [
            [list(cast("list[str]", group.get("param_names") or ())) for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]


class StateWatch:
    """Proof that an optimizer's state has the plain tensors that it had, each under its parameter and key."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the state. What is no plain tensor in it may change, but not become one."""
        self._optimizer = optimizer
        self._states = Contents([self._state], is_loose=_is_no_dict)
        tables = [cast("Table", table) for table in self._state.values() if not _is_no_dict(table)]
        self._tensors = Contents(tables, is_loose=_is_no_plain_tensor)

    def holds(self) -> bool:
        """Tell whether a walk would find the same tensors."""
        return self._has_same_entries() and self._states.hold() and self._tensors.hold()

    def _has_same_entries(self) -> bool:
        """Of a state that an optimizer joins of others', a new dict at each look, too."""
        now, (seen,) = self._state, self._states.tables
        if now is seen:
            return True
        return same(now, tuple(seen)) and same(now.values(), tuple(seen.values()))

    @property
    def _state(self) -> Mapping[Any, object]:
        return self._optimizer.state


def is_plain_tensor(value: object) -> bool:
    """Tell whether it is a dense tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_no_plain_tensor(value: object) -> bool:
    return not is_plain_tensor(value)


def _is_no_dict(value: object) -> bool:
    return not isinstance(value, dict)
