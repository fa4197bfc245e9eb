"""What a checkpoint takes from the objects at a boundary: leaves, each byte of memory once, and values.

A walk makes names, specs and aliases of every leaf, several microseconds each. What it found in the containers of
modules and optimizers stands until one of its watches says otherwise; then only the rest is read, as it is each time.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import attrgetter
from typing import TypeVar, cast

import torch

from ..checkpoint.leaf import NAME_LENGTH_MAX, Alias, LeafSpec
from ..checkpoint.value_format import is_utf8, not_utf8
from ..core.errors import StateTypeError, UsageError
from .lazy_leaves import LazyLeaves, is_small_vector, noted
from .memory_ranges import Ranges
from .state_protocol import Captured, Laziness, TensorLeaf, Walked, Watch
from .tensor_bytes import (
    byte_range,
    dense_or_copy,
    describe,
    dtype_name,
    require_dtype,
    require_memory,
    require_plain,
)
from .tensor_watch import TensorWatch

_T = TypeVar("_T")

_SHOWN = 80
"""Characters of a name that is too long."""

AT_ONCE_BYTES_MAX = 1024
"""A leaf of host memory so small is copied at the boundary, whatever may change it: 0.7 µs each, without the GIL.
To note what it is and to compare it later takes twice as long, with the GIL (2 cores, 2026-11-22; bench/boundary)."""


@dataclass(slots=True)
class StateCapture:
    """The state at one boundary, by reference: nothing is copied but tensors that are not dense.

    The order of leaves and aliases and the choice of holders are a function of the objects' structure, so that two
    captures of an unchanged structure give equal specs and one layout.
    """

    parts: "Sequence[_Part]" = field(repr=False)
    """Keep the leaves."""
    aliases: tuple[Alias, ...]
    values: dict[str, object]
    """One JSON-able document per component."""
    specs: tuple[LeafSpec, ...]
    """Of the leaves, in their order; so are the next three."""
    at_once: tuple[bool, ...]
    """Those that are copied at the boundary; the others may wait."""
    devices: tuple[int, ...]
    """Numbers of CUDA devices; -1: host memory."""
    addresses: tuple[int, ...]
    lazy: LazyLeaves
    """Those that wait; they keep memory of the state."""
    known: dict[str, LeafSpec] = field(repr=False)
    """Specs of all tensors by name, aliases included; they spare the next capture some of its work."""
    walk: "_Walk | None" = field(repr=False)
    """What the next capture need not find again; None: all."""
    walked: bool
    """This capture has walked all containers."""

    @property
    def leaves(self) -> tuple[TensorLeaf, ...]:
        """All of them, joined at each look."""
        return _all(part.leaves for part in self.parts)


@dataclass(slots=True)
class _Entry:
    spec: LeafSpec
    tensor: torch.Tensor
    laziness: Laziness
    address: int
    size_bytes: int
    original: torch.Tensor
    """The live tensor, of which `tensor` may be a copy."""

    @property
    def end(self) -> int:
        """The address behind its last byte."""
        return self.address + self.size_bytes

    @property
    def is_copy(self) -> bool:
        """Tell whether the live tensor is not dense."""
        return self.tensor is not self.original

    @property
    def reach(self) -> tuple[int, int]:
        """The address of the live tensor's first byte and that behind its last one, holes included."""
        return _reach_of(self.original) if self.is_copy else (self.address, self.end)

    @property
    def at_once(self) -> bool:
        """Tell whether it is copied at the boundary: because it must be, or since that is the least work."""
        is_small = self.size_bytes <= AT_ONCE_BYTES_MAX and not self.tensor.is_cuda
        return is_small or self.laziness is Laziness.EAGER


def _depends_on_gradient(entry: _Entry) -> bool:
    """Tell whether it may matter to how lazy an entry is that it requires a gradient."""
    if entry.laziness is not Laziness.OWNED:
        return True
    return isinstance(entry.original, torch.nn.Parameter) and is_small_vector(entry.original)


def _reach_of(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class _Form:
    """What some leaves look like: the same from one boundary to the next while the structure is."""

    aliases: tuple[Alias, ...]
    specs: tuple[LeafSpec, ...]
    at_once: tuple[bool, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some leaves of one component."""

    form: _Form
    leaves: tuple[TensorLeaf, ...]
    addresses: tuple[int, ...]
    copies: tuple[tuple[int, torch.Tensor], ...]
    """Leaves that are copies, and what they are copies of."""

    def current(self) -> "_Part":
        """Return the same leaves, with new copies."""
        if not self.copies:
            return self
        leaves, addresses = list(self.leaves), list(self.addresses)
        for index, original in self.copies:
            copy, _ = dense_or_copy(original)
            leaves[index] = TensorLeaf(leaves[index].spec, copy, leaves[index].laziness)
            addresses[index] = copy.data_ptr()
        return replace(self, leaves=tuple(leaves), addresses=tuple(addresses))

    def without_copies(self) -> "_Part":
        """Return the same, with what was copied in the place of the copies: to be kept until `current`."""
        if not self.copies:
            return self
        leaves = list(self.leaves)
        for index, original in self.copies:
            leaves[index] = TensorLeaf(leaves[index].spec, original, leaves[index].laziness)
        return replace(self, leaves=tuple(leaves))


class _Memory:
    """The memory of some leaves."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._held = Ranges(entry.reach for entry in entries if not entry.is_copy)
        self._viewed = Ranges(entry.reach for entry in entries if entry.is_copy)

    def touches(self, entry: _Entry) -> bool:
        """Tell whether another entry has memory in common with these, so that one must not wait as it would alone."""
        if self._held.touch(entry.reach):
            return True
        return entry.laziness is not Laziness.EAGER and self._viewed.touch(entry.reach)


class _Walk:
    """What the containers of all `Walked` components held, and the proof that they still do."""

    def __init__(
        self,
        parts: dict[str, _Part],
        watches: list[Watch],
        held: list[_Entry],
        inside: dict[str, _Entry],
        memory: _Memory,
    ) -> None:
        self.parts, self.memory = parts, memory
        self.names = {entry.spec.name for entry in held}
        self._watches = list(dict.fromkeys(watches))  # some are of several components
        self._lazy_names, self._lazy, self._lazy_addresses = _watched(held, inside)
        graded = [entry.original for entry in held if _depends_on_gradient(entry)]
        self._tensors = TensorWatch((entry.original for entry in held), self._lazy, graded)
        self._forms: list[_Form] = []
        self._form = _joined_form(self._forms)
        self._addresses_by_part: list[tuple[int, ...]] = []
        self._addresses: tuple[int, ...] = ()

    def addresses_of(self, parts: Sequence[_Part]) -> tuple[int, ...]:
        """Return the addresses of all parts together: the very same tuple as long as none has changed."""
        found = [part.addresses for part in parts]
        if found != self._addresses_by_part:
            self._addresses_by_part, self._addresses = found, _all(found)
        return self._addresses

    def form_of(self, parts: Sequence[_Part]) -> _Form:
        """Return the form of all parts together, as it was the last time unless one of theirs has changed."""
        forms = [part.form for part in parts]
        if forms != self._forms:
            self._forms, self._form = forms, _joined_form(forms)
        return self._form

    def look(self) -> LazyLeaves | None:
        """Return its lazy leaves as they are now, or None when something else has changed."""
        if not all(watch.holds() for watch in self._watches):
            return None
        found = self._tensors.look()
        return found and LazyLeaves(self._lazy_names, self._lazy, self._lazy_addresses, found)


class _Sink:
    """Collects the leaves of all components; `component` is the one that speaks."""

    def __init__(self, known: dict[str, LeafSpec], taken: Set[str] = frozenset()) -> None:
        self._known = known
        self._taken = taken
        self._names: set[str] = set()
        self._entries: list[_Entry] = []
        self._copies: dict[int, torch.Tensor] = {}
        """By id of the tensor, which its entry keeps alive: under each of its names it has the same bytes."""
        self.values: dict[str, object] = {}
        self.component = ""

    def take(self) -> list[_Entry]:
        """Return what was collected since the last call.

        Raises:
            StateTypeError: one has no memory for all its elements.
        """
        taken, self._entries = self._entries, []
        # One after the other: so lie the objects that stand for memory, which each boundary looks at in this order.
        for entry in taken:
            require_memory(entry.original, entry.spec.name)
        return taken

    def leaf(self, name: str, tensor: torch.Tensor, laziness: Laziness, *, replicas: int = 1) -> None:
        if self._has(name):
            raise UsageError(f"two leaves are named {name!r}", hint="rename one of the two")
        require_plain(tensor, name)
        require_dtype(tensor, name)
        if not tensor.is_contiguous():  # it may be copied at once
            require_memory(tensor, name)
        dense, copied = dense_or_copy(tensor)
        if copied:
            dense = self._copies.setdefault(id(tensor), dense)
        address, size_bytes = byte_range(dense)
        self._names.add(name)
        self._entries.append(
            _Entry(
                spec=self._spec(name, dense, replicas),
                tensor=dense,
                laziness=Laziness.EAGER if copied else laziness,
                address=address,
                size_bytes=size_bytes,
                original=tensor,
            )
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
        _require_name(name)
        return describe(name, tensor, replicas=replicas)

    def free_name(self, name: str) -> str:
        free, number = name, 1
        while self._has(free):
            number += 1
            free = f"{name}#{number}"
        return free

    def _has(self, name: str) -> bool:
        return name in self._names or name in self._taken

    def value(self, document: object) -> None:
        self.values[self.component] = document


def _require_name(name: str) -> None:
    if len(name) > NAME_LENGTH_MAX:
        raise StateTypeError(
            f"{name[:_SHOWN]}… has a name of {len(name)} characters, more than {NAME_LENGTH_MAX}, and cannot be saved",
            hint="shorten the names of modules, or the keys on the path to it",
        )
    if not is_utf8(name):
        raise not_utf8(name)


def capture_state(components: Sequence[Captured], *, previous: StateCapture | None = None) -> StateCapture:
    """Return the state of the components as it is now, in their order.

    `previous` is the last capture of the same components, if any: it makes this one faster and nothing else. Where it
    is of no use it is told so, and will not be of use again.

    Raises:
        UsageError: two leaves of one name, or an optimizer's parameter without a name.
        StateTypeError: something cannot be saved; the message names the path to it.
    """
    walk = previous.walk if previous is not None else None
    known = previous.known if previous is not None else {}
    if walk is not None and (lazy := walk.look()) is not None:
        capture = _capture_rest(components, walk, lazy, known)
        if capture is not None:
            return capture
    if previous is not None:
        previous.walk = None  # the components forget what it found, though this one may end in an error
    return _capture_all(components, known)


def _capture_rest(
    components: Sequence[Captured], walk: _Walk, lazy: LazyLeaves, known: dict[str, LeafSpec]
) -> StateCapture | None:
    """Return a capture of which only that is read anew which no watch watches; None where memory is shared with it."""
    sink = _Sink(known, walk.names)
    read: list[tuple[str, list[_Entry]]] = []
    for component in components:
        sink.component = component.name
        if component.name in walk.parts:
            cast("Walked", component).rest(sink)
        else:
            component.capture(sink)
        read.append((component.name, sink.take()))
    entries = [entry for _, found in read for entry in found]
    if any(map(walk.memory.touches, entries)):
        return None
    known |= {entry.spec.name: entry.spec for entry in entries}
    inside = _find_aliases(entries)
    parts: list[_Part] = []
    for name, found in read:
        if name in walk.parts:
            parts.append(walk.parts[name].current())
        parts.append(_part(found, inside))
    lazy = lazy.followed_by(_lazy_of(entries, inside))
    return _joined(parts, sink.values, lazy, known, walk, walked=False)


def _capture_all(components: Sequence[Captured], known: dict[str, LeafSpec]) -> StateCapture:
    sink, watches = _Sink(known), list[Watch]()
    found: list[tuple[str, list[_Entry] | None, list[_Entry]]] = []
    for component in components:
        sink.component = component.name
        held: list[_Entry] | None = None
        if isinstance(component, Walked):
            watches += component.walk(sink)
            held = sink.take()
            component.rest(sink)
        else:
            component.capture(sink)
        found.append((component.name, held, sink.take()))
    everything = [entry for _, held, rest in found for entry in (*(held or ()), *rest)]
    all_held = [entry for _, held, _ in found for entry in held or ()]
    memory = _Memory(all_held)
    crossing = any(memory.touches(entry) for _, _, rest in found for entry in rest)
    inside = _find_aliases(everything)
    parts = {name: _part(held, inside) for name, held, _ in found if held is not None}
    kept = {name: part.without_copies() for name, part in parts.items()}
    joined: list[_Part] = []
    for name, _, rest in found:
        joined += [parts[name]] if name in parts else []
        joined.append(_part(rest, inside))
    return _joined(
        joined,
        sink.values,
        _lazy_of(everything, inside),
        {entry.spec.name: entry.spec for entry in everything},
        None if crossing else _Walk(kept, watches, all_held, inside, memory),
        walked=True,
    )


def _joined(
    parts: Sequence[_Part],
    values: dict[str, object],
    lazy: LazyLeaves,
    known: dict[str, LeafSpec],
    walk: _Walk | None,
    *,
    walked: bool,
) -> StateCapture:
    if walk is not None:
        form, addresses = walk.form_of(parts), walk.addresses_of(parts)
    else:
        form, addresses = _joined_form([each.form for each in parts]), _all(each.addresses for each in parts)
    return StateCapture(
        parts=parts,
        aliases=form.aliases,
        values=values,
        specs=form.specs,
        at_once=form.at_once,
        devices=form.devices,
        addresses=addresses,
        lazy=lazy,
        known=known,
        walk=walk,
        walked=walked,
    )


def _joined_form(forms: Sequence[_Form]) -> _Form:
    return _Form(
        aliases=_all(form.aliases for form in forms),
        specs=_all(form.specs for form in forms),
        at_once=_all(form.at_once for form in forms),
        devices=_all(form.devices for form in forms),
    )


def _all(items: Iterable[tuple[_T, ...]]) -> tuple[_T, ...]:
    return tuple(chain.from_iterable(items))


def _part(entries: Sequence[_Entry], inside: dict[str, _Entry]) -> _Part:
    holders = [entry for entry in entries if entry.spec.name not in inside]
    form = _Form(
        aliases=tuple(
            _alias(entry, inside[entry.spec.name]) for entry in entries if entry.spec.name in inside
        ),
        specs=tuple(map(attrgetter("spec"), holders)),
        at_once=tuple(map(attrgetter("at_once"), holders)),
        devices=tuple(entry.tensor.get_device() for entry in holders),
    )
    return _Part(
        form=form,
        leaves=tuple(TensorLeaf(entry.spec, entry.tensor, entry.laziness) for entry in holders),
        addresses=tuple(map(attrgetter("address"), holders)),
        copies=tuple((index, entry.original) for index, entry in enumerate(holders) if entry.is_copy),
    )


def _lazy_of(entries: Iterable[_Entry], inside: Mapping[str, _Entry]) -> LazyLeaves:
    names, tensors, addresses = _watched(entries, inside)
    return LazyLeaves(names, tensors, addresses, noted(tensors))


def _watched(
    entries: Iterable[_Entry], inside: Mapping[str, _Entry]
) -> tuple[list[str], list[torch.Tensor], list[int]]:
    """Return names, tensors and addresses of what must not change until the lazy leaves are copied.

    Aliases are among them, each tensor object once: one that was set by `.data` counts its own versions, and what is
    written through it moves no other's.
    """
    found: dict[int, _Entry] = {}
    for entry in entries:
        if not inside.get(entry.spec.name, entry).at_once:
            found.setdefault(id(entry.tensor), entry)
    return (
        [entry.spec.name for entry in found.values()],
        [entry.tensor for entry in found.values()],
        [entry.address for entry in found.values()],
    )


def _find_aliases(entries: Sequence[_Entry]) -> dict[str, _Entry]:
    """Return the entries whose bytes lie inside another's: their names, with the entry that holds the bytes.

    The holder is the one with the largest range, then the first by name; tensors that overlap without one lying in
    the other are both stored, and wait as long as all of them may. Sorted by address and falling size, a range can
    only lie in the last one that was not inside another.
    """
    by_device: dict[torch.device, list[_Entry]] = {}
    for entry in entries:
        if entry.size_bytes:
            by_device.setdefault(entry.tensor.device, []).append(entry)
    _hurry_what_is_viewed(entries)
    inside: dict[str, _Entry] = {}
    for found in by_device.values():
        found.sort(key=lambda entry: (entry.address, -entry.size_bytes, entry.spec.name))
        together: list[_Entry] = []
        """Holders that overlap, each with the one before."""
        for entry in found:
            holder = together[-1] if together else None
            if holder is not None and entry.end <= holder.end:
                inside[entry.spec.name] = holder
                holder.laziness = _stricter(holder.laziness, entry.laziness)
                continue
            if holder is not None and holder.end <= entry.address:
                _wait_alike(together)
                together = []
            together.append(entry)
        _wait_alike(together)
    return inside


def _hurry_what_is_viewed(entries: Iterable[_Entry]) -> None:
    """A view with holes is copied now, and may be written to at any time: what it looks at does not wait either."""
    viewed = [entry.reach for entry in entries if entry.is_copy]
    if viewed:
        ranges = Ranges(viewed)
        for entry in entries:
            if entry.laziness is not Laziness.EAGER and ranges.touch(entry.reach):
                entry.laziness = Laziness.EAGER


def _wait_alike(overlapping: Sequence[_Entry]) -> None:
    """What may change one of them changes the others: they wait as the strictest."""
    if len(overlapping) > 1:
        laziness = reduce(_stricter, (entry.laziness for entry in overlapping))
        for entry in overlapping:
            entry.laziness = laziness


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
