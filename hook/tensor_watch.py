"""Proof that tensors look and lie as they did: type, dtype, device, shape, strides, gradient, address.

Of many tensors all is asked in one call: by facts that torch tells other libraries in C (tensor_facts.c), where
that was compiled; else by what guards compiled code in torch, and a list of addresses, in twice the time.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast

import torch

from .lazy_leaves import Noted, noted

_MemoryOf = Callable[[torch.Tensor], torch.UntypedStorage]
_Told = tuple[bytes, list[int], list[torch.UntypedStorage]]

facts: "Callable[[object, tuple[torch.Tensor, ...], int, _MemoryOf], _Told] | None"
try:
    from ._tensor_facts import facts
except ImportError:  # no compiler was there when everstep was installed
    facts = None

CHUNK = 1024
"""Tensors compared in one call: so many stay in the processor's caches between the address and the rest."""

_NOT_TOLD = AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError
"""What torch raises where a tensor, or a DLPack, is one of which it cannot tell."""

_Look = Callable[[], Noted | None]
"""Returns what the lazy ones of some tensors are now; None where not all are as they were."""


class _Guards(Protocol):
    def check(self, *tensors: torch.Tensor) -> bool: ...


class TensorWatch:
    """What tensors looked like when this was made; it keeps them alive."""

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        lazy: Sequence[torch.Tensor] = (),
        graded: Iterable[torch.Tensor] = (),
    ) -> None:
        """Look at the tensors. Those of them that are `lazy`, each once, are noted whenever they are looked at.

        Of those that are not `graded` it does not matter whether they require gradients.
        """
        is_lazy = set(map(id, lazy))
        others = {id(tensor): tensor for tensor in tensors if id(tensor) not in is_lazy}
        ordered = (*lazy, *others.values())
        self._graded = tuple({id(tensor): tensor for tensor in graded}.values())
        self._require_gradients = self._read_gradients()
        with torch.enable_grad():  # without, torch's guards do not look at requires_grad
            self._looks = [
                _look_at(ordered[begin : begin + CHUNK], lazy[begin : begin + CHUNK])
                for begin in range(0, len(ordered), CHUNK)
            ]

    def look(self) -> Noted | None:
        """Return what the lazy ones are now, in their order; None where not all tensors are as they were."""
        found = Noted([], [])
        if self._read_gradients() != self._require_gradients:
            return None
        try:
            with torch.enable_grad():
                for look in self._looks:
                    now = look()
                    if now is None:
                        return None
                    found.versions.extend(now.versions)
                    found.storages.extend(now.storages)
        except _NOT_TOLD:  # one has no address any more, or has become another thing
            return None
        return found

    def _read_gradients(self) -> list[bool]:
        return list(map(_requires_gradient, self._graded))


_requires_gradient = cast("Callable[[torch.Tensor], bool]", attrgetter("requires_grad"))


def _look_at(tensors: tuple[torch.Tensor, ...], lazy: Sequence[torch.Tensor]) -> _Look:
    """Look at tensors, of which the lazy ones come first; return what looks again."""
    # They are given as they are to calls that take them all.
    by_facts = _by_facts(tensors, len(lazy))
    if by_facts is not None:
        return by_facts
    holds = _with_addresses(tensors, _by_guard(tensors) or _by_attributes(tensors))
    return lambda: noted(lazy) if holds() else None


def _by_facts(tensors: tuple[torch.Tensor, ...], lazy_count: int) -> _Look | None:
    """All at once, proven on the spot, or None."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if facts is None or exchange is None or any(map(_is_stored_otherwise, tensors)):
        return None
    halves, bytes_ = tuple(filter(_may_be_half, tensors)), tuple(filter(_is_of_bytes, tensors))
    tell = partial(facts, exchange, tensors, lazy_count, torch.Tensor.untyped_storage)
    dtypes = list(map(_dtype_of, bytes_))
    try:
        seen, _, _ = tell()
    except _NOT_TOLD:
        return None

    def look() -> Noted | None:
        now, versions, storages = tell()
        if now != seen or any(map(torch.Tensor.is_neg, halves)) or list(map(_dtype_of, bytes_)) != dtypes:
            return None
        return Noted(versions, storages)

    return look


_dtype_of = cast("Callable[[torch.Tensor], torch.dtype]", attrgetter("dtype"))


def _is_stored_otherwise(tensor: torch.Tensor) -> bool:
    """Tell whether its memory may hold conjugates or negatives of its values, which facts do not tell."""
    return tensor.is_complex() or tensor.is_neg()


def _may_be_half(tensor: torch.Tensor) -> bool:
    """Tell whether these may be imaginary halves of complex numbers, which may become negatives where they lie."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.is_floating_point() and not any(step == 1 and size > 1 for size, step in extents)


def _is_of_bytes(tensor: torch.Tensor) -> bool:
    """Tell whether each element takes a byte: by DLPack's facts, integers of fewer bits look the same."""
    return tensor.dtype in {torch.int8, torch.uint8}


def _with_addresses(tensors: tuple[torch.Tensor, ...], look: Callable[[], bool]) -> Callable[[], bool]:
    def read() -> list[int]:
        return list(map(torch.Tensor.data_ptr, tensors))

    seen = read()
    return lambda: look() and read() == seen


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
