"""Who owns a sample: the one question to ask between this node's memory and storage.

One node has one answer. With several, whose names the daemon gives, a reader that misses asks its daemon for what a
peer owns, and reads from its own source what is owned here, or what no peer has. A hit never asks.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .owner_plan import MIX_1, MIX_2, STRIDE, Owners, members_of

Words = npt.NDArray[np.uint64]


class Placement(Protocol):
    """A pure function of (sample id, members)."""

    def owner(self, index: int) -> str | None:
        """Return the address of the node that keeps sample `index`; None: this one."""
        ...

    def elsewhere(self, indices: Sequence[int]) -> list[int]:
        """Return those of the samples that other nodes keep, in their order."""
        ...


class ThisNode:
    """Every sample is owned by the node that reads it."""

    def owner(self, index: int) -> str | None:
        """Return None."""
        return None

    def elsewhere(self, indices: Sequence[int]) -> list[int]:
        """Return none of them."""
        return []


class AmongNodes:
    """Samples are owned by the members, of which this node may be one."""

    def __init__(self, fingerprint: str, members: Sequence[str], me: str) -> None:
        self._owners = Owners(fingerprint, members_of(members))
        self._me = me
        self._keys = np.array(self._owners.keys, dtype=np.uint64)
        self._my_place = self._owners.members.index(me) if me in self._owners.members else -1

    def owner(self, index: int) -> str | None:
        """Return the name of the member that keeps it; None: this node."""
        name = self._owners.owner(index)
        return None if name == self._me else name

    def elsewhere(self, indices: Sequence[int]) -> list[int]:
        """Return those that other members keep: the same answers as `owner`, computed for all at once."""
        numbers = np.asarray(indices, dtype=np.uint64)
        best = np.argmax(_mix(numbers[:, None] * np.uint64(STRIDE) + self._keys[None, :]), axis=1)
        return [int(each) for each in numbers[best != self._my_place]]


def placement(fingerprint: str, members: Sequence[str], me: str) -> Placement:
    """Return who owns what when these are the members."""
    if not members or list(members) == [me]:
        return ThisNode()
    return AmongNodes(fingerprint, members, me)


def _mix(words: Words) -> Words:
    """Return `owner_plan.mix` of each word; numpy's integers wrap at 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX_2)
    return words ^ (words >> np.uint64(31))
