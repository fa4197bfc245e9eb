"""What a component of the training state is, and how it hands its leaves and values to a capture."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ..checkpoint.leaf import LeafSpec

if TYPE_CHECKING:
    from .stored_state import StoredState


class Laziness(Enum):
    """When a leaf may be copied: what is allowed to change it after the boundary."""

    EAGER = "eager"
    """At the boundary: anything may change it afterwards (buffers, EMA copies, RNG states, user objects)."""
    OWNED = "owned"
    """Until the next step of a hooked optimizer: the tensor is in its `param_groups` or `state`."""
    FROZEN = "frozen"
    """A parameter without gradient in no optimizer: its data_ptr and _version are compared before sealing."""


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """One tensor of a capture, with where it is described.

    `tensor` is the live tensor, whose elements fill `spec.size_bytes` consecutive bytes from `data_ptr()` in the
    order of `spec.strides`. Only where the live tensor is not dense (expanded, sliced, a lazy conjugate) it is a
    row-major copy made at the boundary, and the leaf is EAGER. It may require grad: read it under `no_grad`.
    """

    spec: LeafSpec
    tensor: torch.Tensor
    laziness: Laziness


class Sink(Protocol):
    """Takes what one component contributes to a capture."""

    def leaf(self, name: str, tensor: torch.Tensor, laziness: Laziness, *, replicas: int = 1) -> None:
        """Add a tensor under its full leaf name.

        Raises:
            UsageError: the name is taken.
            StateTypeError: a tensor whose bytes cannot be read (meta, sparse, quantised, a wrapper subclass, …).
        """
        ...

    def free_name(self, name: str) -> str:
        """Return `name`, or `name#2`, `name#3`, … when the capture has such a leaf: the same in every capture."""
        ...

    def value(self, document: object) -> None:
        """Set the component's JSON-able document; called once per capture."""
        ...


class Captured(Protocol):
    """What a snapshot can be taken of. Leaf names begin with `<name>.`."""

    @property
    def name(self) -> str:
        """The keyword that was given to `attach()`."""
        ...

    def capture(self, sink: Sink) -> None:
        """Hand over every leaf and the document, as they are now. Changes nothing."""
        ...


class Watch(Protocol):
    """Proof of what a walk found, by a number of Python operations that does not grow with the state."""

    def holds(self) -> bool:
        """Tell whether another walk would find the same leaves. False is always allowed, and costs the walk."""
        ...


@runtime_checkable
class Walked(Captured, Protocol):
    """One most of whose leaves hang in containers that stay as they are between boundaries: `walk`, then `rest`."""

    def walk(self, sink: Sink) -> Sequence[Watch]:
        """Hand over the leaves that hang in containers; return what proves later that they still hang there."""
        ...

    def rest(self, sink: Sink) -> None:
        """Hand over every other leaf, as it is now, and the document, by what the last walk found."""
        ...


class Component(Captured, Protocol):
    """One part of the training state. All calls happen on the training thread, between iterations."""

    @property
    def checks_bytes(self) -> bool:
        """Tell whether `check` reads leaves, and not only what they look like: then they are read first of all."""
        ...

    def check(self, stored: "StoredState") -> None:
        """Return if `apply` would succeed; changes nothing.

        Raises:
            StateMismatchError: the stored state does not fit the objects; the message names the first differences.
        """
        ...

    def apply(self, stored: "StoredState") -> None:
        """Put the stored state in place, bit for bit, into the tensors that exist where they fit."""
        ...
