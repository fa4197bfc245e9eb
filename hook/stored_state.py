"""A verified checkpoint of one rank as the hook reads it: leaves' bytes from memory, values from the manifest."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from msgspec import Struct

from ..checkpoint.leaf import LeafSpec
from ..checkpoint.manifest_types import Manifest
from ..checkpoint.shard_rules_plan import is_dense
from ..checkpoint.value_format import load_documents
from ..core.errors import CorruptDataError, StateMismatchError
from .leaf_bytes import LeafBytes
from .tensor_bytes import byte_range, copy_bits, normal_strides, torch_dtype

logger = logging.getLogger(__name__)

IMPORTED_NOTE = "imported"
"""A checkpoint whose notes have this came from other tools (`everstep import`) and may lack components."""


class _Place(Struct, frozen=True, gc=False):
    """Which bytes of which leaf a name stands for: all of it, or an alias's part."""

    spec: LeafSpec
    holder: str
    offset_bytes: int


class StoredState:
    """The leaves and values of one rank's shard of a checkpoint. Not for several threads at once."""

    def __init__(self, manifest: Manifest, leaves: LeafBytes) -> None:
        """Take the values from the manifest and the tensors' bytes from `leaves`, which may still be coming: until they
        are all there, only `values`, `names`, `spec` and `fits` may be asked.

        Raises:
            CorruptDataError: the values or an alias do not fit the manifest.
        """
        self.manifest = manifest
        self._leaves = leaves
        self._documents = load_documents(manifest.values)
        self._places = {leaf.name: _Place(_dense(leaf), leaf.name, 0) for leaf in manifest.leaves}
        self._places.update(_alias_places(manifest))
        self._shared = {alias.of for alias in manifest.aliases}
        self._closed = False

    @property
    def is_imported(self) -> bool:
        """Tell whether another tool has written the checkpoint that this was made of."""
        return IMPORTED_NOTE in self.manifest.notes

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that the checkpoint has."""
        return tuple(self._documents)

    def values(self, component: str) -> object:
        """Return the JSON document of a component. Raises StateMismatchError when the checkpoint has none of it."""
        if component not in self._documents:
            raise StateMismatchError(
                f"checkpoint {self.manifest.checkpoint} has no state of {component!r}",
                hint=f"it has {', '.join(self._documents) or 'none at all'}: attach the same objects",
            )
        return self._documents[component]

    def __contains__(self, name: str) -> bool:
        """Tell whether a leaf or alias of this name was stored."""
        return name in self._places

    def names(self, prefix: str) -> list[str]:
        """Return the names of the leaves and aliases that begin with `prefix`, leaves first."""
        return [name for name in self._places if name.startswith(prefix)]

    def spec(self, name: str) -> LeafSpec:
        """Return what a leaf or alias looks like. Raises StateMismatchError when there is none of that name."""
        return self._place(name).spec

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the dtype and shape of a leaf, so that `copy_to` may write into it."""
        spec = self._place(name).spec
        plain = tensor.layout is torch.strided
        return plain and tuple(tensor.shape) == spec.shape and tensor.dtype == torch_dtype(spec.dtype)

    def lies_in(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a leaf's bytes are just what a tensor's memory has to hold: then they may arrive there."""
        place = self._place(name)
        return place.holder == name and self.fits(name, tensor) and _same_memory_order(tensor, place.spec)

    def copy_to(self, name: str, tensor: torch.Tensor) -> None:
        """Write a leaf into an existing tensor's memory, bit for bit.

        Raises:
            StateMismatchError: no such leaf, or another dtype or shape.
        """
        place = self._place(name)
        spec = place.spec
        if not self.fits(name, tensor):
            raise StateMismatchError(
                f"{name} is {spec.dtype} {list(spec.shape)} in the checkpoint,"
                f" {str(tensor.dtype)[6:]} {list(tensor.shape)} here",
                hint="build the objects as they were when the checkpoint was made",
            )
        if _same_memory_order(tensor, spec):
            self._read(place, byte_range(tensor)[0])
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return
        copy_bits(self.tensor(name), to=tensor)

    def tensor(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Return a new tensor with the stored bytes, dtype, shape and strides, on the CPU or `device`.

        Raises:
            StateMismatchError: no such leaf.
        """
        made = self._hand_over(self._place(name))
        if made is None:
            made = self.copy_of(name)
        return made if device is None else made.to(device)

    def copy_of(self, name: str) -> torch.Tensor:
        """Return a new CPU tensor with the stored bytes, dtype, shape and strides; the leaf can be read again."""
        place = self._place(name)
        spec = place.spec
        made = torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device="cpu")
        self._read(place, made.data_ptr())
        return made

    def holder_of(self, name: str) -> tuple[str, int]:
        """Return (leaf, offset in bytes) of the bytes that a name stands for; a leaf holds its own at 0."""
        place = self._place(name)
        return place.holder, place.offset_bytes

    def holder_bytes(self, holder: str) -> torch.Tensor:
        """Return all bytes of a leaf as a new CPU tensor of uint8."""
        place = self._place(holder)
        made = torch.empty(place.spec.size_bytes, dtype=torch.uint8, device="cpu")
        self._read(place, made.data_ptr())
        return made

    def close(self) -> None:
        """Let the bytes go; only `values`, `names` and `spec` work afterwards. Again is nothing."""
        self._closed = True
        self._leaves.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise StateMismatchError(
                f"checkpoint {self.manifest.checkpoint} has no leaf {name!r}",
                hint="build the objects as they were when the checkpoint was made",
            )
        return place

    def _read(self, place: _Place, to_address: int) -> None:
        """Copy the bytes of a place to consecutive memory."""
        begin, end = place.offset_bytes, place.offset_bytes + place.spec.size_bytes
        self._check_open()
        if begin != end:
            self._leaves.read(place.holder, begin, end, to_address)

    def _hand_over(self, place: _Place) -> torch.Tensor | None:
        """Return a whole leaf as a tensor that nobody else has, where there is such."""
        self._check_open()
        whole = place.holder == place.spec.name and place.holder not in self._shared
        return self._leaves.hand_over(place.holder) if whole else None

    def _check_open(self) -> None:
        if self._closed:
            raise CorruptDataError("the checkpoint was closed; its bytes cannot be read any more")


@dataclass(frozen=True, slots=True)
class _Live:
    """A tensor that exists and has its part of a leaf's bytes."""

    begin: int
    """Of the part, in the leaf."""
    end: int
    origin: int
    """Where the leaf's first byte would be: tensors of one origin share the bytes that both have."""
    octets: torch.Tensor | None
    """Its memory; None where the elements lie in another order there."""

    def view(self, begin: int, spec: LeafSpec) -> torch.Tensor | None:
        """Return what a name stands for as a view of the tensor's memory, where it can be one."""
        dtype, offset_bytes = torch_dtype(spec.dtype), begin - self.begin
        if self.octets is None or offset_bytes < 0 or begin + spec.size_bytes > self.end:
            return None
        if (self.octets.storage_offset() + offset_bytes) % dtype.itemsize:
            return None
        part = self.octets[offset_bytes : offset_bytes + spec.size_bytes]
        return part.view(dtype).as_strided(spec.shape, spec.strides)


@dataclass(frozen=True, slots=True)
class _LiveTensors:
    """Those that have bytes of one leaf, on one device."""

    parts: dict[tuple[int, int], _Live] = field(default_factory=dict[tuple[int, int], _Live])
    """By their parts, of which some optimizers have thousands."""
    origins: set[int] = field(default_factory=set[int])
    """Nearly always one."""

    def near(self, begin: int, end: int) -> list[_Live]:
        """Return the one that has just this part, else those that have any of it, in the order they came."""
        same = self.parts.get((begin, end))
        if same is not None:
            return [same]
        return [each for each in self.parts.values() if each.begin < end and begin < each.end]

    def add(self, new: _Live) -> bool:
        """Know one more, and tell whether it lies in one that is known, or as all do that have bytes of it.

        The first one of a part stays: weights come before what may lie on them.
        """
        near = [] if self.origins <= {new.origin} else self.near(new.begin, new.end)
        agrees = all(each.origin == new.origin for each in near) or any(
            each.origin == new.origin and each.begin <= new.begin and new.end <= each.end for each in near
        )
        known = self.parts.setdefault((new.begin, new.end), new)
        if known.octets is None and known.origin == new.origin:
            self.parts[new.begin, new.end] = new
        self.origins.add(new.origin)
        return agrees


class TensorMaker:
    """Makes new tensors from a stored state; those that shared memory when saved share it again.

    Also with tensors that exist, of which it is told.
    """

    def __init__(self, stored: StoredState) -> None:
        """Make a family of tensors; sharing is kept among the tensors of one maker and device."""
        self._stored = stored
        self._shared = {alias.of for alias in stored.manifest.aliases}
        self._live: dict[tuple[str, torch.device], _LiveTensors] = {}
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}

    def share(self, name: str, tensor: torch.Tensor) -> bool:
        """Let what shared a leaf's memory share that of the tensor which the leaf has been put into.

        Return False where a tensor told of before had some of that memory, and has it elsewhere now.
        """
        if name not in self._stored or not self._stored.fits(name, tensor):
            return True
        (holder, begin), spec = self._stored.holder_of(name), self._stored.spec(name)
        if holder not in self._shared or not spec.size_bytes:
            return True
        octets: torch.Tensor | None = None
        if has_memory_order(tensor, spec):
            octets = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        live = self._live.setdefault((holder, tensor.device), _LiveTensors())
        return live.add(_Live(begin, begin + spec.size_bytes, tensor.data_ptr() - begin, octets))

    def make(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a new tensor with the stored bytes, dtype, shape and strides.

        It is a copy, of which the log tells, where a part of its memory was a tensor's that exists and stays.
        """
        holder, begin = self._stored.holder_of(name)
        spec = self._stored.spec(name)
        dtype, key = torch_dtype(spec.dtype), (holder, device)
        if holder not in self._shared or not spec.size_bytes:
            return self._stored.tensor(name, device)
        view = self._view(key, begin, spec)
        if view is not None:
            return view
        if begin % dtype.itemsize:
            return self._stored.tensor(name, device)
        if key not in self._made:
            self._made[key] = self._stored.holder_bytes(holder).to(device)
        part = self._made[key][begin : begin + spec.size_bytes].view(dtype)
        return part.as_strided(spec.shape, spec.strides)

    def _view(self, key: tuple[str, torch.device], begin: int, spec: LeafSpec) -> torch.Tensor | None:
        near = self._live[key].near(begin, begin + spec.size_bytes) if key in self._live else []
        for each in near:
            view = each.view(begin, spec)
            if view is not None:
                return view
        if near:
            say_apart(spec.name)
        return None


def say_apart(leaf: str) -> None:
    """Warn that training goes on without what the leaf's tensor shared."""
    logger.warning(
        "memory_apart leaf=%s: it shared memory with a weight, or with another tensor that stays where it is,"
        " when they were saved, and is a copy now: have it made, on the same memory, before restore()",
        leaf,
    )


def _alias_places(manifest: Manifest) -> Iterator[tuple[str, _Place]]:
    sizes = {leaf.name: leaf for leaf in manifest.leaves}
    for alias in manifest.aliases:
        holder = sizes.get(alias.of)
        if holder is None:
            raise CorruptDataError(f"alias {alias.name!r} stands for the unknown leaf {alias.of!r}")
        spec = LeafSpec(
            name=alias.name,
            dtype=alias.dtype,
            shape=alias.shape,
            strides=alias.strides,
            replicas=holder.replicas,
            global_shape=alias.shape,
            global_offset=(0,) * len(alias.shape),
        )
        if alias.offset_bytes < 0 or alias.offset_bytes + spec.size_bytes > holder.size_bytes:
            raise CorruptDataError(f"alias {alias.name!r} reaches beyond leaf {alias.of!r}")
        yield alias.name, _Place(_dense(spec), alias.of, alias.offset_bytes)


def _dense(spec: LeafSpec) -> LeafSpec:
    """The spec again; bytes are moved to memory of exactly this shape and strides, which must have room for them."""
    if not is_dense(spec.shape, spec.strides):
        raise CorruptDataError(f"leaf {spec.name!r} has the strides {list(spec.strides)}, which leave holes")
    return spec


def _same_memory_order(tensor: torch.Tensor, spec: LeafSpec) -> bool:
    """Tell whether the stored bytes are the tensor's memory as it lies, so that a memmove is the whole copy."""
    return tensor.device.type == "cpu" and has_memory_order(tensor, spec)


def has_memory_order(tensor: torch.Tensor, spec: LeafSpec) -> bool:
    """Tell whether the stored bytes are the tensor's memory as it lies, on whatever device."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return spec.size_bytes == 0 or normal_strides(tuple(tensor.shape), tensor.stride()) == spec.strides
