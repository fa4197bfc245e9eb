"""Proof that tensors look and lie as they did: type, dtype, device, shape, strides, gradient, address.

A state of ten thousand tensors does not stay in a processor's caches: all that is asked of one is asked at once.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Protocol, cast

import torch

from .lazy_leaves import Noted, noted

CHUNK = 1024
"""Tensors compared in one call: so many stay in the processor's caches between the address and the rest."""


class _Guards(Protocol):
    def check(self, *tensors: torch.Tensor) -> bool: ...


class TensorWatch:
    """What tensors looked like when this was made; it keeps them alive."""

    def __init__(self, tensors: Iterable[torch.Tensor], lazy: Sequence[torch.Tensor] = ()) -> None:
        """Look at the tensors. Those of them that are `lazy`, each once, are noted whenever they are looked at."""
        is_lazy = set(map(id, lazy))
        others = {id(tensor): tensor for tensor in tensors if id(tensor) not in is_lazy}
        ordered = (*lazy, *others.values())
        with torch.enable_grad():  # without, torch's guards do not look at requires_grad
            self._chunks = [
                _Chunk(ordered[begin : begin + CHUNK], lazy[begin : begin + CHUNK])
                for begin in range(0, len(ordered), CHUNK)
            ]

    def look(self) -> Noted | None:
        """Return what the lazy ones are now, in their order; None where not all tensors are as they were."""
        found = Noted([], [])
        try:
            with torch.enable_grad():
                for chunk in self._chunks:
                    if not chunk.holds():
                        return None
                    now = noted(chunk.lazy)
                    found.versions.extend(now.versions)
                    found.storages.extend(now.storages)
        except RuntimeError:  # one has no address any more
            return None
        return found


class _Chunk:
    def __init__(self, tensors: tuple[torch.Tensor, ...], lazy: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors  # given as they are to a call that takes them all
        self.lazy = lazy
        self._addresses = self._read_addresses()
        self._look = _by_guard(tensors) or _by_attributes(tensors)

    def holds(self) -> bool:
        return self._look() and self._read_addresses() == self._addresses

    def _read_addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))


def _by_guard(tensors: tuple[torch.Tensor, ...]) -> Callable[[], bool] | None:
    """All but the addresses by one call of what guards compiled code, proven on the spot, or None.

    It takes a quarter of the time of reading shape and strides, which makes two tuples a tensor. But the class is
    torch's own affair.
    """
    try:
        guard = _guard(tensors)
        if not guard.check(*tensors):
            return None
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return None
    return lambda: guard.check(*tensors)


def _guard(tensors: tuple[torch.Tensor, ...]) -> _Guards:
    library = cast("Any", torch)  # that it has this at all is not in its annotations
    make = cast("Callable[..., _Guards]", library._C._dynamo.guards.TensorGuards)
    return make(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


_ATTRIBUTES = attrgetter("shape", "dtype", "layout", "device", "requires_grad")
_METHODS = (torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg)


def _by_attributes(tensors: tuple[torch.Tensor, ...]) -> Callable[[], bool]:
    def look() -> list[list[object]]:
        methods: list[list[object]] = [list(map(method, tensors)) for method in _METHODS]
        return [list(map(type, tensors)), list(map(_ATTRIBUTES, tensors)), *methods]

    seen = look()
    return lambda: look() == seen
