"""Leaves that are copied after the boundary: what nobody but a hooked optimizer may change until then."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import torch

from ..core.errors import UsageError

STATISTICS_BYTES_MAX = 1024 * 1024
"""Running statistics have a number for each channel; what is larger is none."""


def is_small_vector(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has the form of running statistics."""
    return tensor.dim() == 1 and tensor.nbytes <= STATISTICS_BYTES_MAX


def may_be_statistics(tensor: torch.Tensor) -> bool:
    """Tell whether `batch_norm` or `instance_norm` may write it, which torch does not count: then it must not wait."""
    return not tensor.requires_grad and is_small_vector(tensor)


@dataclass(frozen=True, slots=True)
class Noted:
    """Tensors at one moment: how often each has been written, and its memory, which this keeps.

    Whoever sets `.data` frees the memory that a tensor had: memmove would not survive it, and what is allocated there
    next and set as `.data` again would look as if nothing had moved.
    """

    versions: list[int]
    storages: list[torch.UntypedStorage]


def noted(tensors: Sequence[torch.Tensor]) -> Noted:
    """Note what these tensors are now."""
    return Noted(_versions_of(tensors), list(map(torch.Tensor.untyped_storage, tensors)))


@dataclass(frozen=True, slots=True)
class LazyLeaves:
    """Leaves as they were at a boundary; all sequences in one order."""

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    noted: Noted

    def check(self) -> None:
        """Raise UsageError when one has moved or been written since."""
        addresses, versions = list(map(torch.Tensor.data_ptr, self.tensors)), _versions_of(self.tensors)
        if addresses == self.addresses and versions == self.noted.versions:
            return
        found = zip(addresses, versions, strict=True)
        seen = zip(self.addresses, self.noted.versions, strict=True)
        differing = zip(self.names, found, seen, strict=True)
        changed, now, then = next((name, now, then) for name, now, then in differing if now != then)
        hint = "wrap code that writes to it outside an optimizer in `with run.mutating():`"
        if now[0] != then[0]:
            hint = (
                "it was given other memory, as by `.data =` or by flatten_parameters() in forward: do that once before "
                "training, or in `with run.mutating():`"
            )
        raise UsageError(
            f"{changed} changed while its snapshot was being copied; the snapshot was dropped", hint=hint
        )

    def followed_by(self, other: "LazyLeaves") -> "LazyLeaves":
        """Return the leaves of both."""
        if not other.names:
            return self
        return LazyLeaves(
            [*self.names, *other.names],
            [*self.tensors, *other.tensors],
            [*self.addresses, *other.addresses],
            Noted(self.noted.versions + other.noted.versions, self.noted.storages + other.noted.storages),
        )


NONE = LazyLeaves([], [], [], Noted([], []))

_read_version = attrgetter("_version")


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return list(map(_read_version, tensors))
    except RuntimeError:  # one made in inference mode has none, and may be written to in inference mode alone
        return [0 if tensor.is_inference() else cast("int", _read_version(tensor)) for tensor in tensors]
