"""What the training loop moves and nobody attached, so that no checkpoint holds it: each kind is said once.

Only what goes on from one iteration into the next is part of the training state: a loader whose loop was running at two
boundaries one after the other, an optimizer that stepped before a boundary and after it. A loader that an evaluation
reads from begin to end, or an optimizer that lives within an iteration, needs no checkpoint.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..dataloader.loader import iterated_loaders
from .loaders import LOADERS, AnyLoader

_DEPTH = 3
"""How deep an attached object is searched for what its own state_dict may speak of."""


class Forgotten:
    """Watches loaders at boundaries, and by a hook the optimizers of this process; `tell` gets an event and a text."""

    def __init__(self, objects: Mapping[str, object], tell: Callable[[str, str], None]) -> None:
        self._objects, self._tell = objects, tell
        self._attached = {id(value) for value in objects.values()}
        self._boundaries = 0
        self._in_loop: weakref.WeakKeyDictionary[AnyLoader, tuple[int, int] | None] = (
            weakref.WeakKeyDictionary()
        )
        self._stepped: dict[int, tuple[weakref.ref[Optimizer], int | None]] = {}
        """By id, since not all have a hash: before which boundary it was seen first; None: it needs no checkpoint."""
        self._told_loader = self._told_optimizer = False
        self._handle: RemovableHandle | None = register_optimizer_step_post_hook(_weakly(self))
        weakref.finalize(self, self._handle.remove)

    def boundary(self) -> None:
        """A boundary was passed."""
        self._boundaries += 1
        if self._told_optimizer:
            self.close()
        if not self._told_loader:
            for loader in iterated_loaders():
                if id(loader) not in self._attached:
                    self._look_at(loader)

    def close(self) -> None:
        """Take the hook out."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look_at(self, loader: AnyLoader) -> None:
        before, now = self._in_loop.get(loader), loader.in_loop
        self._in_loop[loader] = now
        goes_on = before is not None and now is not None and before[0] == now[0] and before[1] < now[1]
        if goes_on and not self._told_loader and id(loader) not in self._held():
            self._told_loader = True
            self._tell(
                "loader_not_attached",
                f"the loop is fed by an everstep.{type(loader).__name__} that was not attached: a restart begins its "
                "epoch anew, and samples come twice; attach(..., loader=loader)",
            )

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer of this process has stepped, whosever it is."""
        if id(optimizer) in self._attached or self._told_optimizer or self._handle is None:
            return
        known, first = self._stepped.get(id(optimizer), (None, None))
        if known is None or known() is not optimizer:
            number, stepped = id(optimizer), self._stepped
            gone = weakref.ref(optimizer, lambda _: stepped.pop(number, None))
            stepped[number] = gone, self._boundaries
            return
        if first is None or first == self._boundaries:
            return
        self._stepped[id(optimizer)] = known, None
        if (name := self._owner_of(optimizer)) and id(optimizer) not in self._held():
            self._told_optimizer = (
                True  # the hook goes at the boundary: torch is going through all of them now
            )
            self._tell(
                "optimizer_not_attached",
                f"a {type(optimizer).__name__} steps parameters of {name!r} and was not attached: its state is in no "
                "checkpoint; attach(..., optimizer=optimizer)",
            )

    def _owner_of(self, optimizer: Optimizer) -> str:
        """Return which attached module has a parameter of the optimizer; empty: none."""
        parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, value in self._objects.items():
            if isinstance(value, nn.Module) and any(id(each) in parameters for each in value.parameters()):
                return name
        return ""

    def _held(self) -> set[int]:
        return _held_by(self._objects.values())


def _held_by(values: Iterable[object]) -> set[int]:
    """Return the ids of what attached objects hold, whose own state may speak of it.

    A module's state_dict speaks of modules only, and a schedule's of numbers, though it knows its optimizer.
    """
    speaking = [value for value in values if not isinstance(value, (nn.Module, LRScheduler, *LOADERS))]
    found: set[int] = set()
    for _ in range(_DEPTH):
        speaking = [part for value in speaking for part in _parts(value) if id(part) not in found]
        found |= {id(part) for part in speaking}
    return found


def _parts(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple | set):
        return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return list(getattr(value, "__dict__", {}).values())


def _weakly(forgotten: Forgotten) -> Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]:
    """Return the hook, which keeps nothing alive and is nothing to a compiler."""
    reference = weakref.ref(forgotten)

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if torch.compiler.is_compiling():
            return
        watching = reference()
        if watching is not None:
            watching.stepped(optimizer)

    return hook
