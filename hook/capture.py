"""What a checkpoint takes from the objects at a boundary: leaves, each byte of memory once, and values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ..checkpoint.leaf import Alias, LeafSpec
from ..core.errors import UsageError
from .state_protocol import Captured, Laziness, TensorLeaf
from .tensor_bytes import byte_range, dense_or_copy, describe, dtype_name, require_plain


@dataclass(slots=True)
class StateCapture:
    """The state at one boundary, by reference: nothing is copied but tensors that are not dense.

    The order of leaves and aliases and the choice of holders are a function of the objects' structure, so that two
    captures of an unchanged structure give equal specs and one layout.
    """

    leaves: tuple[TensorLeaf, ...]
    aliases: tuple[Alias, ...]
    values: dict[str, object]
    """One JSON-able document per component."""
    specs: dict[str, LeafSpec] = field(repr=False)
    """Specs of all tensors by name, aliases included; they spare the next capture some of its work."""


@dataclass(slots=True)
class _Entry:
    spec: LeafSpec
    tensor: torch.Tensor
    laziness: Laziness
    address: int
    size_bytes: int


class _Sink:
    """Collects the leaves of all components; `component` is the one that speaks."""

    def __init__(self, known: Mapping[str, LeafSpec]) -> None:
        self._known = known
        self.entries: dict[str, _Entry] = {}
        self.values: dict[str, object] = {}
        self.component = ""

    def leaf(self, name: str, tensor: torch.Tensor, laziness: Laziness, *, replicas: int = 1) -> None:
        if name in self.entries:
            raise UsageError(f"two leaves are named {name!r}", hint="rename one of the two")
        require_plain(tensor, name)
        dense, copied = dense_or_copy(tensor)
        address, size_bytes = byte_range(dense)
        self.entries[name] = _Entry(
            spec=self._spec(name, dense, replicas),
            tensor=dense,
            laziness=Laziness.EAGER if copied else laziness,
            address=address,
            size_bytes=size_bytes,
        )

    def _spec(self, name: str, tensor: torch.Tensor, replicas: int) -> LeafSpec:
        """The spec of the last capture when nothing of it changed: making one takes several times as long."""
        known = self._known.get(name)
        if (
            known is not None
            and known.shape == tensor.shape
            and known.strides == tensor.stride()
            and known.dtype == dtype_name(tensor.dtype)
            and known.replicas == replicas
        ):
            return known
        return describe(name, tensor, replicas=replicas)

    def free_name(self, name: str) -> str:
        free, number = name, 1
        while free in self.entries:
            number += 1
            free = f"{name}#{number}"
        return free

    def value(self, document: object) -> None:
        self.values[self.component] = document


def capture_state(components: Iterable[Captured], *, previous: StateCapture | None = None) -> StateCapture:
    """Return the state of the components as it is now, in their order.

    `previous` is the last capture of the same components, if any: it makes this one faster and nothing else.

    Raises:
        UsageError: two leaves of one name, or an optimizer's parameter without a name.
        StateTypeError: something cannot be saved; the message names the path to it.
    """
    sink = _Sink({} if previous is None else previous.specs)
    for component in components:
        sink.component = component.name
        component.capture(sink)
    holders, aliases = _find_aliases(list(sink.entries.values()))
    return StateCapture(
        leaves=tuple(holders),
        aliases=tuple(aliases),
        values=sink.values,
        specs={name: entry.spec for name, entry in sink.entries.items()},
    )


def _find_aliases(entries: list[_Entry]) -> tuple[list[TensorLeaf], list[Alias]]:
    """Split tensors into those that hold bytes and those whose bytes lie inside another's.

    The holder is the one with the largest range, then the first by name; tensors that overlap without one lying in
    the other are both stored. Sorted by address and falling size, a range can only lie in the last one that was
    not inside another.
    """
    by_device: dict[torch.device, list[_Entry]] = {}
    for entry in entries:
        if entry.size_bytes:
            by_device.setdefault(entry.tensor.device, []).append(entry)
    inside: dict[str, _Entry] = {}
    for found in by_device.values():
        found.sort(key=lambda entry: (entry.address, -entry.size_bytes, entry.spec.name))
        holder: _Entry | None = None
        for entry in found:
            if holder is not None and entry.address + entry.size_bytes <= holder.address + holder.size_bytes:
                inside[entry.spec.name] = holder
                holder.laziness = _stricter(holder.laziness, entry.laziness)
            else:
                holder = entry
    leaves = [
        TensorLeaf(entry.spec, entry.tensor, entry.laziness)
        for entry in entries
        if entry.spec.name not in inside
    ]
    aliases = [_alias(entry, inside[entry.spec.name]) for entry in entries if entry.spec.name in inside]
    return leaves, aliases


def _stricter(one: Laziness, other: Laziness) -> Laziness:
    """What both allow: a mixture of OWNED and FROZEN is nobody's promise."""
    return one if one is other else Laziness.EAGER


def _alias(entry: _Entry, holder: _Entry) -> Alias:
    return Alias(
        name=entry.spec.name,
        of=holder.spec.name,
        offset_bytes=entry.address - holder.address,
        dtype=entry.spec.dtype,
        shape=entry.spec.shape,
        strides=entry.spec.strides,
    )
